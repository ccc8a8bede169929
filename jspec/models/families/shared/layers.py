"""Settings of grouped-query attention and plain feed-forward layers, as config.json says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jspec.checks import shown
from jspec.config import LAYER_LIMIT, LayerSpec, ModelConfig
from jspec.models.families.shared.rope_fields import read_rope
from jspec.models.files import INTEGER_LIMIT, Fields
from jspec.parts import Activation, Rope

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS: dict[Activation, tuple[str, ...]] = {
    "silu": ("silu", "swish"),
    "gelu_tanh": ("gelu_pytorch_tanh",),
}


def read_layers(
    fields: Fields,
    *,
    windows: Sequence[bool] | None = None,
    window: int | None = None,
    ropes: tuple[Rope, ...] | None = None,
    layer_ropes: Sequence[int] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    activation: Activation = "silu",
    tied: bool = False,
    **special: Any,
) -> ModelConfig:
    """Read the fields that families share.

    Args:
        fields: the object in config.json.
        windows: whether each layer has a sliding window; None where no model of the family has.
        window: tokens of a window; None reads sliding_window where a layer has one.
        ropes: rotary embeddings; None reads the one of config.json.
        layer_ropes: index into ``ropes`` of each layer; None is 0.
        scale: factor on the scores of all layers; None is that of the head size.
        softcap: soft cap of the scores of all layers.
        activation: the one activation of the family.
        tied: default of tie_word_embeddings.
        **special: other fields of `ModelConfig`, which the family knows.

    Returns:
        The settings.

    Raises:
        CheckpointError: a field is missing, has a wrong type, or asks for what jspec does not have.
    """
    check_activation(fields, "hidden_act", activation)
    count = layer_count(fields)
    if windows is None:
        windows = sliding_layers(fields, lambda _: False)
        if any(windows):
            kinds = shown(fields.get("layer_types"))
            raise fields.error(f"layer_types={kinds} is not of this model_type, of full attention")
    else:
        fields.ignore("sliding_window")  # where no layer has a window
    if any(windows) and window is None:
        window = fields.integer("sliding_window")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    vocab, size = fields.integer("vocab_size"), head_size(fields, hidden, heads)
    kv_heads = fields.integer("num_key_value_heads", heads)
    ropes = (read_rope(fields),) if ropes is None else ropes

    def spec(layer: int) -> LayerSpec:
        return LayerSpec(
            kv_heads=kv_heads,
            key_size=size,
            value_size=size,
            window=window if windows[layer] else None,
            scale=scale,
            softcap=softcap,
            rope=0 if layer_ropes is None else layer_ropes[layer],
        )

    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        layers=tuple(map(spec, range(count))),
        ropes=ropes,
        norm_eps=float(fields.number("rms_norm_eps")),
        tie_embeddings=fields.boolean("tie_word_embeddings", tied),
        activation=activation,
        max_context=max_context(fields, ropes[0]),
        stop_tokens=fields.tokens("eos_token_id", vocab),
        **special,
    )


def check_activation(fields: Fields, key: str, activation: Activation) -> None:
    """Raise `CheckpointError` where ``key`` names another activation."""
    names = _ACTIVATIONS[activation]
    if (name := fields.text(key, names[0])) not in names:
        raise fields.error(f"{key}={shown(name)} is not supported; jspec has {names[0]}")


def sliding_layers(fields: Fields, default: Callable[[int], bool]) -> tuple[bool, ...]:
    """Whether each layer has a sliding window.

    Args:
        fields: the object in config.json.
        default: whether the layer of a number has one where there are no layer_types.

    Returns:
        One bool per layer.

    Raises:
        CheckpointError: layer_types is malformed or names layers that jspec does not have.
    """
    count, kinds = layer_count(fields), fields.get("layer_types")
    if kinds is None:
        return tuple(map(default, range(count)))
    known = isinstance(kinds, list) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not known or len(kinds) != count:
        raise fields.error(
            f"layer_types={shown(kinds)} must be {_FULL} or {_SLIDING} for each of {count} layers"
        )
    return tuple(kind == _SLIDING for kind in kinds)


def read_window(fields: Fields, default: int | None) -> dict[str, Any]:
    """Arguments of `read_layers` for a window in all layers: sliding_window, null for none."""
    window = None if "sliding_window" in fields.values else default
    window = fields.integer("sliding_window", window)
    return {"windows": [window is not None] * layer_count(fields), "window": window}


def layer_count(fields: Fields) -> int:
    """The number of layers, within the limit of a sound file."""
    layers = fields.integer("num_hidden_layers")
    if layers > LAYER_LIMIT:
        raise fields.error(f"num_hidden_layers={layers} must be at most {LAYER_LIMIT}")
    return layers


def head_size(fields: Fields, hidden: int, heads: int) -> int:
    """head_dim, by default hidden_size / num_attention_heads."""
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    if hidden % heads:
        raise fields.error(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}; give head_dim"
        )
    return hidden // heads


def max_context(fields: Fields, rope: Rope) -> int:
    """The limit on the tokens of a row; linear and YaRN scaling raise it.

    Advice for long inputs adds a scaling and leaves max_position_embeddings as it was.
    """
    context = fields.integer("max_position_embeddings")
    scaling = rope.scaling
    if scaling is None or scaling.kind == "llama3":
        return context
    if scaling.kind == "longrope":
        return min(context, scaling.original_context)
    original = scaling.original_context or context
    stretched = int(scaling.factor * original)
    if stretched > INTEGER_LIMIT:
        raise fields.error(
            f"a rope of factor={scaling.factor:g} over {original} tokens gives a context of "
            f"{stretched} tokens; it must be at most {INTEGER_LIMIT}"
        )
    return max(context, stretched)
