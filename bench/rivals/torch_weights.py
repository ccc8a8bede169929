"""The weights of a jspec `Decoder` as torch tensors, by the names that transformers gives them.

Both rivals of decoding use them, so that neither reads a checkpoint again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.rivals.common import module
from jspec.config import Rope
from jspec.models.decoder import Decoder
from jspec.models.families.llama import MODULES

FAMILIES = ("llama", "qwen2")
SPECIAL = "qk_norm sinks post_norms centered_norms embedding_scale logit_softcap latent experts"


def refusal(model: Decoder) -> str | None:
    """Why the rivals cannot compute ``model``, or None.

    They compute Llama and Qwen2: equal layers of full attention, a SwiGLU, one dtype.
    """
    config, spec = model.config, model.config.layers[0]
    if config.family not in FAMILIES:
        return f"it computes {' and '.join(FAMILIES)}, not family={config.family!r}"
    special = [name for name in SPECIAL.split() if getattr(config, name)]
    if config.activation != "silu":
        special.append(f"activation={config.activation}")
    if special:
        return f"it computes no model with {', '.join(special)}"
    plain = spec.key_size == spec.value_size and not spec.values_in_keys
    if set(config.layers) != {spec} or not plain or any((spec.window, spec.softcap, spec.scale)):
        return "it computes equal layers of full attention alone"
    kinds = {str(getattr(x, "dtype", type(x).__name__)) for x in jax.tree.leaves(model)}
    if kinds != {str(model.dtype)}:
        return f"it computes weights of one dtype, not of {', '.join(sorted(kinds))}"
    return None


def device() -> str:
    """The torch device that the rivals use."""
    return "cuda" if module("torch").cuda.is_available() else "cpu"


def tensor(array: Any) -> Any:
    """A finished copy of a JAX array as a contiguous tensor on `device`.

    JAX cannot donate a buffer that torch refers to, and may write a freed one before torch's stream
    has read it.
    """
    torch = module("torch")
    view = torch.from_dlpack(jax.block_until_ready(jnp.asarray(array)))
    copy = torch.empty(view.shape, dtype=view.dtype, device=device()).copy_(view)
    if copy.is_cuda:
        torch.cuda.synchronize()
    return copy


def weights(model: Decoder) -> dict[str, Any]:
    """Copies of all weights by transformers' parameter names, kernels as ``[out, in]``.

    Args:
        model: a decoder for which `refusal` is None.

    Returns:
        Contiguous tensors of the model's dtype on `device`. Tied embeddings have no
        ``lm_head.weight``.
    """
    tensors = {
        "model.embed_tokens.weight": tensor(model.embedding[...]),
        "model.norm.weight": tensor(model.norm.scale[...]),
    }
    if model.head is not None:
        tensors |= _projection("lm_head", model.head)
    for index, layer in enumerate(model.layers):
        block: Any = layer
        names = {key: f"model.layers.{index}.{name}" for key, name in MODULES.items()}
        for key in ("attention_norm", "mlp_norm"):
            tensors[f"{names[key]}.weight"] = tensor(getattr(block, key).scale[...])
        for joined in (block.attention.qkv, block.mlp.gate_up):
            for part in joined.parts:
                tensors |= _projection(names[part.module], joined, part.of)
        tensors |= _projection(names["attention.out"], block.attention.out)
        tensors |= _projection(names["mlp.down"], block.mlp.down)
    return tensors


def _projection(name: str, linear: Any, part: Callable[[Any], Any] = lambda x: x) -> dict[str, Any]:
    """Weight ``[out, in]`` and bias ``[out]`` of a ``part`` of a linear map."""
    kernel = part(linear.kernel[...])
    tensors = {f"{name}.weight": tensor(kernel.reshape(kernel.shape[0], -1).T)}
    if linear.bias is not None:
        tensors[f"{name}.bias"] = tensor(part(linear.bias[...]).reshape(-1))
    return tensors


def transformers_model(model: Decoder) -> Any:
    """``LlamaForCausalLM`` or ``Qwen2ForCausalLM`` with the weights of ``model``, on `device`.

    It uses ``scaled_dot_product_attention``.

    Raises:
        ValueError: transformers' model of the same settings has other parameters.
    """
    torch, library = module("torch"), module("transformers")
    config, spec = model.config, model.config.layers[0]
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.key_size,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_parameters": rope_parameters(config.ropes[spec.rope]),
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.family == "llama":
        settings |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
        kind, setting = library.LlamaForCausalLM, library.LlamaConfig(**settings)
    else:
        kind, setting = library.Qwen2ForCausalLM, library.Qwen2Config(**settings)
    tensors = weights(model)
    dtype = tensors["model.embed_tokens.weight"].dtype
    with torch.device(device()):
        theirs = kind._from_config(setting, dtype=dtype, attn_implementation="sdpa").eval()
    parameters = dict(theirs.named_parameters())
    if different := sorted(parameters.keys() ^ tensors.keys()):
        raise ValueError(f"only one of jspec and transformers has parameters {different[:4]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors.pop(name))
    return theirs


def rope_parameters(rope: Rope) -> dict[str, Any]:
    """A rotary embedding as transformers' ``rope_parameters``."""
    scaling = rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    fields: dict[str, Any] = {"rope_type": scaling.kind, "rope_theta": rope.theta}
    fields["factor"] = scaling.factor
    if scaling.kind == "linear":
        return fields
    fields["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        return fields | {"low_freq_factor": low, "high_freq_factor": high}
    fields |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return fields | {"attention_factor": scaling.attention_factor, "truncate": scaling.truncate}
