"""Settings of DeepSeek's models: latent attention, and a mixture of experts in most layers."""

from __future__ import annotations

from typing import Any

from jspec.checks import shown
from jspec.config import LayerSpec, ModelConfig
from jspec.models.families.llama import MODULES as LLAMA
from jspec.models.families.shared.layers import check_activation, layer_count, max_context
from jspec.models.families.shared.rope_fields import read_rope, read_score_factor
from jspec.models.files import Fields
from jspec.parts import Experts, Latent

_OTHER = ("attention.k", "attention.v")
EXPERTS = {
    "mlp.router": "mlp.gate",
    "mlp.experts.gate": "mlp.experts.{}.gate_proj",
    "mlp.experts.up": "mlp.experts.{}.up_proj",
    "mlp.experts.down": "mlp.experts.{}.down_proj",
}
MODULES = {
    **{name: stored for name, stored in LLAMA.items() if name not in _OTHER},
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    **EXPERTS,
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}


def read_latent_layers(fields: Fields, experts: Experts) -> ModelConfig:
    """The fields that the families share; ``experts`` are as the family reads them."""
    check_activation(fields, "hidden_act", "silu")
    # They follow from others, or are of the further token's layer or of groups that are not in use.
    fields.ignore("head_dim", "qk_head_dim", "num_key_value_heads", "num_nextn_predict_layers")
    fields.ignore("n_group", "topk_group")
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key, False):
            raise fields.error(f"{key}=true is not supported; DeepSeek's models have no such bias")
    for key, supported in (("moe_layer_freq", 1), ("rope_interleave", True)):
        value = fields.get(key)
        if value is not None and value != supported:
            raise fields.error(f"{key}={shown(value)} is not supported; jspec has {supported}")
    latent = Latent(
        rank=fields.integer("kv_lora_rank"),
        rope_size=fields.integer("qk_rope_head_dim"),
        plain_size=fields.integer("qk_nope_head_dim"),
        value_size=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank", None),
    )
    spec = LayerSpec(
        kv_heads=1,
        key_size=latent.rank + latent.rope_size,
        value_size=latent.rank,
        values_in_keys=True,
        scale=latent.query_size**-0.5 * read_score_factor(fields),
    )
    vocab, rope = fields.integer("vocab_size"), read_rope(fields)
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=fields.integer("num_attention_heads"),
        layers=(spec,) * layer_count(fields),
        ropes=(rope,),
        norm_eps=float(fields.number("rms_norm_eps")),
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        latent=latent,
        experts=experts,
        max_context=max_context(fields, rope),
        stop_tokens=fields.tokens("eos_token_id", vocab),
    )


def read_experts(fields: Fields, **special: Any) -> Experts:
    """The fields of experts that the families share; ``special`` are those of one."""
    size, layers = fields.integer("moe_intermediate_size"), layer_count(fields)
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        dense = tuple(range(min(fields.count("first_k_dense_replace"), layers)))
    else:
        fields.ignore("first_k_dense_replace")
        dense = tuple(n for n, kind in enumerate(_mlp_kinds(fields, kinds)) if kind == "dense")
    return Experts(
        routed=fields.integer("n_routed_experts"),
        chosen=fields.integer("num_experts_per_tok"),
        size=size,
        shared_size=fields.integer("n_shared_experts") * size,
        dense_layers=dense,
        factor=float(fields.number("routed_scaling_factor")),
        **special,
    )


def _mlp_kinds(fields: Fields, kinds: Any) -> list[str]:
    """The kind of each layer's feed-forward, as transformers 5 writes it."""
    layers = layer_count(fields)
    known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
    if not known or len(kinds) != layers:
        raise fields.error(
            f"mlp_layer_types={shown(kinds)} must be dense or sparse for each of {layers} layers"
        )
    return kinds


def refuse_other(fields: Fields, **known: str) -> None:
    """Raise `CheckpointError` for a field of ``known`` that is there with another value."""
    for key, supported in known.items():
        value = fields.text(key, supported)
        if value != supported:
            raise fields.error(f"{key}={shown(value)} is not supported; jspec has {supported}")
