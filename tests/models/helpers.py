"""What the tests of models share: logits through the cache, and making checkpoints by hand."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from safetensors.numpy import load_file, save_file

from jspec import Cache, Decoder, LinearLayout, ModelConfig
from jspec.policies import DenseAttend

GOLDEN = Path(__file__).parent.parent / "golden"

LLAMA = {
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@jax.jit
def _step(model: Decoder, tokens: jax.Array, positions: jax.Array, cache: Cache):
    hidden, cache = model(tokens, positions, DenseAttend(positions), cache)
    return model.logits(hidden), cache


def logits_of(model: Decoder, tokens: np.ndarray, chunks: Sequence[Sequence[int]]) -> np.ndarray:
    """Logits of ``tokens [B, T]`` through a cache whose unused slots hold NaN.

    A chunk gives each row's number of new tokens, ragged; every row's sum must be T.
    """
    batch, length = tokens.shape
    out = np.full((batch, length, model.config.vocab_size), np.nan, np.float32)
    specs = model.config.layers
    cache = Cache.create(specs, [LinearLayout(length)] * len(specs), batch, model.dtype)
    cache = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, jnp.nan), cache)
    done = np.zeros(batch, np.int32)
    width = max(max(chunk) for chunk in chunks)
    for chunk in chunks:
        new = np.asarray(chunk, np.int32)[:, None]
        columns = np.arange(width, dtype=np.int32)[None]
        positions = np.where(columns < new, done[:, None] + columns, -1)
        new_tokens = np.take_along_axis(tokens, np.maximum(positions, 0), axis=1)
        logits, cache = _step(model, jnp.asarray(new_tokens), jnp.asarray(positions), cache)
        for row in range(batch):
            count = chunk[row]
            out[row, done[row] : done[row] + count] = logits[row, :count]
        done += new[:, 0]
        cache = cache.with_lengths(jnp.asarray(done))
    assert (done == length).all()
    return out


def one_pass(tokens: np.ndarray) -> list[list[int]]:
    return [[tokens.shape[1]] * tokens.shape[0]]


def ragged(tokens: np.ndarray, seed: int = 0) -> list[list[int]]:
    """A prompt of unequal lengths, then chunks of 0 to 5 tokens a row, then one by one."""
    rng = np.random.default_rng(seed)
    left = np.full(tokens.shape[0], tokens.shape[1])
    chunks = []
    while left.any():
        new = np.minimum(rng.integers(0, 6 if left.max() > 24 else 2, len(left)), left)
        chunks.append(new.tolist())
        left -= new
    return chunks


def shapes_of(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama checkpoint without biases, written out from the sizes."""
    hidden, intermediate, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries, keys = (
        config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads")
    )
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        block = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return shapes


# Without layer and leaf: names in a Llama file, and what jspec calls them apart.
MODULES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}


def apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A Llama file's tensors in jspec's layout, each projection apart."""
    arrays = {}
    for name, value in tensors.items():
        match name.removeprefix("model.").removesuffix(".weight").split(".", 2):
            case ["embed_tokens"]:
                arrays["embedding"] = value
            case ["lm_head"]:
                arrays["head.kernel"] = value.T
            case ["norm"]:
                arrays["norm.scale"] = value
            case ["layers", layer, module]:
                leaf, array = ("kernel", value.T) if value.ndim == 2 else ("scale", value)
                arrays[f"layers.{layer}.{MODULES[module]}.{leaf}"] = array
    assert len(arrays) == len(tensors)
    return arrays


def together(arrays: dict[str, np.ndarray], kv_heads: int) -> dict[str, np.ndarray]:
    """Arrays apart as the decoder has them: q, k and v by KV head, gate and up in two rows."""
    joined = dict(arrays)
    for name in arrays:
        if name.endswith((".q.kernel", ".q.bias")):
            parts = [joined.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
            rows = [part.reshape(*part.shape[:-1], kv_heads, -1) for part in parts]
            joined[name.replace(".q.", ".qkv.")] = np.concatenate(rows, axis=-1)
        if name.endswith((".gate.kernel", ".gate.bias")):
            pair = joined.pop(name), joined.pop(name.replace(".gate.", ".up."))
            joined[name.replace(".gate.", ".gate_up.")] = np.stack(pair, axis=-2)
    return joined


def write_checkpoint(path: Path, config: dict | None = None, **settings) -> Path:
    """A checkpoint with random float32 weights; ``settings`` override those of `LLAMA`."""
    config = {**(config or LLAMA), **settings}
    rng = np.random.default_rng(0)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes_of(config).items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def write_apart(path: Path, config: ModelConfig, arrays: dict[str, np.ndarray]) -> Path:
    """What `save_model` wrote at format 2, when each projection was an array of its own."""
    path.mkdir()
    with ocp.StandardCheckpointer() as checkpointer:
        # From another device than they will be on.
        place = jax.devices()[-1]
        stored = {name: jax.device_put(array, place) for name, array in arrays.items()}
        checkpointer.save(path.absolute() / "arrays", stored)
    settings = {"format": 2, "config": dataclasses.asdict(config)}
    (path / "jspec.json").write_text(json.dumps(settings))
    return path


def edit_config(path: Path, **settings) -> None:
    """Set fields of config.json; ``...`` removes one."""
    config = json.loads((path / "config.json").read_text()) | settings
    config = {key: value for key, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, **changes: np.ndarray | None) -> None:
    """Replace tensors of model.safetensors by name; None removes one."""
    tensors = load_file(path / "model.safetensors") | changes
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def parameters(model: Decoder) -> dict[str, np.ndarray]:
    """Every parameter by its dotted name."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {".".join(map(str, key)): np.asarray(value.get_value()) for key, value in flat}


def assert_equal(model: Decoder, expected: dict[str, np.ndarray]) -> None:
    ours = parameters(model)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert ours[name].dtype == value.dtype, name
        np.testing.assert_array_equal(ours[name], value, err_msg=name)
