"""Settings of a model of which some layers have a sliding window, as config.json says."""

from __future__ import annotations

from typing import Any

from jspec.config import LayerSpec, ModelConfig, Rope
from jspec.models.errors import quoted
from jspec.models.families.shared.equal_layers import head_size, layer_count, max_context
from jspec.models.files import Fields

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_window_layers(
    fields: Fields,
    *,
    every: int,
    ropes: tuple[Rope, ...],
    window_rope: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    tied: bool = False,
    **special: Any,
) -> ModelConfig:
    """The fields that the families share; ``special`` are settings that one knows itself.

    Without ``layer_types`` one layer in ``every`` sees the whole context, by ``ropes[0]``; those
    with a window have ``ropes[window_rope]``. ``scale`` and ``softcap`` are of the scores of all
    layers, ``tied`` is the default of tie_word_embeddings.
    """
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    vocab, size = fields.integer("vocab_size"), head_size(fields, hidden, heads)

    def spec(window: int | None) -> LayerSpec:
        return LayerSpec(
            kv_heads=fields.integer("num_key_value_heads"),
            key_size=size,
            value_size=size,
            window=window,
            scale=scale,
            softcap=softcap,
            rope=0 if window is None else window_rope,
        )

    kinds = _layer_types(fields, every)
    window = fields.integer("sliding_window") if _SLIDING in kinds else None
    specs = {_FULL: spec(None), _SLIDING: spec(window)}
    fields.get("sliding_window")
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        layers=tuple(specs[kind] for kind in kinds),
        ropes=ropes,
        norm_eps=float(fields.number("rms_norm_eps")),
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        max_context=max_context(fields, ropes[0].scaling),
        stop_tokens=fields.tokens("eos_token_id", vocab),
        **special,
    )


def _layer_types(fields: Fields, every: int) -> list[str]:
    """The kind of each layer."""
    count, kinds = layer_count(fields), fields.get("layer_types")
    if kinds is None:
        return [_FULL if (n + 1) % every == 0 else _SLIDING for n in range(count)]
    known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not known or len(kinds) != count:
        raise fields.error(
            f"layer_types={quoted(kinds)} must be {_FULL} or {_SLIDING} for each of {count} layers"
        )
    return kinds
