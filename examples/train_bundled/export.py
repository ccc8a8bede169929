"""The trained parameters as a Hugging Face directory: int8 weights, settings, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from examples.train_bundled.checkpoint import named
from jspec.config import ModelConfig
from jspec.models.families import family
from jspec.models.joined import separate
from jspec.models.token_bytes import byte_alphabet

MAX_FILE_BYTES = 16 * 2**20
SPECIAL_TOKENS = ("<|bos|>", "<|end|>", "<|pad|>", "<|reserved|>")  # ids 256 and on

BLOCKS = "layers/0/blocks/"  # the stacked layers among our parameters
FAMILY = family("qwen3")


def quantise(kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``(int8 [out, in], scale float32 [out, 1])`` of ``kernel [in, out]``, symmetric by output."""
    weight = np.asarray(kernel, np.float32).T
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12) / np.float32(127)
    return np.rint(weight / scale).clip(-127, 127).astype(np.int8), scale


def shipped_tensors(parameters: nnx.State, config: ModelConfig) -> dict[str, np.ndarray]:
    """Tensors of ``model.safetensors`` by their names in the file."""
    tensors = {}
    for name, value in apart(named(parameters), config).items():
        theirs = FAMILY.stored_name(name)
        if name.endswith(".kernel"):
            weight, scale = quantise(value.reshape(len(value), -1))
            tensors[theirs] = np.ascontiguousarray(weight)
            tensors[f"{theirs}_scale"] = scale
        else:
            tensors[theirs] = value.astype(ml_dtypes.bfloat16)
    return tensors


def parameters_of(
    tensors: dict[str, np.ndarray], like: nnx.State, config: ModelConfig
) -> nnx.State:
    """The float32 training parameters the shipped tensors stand for; ``like`` has their form."""
    leaves = {name: np.empty(leaf.shape, np.float32) for name, leaf in named(like).items()}
    for name, place in apart(leaves, config).items():
        theirs = FAMILY.stored_name(name)
        value = tensors[theirs]
        if name.endswith(".kernel"):
            value = (value * tensors[f"{theirs}_scale"]).T
        place[...] = value.reshape(place.shape)
    return jax.tree.unflatten(jax.tree.structure(like), list(leaves.values()))


def apart(ours: dict[str, np.ndarray], config: ModelConfig) -> dict[str, np.ndarray]:
    """Views of our parameters, a layer and a projection each, by the names that jspec has apart."""
    views = {}
    for name, leaf in ours.items():
        if not name.startswith(BLOCKS):
            views[name.replace("/", ".")] = leaf
            continue
        within = name.removeprefix(BLOCKS).replace("/", ".")
        for layer in range(config.num_layers):
            views |= separate(config, f"layers.{layer}.{within}", leaf[layer])
    return views


def export(folder: Path, parameters: nnx.State, config: ModelConfig) -> nnx.State:
    """Write the directory, read it back, and return the parameters as shipped (float32 arrays)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = shipped_tensors(parameters, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config(config), indent=2) + "\n")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    stored = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if stored[name].dtype != tensor.dtype or not np.array_equal(stored[name], tensor):
            raise RuntimeError(f"{folder}/model.safetensors does not give back {name}")
    if (size := (folder / "model.safetensors").stat().st_size) >= MAX_FILE_BYTES:
        raise RuntimeError(f"model.safetensors has {size} bytes; the limit is {MAX_FILE_BYTES}")
    return parameters_of(stored, parameters, config)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` for `transformers`' Qwen3, with the quantisation of compressed-tensors."""
    spec = config.layers[0]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.key_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0].theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_layers,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "pad_token_id": 258,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "channel",
                        "dynamic": False,
                    },
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": ["lm_head"],
        },
    }


def byte_tokenizer() -> Tokenizer:
    """A BPE without merges: byte b is token b, the special tokens follow from 256 on.

    A document opens with the first of them, as every training row does.
    """
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    begin_token = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin_token} $A", special_tokens=[(begin_token, 256)]
    )
    return tokenizer
