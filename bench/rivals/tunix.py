"""Tunix's own sampler, with the weights of a model of jspec, and its interface of rollouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jspec
from bench.rivals.common import module
from examples.grpo import of_next

TUNIX = "tunix"


def actor_of(model: jspec.Decoder, param_dtype: Any = None, dtype: Any = None) -> nnx.Module:
    """Tunix's model with the weights of ``model``, of ``param_dtype``, that computes in ``dtype``,
    None for those of the model.

    Its Qwen3 where queries and keys have norms, else its Qwen2, with biases of 0 if there are none:
    its Llama3 rotates by 1,000,000 whatever the model's config says, and so does Qwen3.

    Raises:
        ValueError: for a model that neither of them can be.
    """
    config = model.config
    theta = config.ropes[0].theta
    if config.family not in ("llama", "qwen2", "qwen3") or (config.qk_norm and theta != 1e6):
        raise ValueError(f"Tunix has no model for {config.family} with rope_theta={theta}")
    name, kind = ("qwen3", "Qwen3") if config.qk_norm else ("qwen2", "Qwen2")
    package = module(f"tunix.models.{name}.model")
    spec = config.layers[0]
    theirs = package.ModelConfig(
        num_layers=config.num_layers,
        vocab_size=config.vocab_size,
        embed_dim=config.hidden_size,
        hidden_dim=config.intermediate_size,
        num_heads=config.num_heads,
        head_dim=spec.key_size,
        num_kv_heads=spec.kv_heads,
        rope_theta=theta,
        norm_eps=config.norm_eps,
        use_tied_embedding=config.tie_embeddings,
        dtype=dtype or model.dtype,
        param_dtype=param_dtype or model.dtype,
    )
    shapes = nnx.eval_shape(lambda: getattr(package, kind)(theirs, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(shapes)
    weights = _split_weights(nnx.to_pure_dict(nnx.state(model)), config.num_heads)
    nnx.replace_by_pure_dict(state, jax.tree.map(lambda x: x.astype(theirs.param_dtype), weights))
    return nnx.merge(graph, state)


@dataclasses.dataclass
class Prompts:
    """A tokenizer as Tunix takes it, of prompts by their numbers: ``encode("3")`` is ``ids[3]``.

    Attributes:
        tokenizer: which decodes.
        ids: of each prompt.
        unused: a token that no text has: Tunix attends to no padding.
    """

    tokenizer: jspec.Tokenizer
    ids: Sequence[Sequence[int]]
    unused: int

    @classmethod
    def of(
        cls, tokenizer: jspec.Tokenizer, model: jspec.Decoder, ids: Sequence[Sequence[int]]
    ) -> Prompts:
        stops = model.config.stop_tokens
        return cls(tokenizer, ids, max(x for x in tokenizer.special_ids if x not in stops))

    def encode(self, text: str) -> list[int]:
        return list(self.ids[int(text)])

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def bos_id(self) -> int:
        return 0  # adds none

    def eos_id(self) -> int:
        return self.unused

    def pad_id(self) -> int:
        return self.unused


def config_of(prompts: Prompts, new: int, **settings: Any) -> Any:
    """Tunix's ``RolloutConfig`` for answers of at most ``new`` tokens, with log-probabilities."""
    longest = max(map(len, prompts.ids))
    return module("tunix.rl.rollout.base_rollout").RolloutConfig(
        max_tokens_to_generate=new,
        max_prompt_length=longest,
        kv_cache_size=longest + new,
        return_logprobs=True,
        **settings,
    )


def sampler_of(actor: Any, prompts: Prompts, config: Any) -> Any:
    """Tunix's own rollout engine."""
    theirs = actor.config
    cache = module("tunix.rl.rollout.base_rollout").CacheConfig(
        config.kv_cache_size, theirs.num_layers, theirs.num_kv_heads, theirs.head_dim
    )
    vanilla = module("tunix.rl.rollout.vanilla_rollout").VanillaRollout
    return vanilla(actor, prompts, cache)


def log_probabilities(graph: Any, weights: Any, tokens: jax.Array) -> jax.Array:
    """Of each of ``tokens [N, S]`` but the first, ``[N, S - 1]``: Tunix's model without a cache."""
    size = tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(size), tokens.shape)
    causal = jnp.broadcast_to(jnp.tri(size, dtype=bool), (*tokens.shape, size))
    logits, _ = nnx.merge(graph, weights)(tokens, positions, None, causal)
    return of_next(logits, tokens)


@jax.jit(static_argnums=1)
def _split_weights(weights: dict[str, Any], num_heads: int) -> dict[str, Any]:
    """Weights of a `Decoder` by Tunix's names."""
    result = {
        "embedder": {"input_embedding": weights["embedding"]},
        "final_norm": {"w": weights["norm"]["scale"]},
        "layers": {i: _layer(layer, num_heads) for i, layer in weights["layers"].items()},
    }
    return result | ({"lm_head": {"w": weights["head"]["kernel"]}} if "head" in weights else {})


def _layer(layer: dict[str, Any], num_heads: int) -> dict[str, Any]:
    attention, mlp = layer["attention"], layer["mlp"]
    qkv, out = attention["qkv"], attention["out"]["kernel"]
    hidden, kv_heads, width = qkv["kernel"].shape
    size = out.shape[0] // num_heads
    cuts = (width - 2 * size, width - size)
    q, k, v = jnp.split(qkv["kernel"], cuts, axis=-1)
    parts = {
        "q_proj": {"w": q.reshape(hidden, num_heads, size)},
        "k_proj": {"w": k},
        "v_proj": {"w": v},
        "o_proj": {"w": out.reshape(num_heads, size, -1)},
    }
    if "q_norm" in attention:
        parts |= {name: {"w": attention[name]["scale"]} for name in ("q_norm", "k_norm")}
    else:
        bias = qkv.get("bias", jnp.zeros((kv_heads, width), out.dtype))
        names = ("q_bias", "k_bias", "v_bias")
        parts |= dict(zip(names, (x.ravel() for x in jnp.split(bias, cuts, axis=-1)), strict=True))
    gate, up = mlp["gate_up"]["kernel"][:, 0], mlp["gate_up"]["kernel"][:, 1]
    return {
        "attn": parts,
        "input_layernorm": {"w": layer["attention_norm"]["scale"]},
        "post_attention_layernorm": {"w": layer["mlp_norm"]["scale"]},
        "mlp": {
            "gate_proj": {"kernel": gate},
            "up_proj": {"kernel": up},
            "down_proj": {"kernel": mlp["down"]["kernel"]},
        },
    }
