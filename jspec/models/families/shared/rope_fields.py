"""Rotary embedding in a config.json, as transformers 4 and 5 write it."""

from __future__ import annotations

import math

from jspec.checks import shown
from jspec.models.errors import CheckpointError
from jspec.models.files import Fields
from jspec.parts import Rope, RopeScaling

_KEYS = frozenset(
    "type rope_type rope_theta factor original_max_position_embeddings attention_factor "
    "attn_factor beta_fast beta_slow mscale mscale_all_dim truncate low_freq_factor "
    "high_freq_factor partial_rotary_factor finetuned short_factor long_factor".split()
)


def read_score_factor(fields: Fields) -> float:
    """The factor on the scores of latent attention beyond its trained context.

    That is the square of YaRN's temperature for ``mscale_all_dim`` (DeepSeek-V2, section 3.1.4).
    """
    rope = _rope_fields(fields)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default" or not rope.values.get("mscale_all_dim"):
        return 1.0
    factor, scale = rope.number("factor"), rope.number("mscale_all_dim")
    return (0.1 * scale * math.log(max(factor, 1.0)) + 1.0) ** 2


def _rope_fields(fields: Fields) -> Fields:
    """``rope_scaling`` or, as transformers 5 writes it, rope_parameters."""
    old, new = fields.object("rope_scaling"), fields.object("rope_parameters")
    if old.values and new.values and old.values != new.values:
        raise fields.error(
            f"rope_scaling={shown(old.values)} and rope_parameters={shown(new.values)} disagree; "
            "keep the one that the model was trained with"
        )
    return old if old.values else new


def read_rope(fields: Fields, theta: float = 10000.0, *, size: int | None = None) -> Rope:
    """The base, by default ``theta``, and the scaling of a config.json.

    ``size``: channels of a head, of which the family may rotate a part; None is not.
    """
    return rope_of(fields, _rope_fields(fields), fields.number("rope_theta", theta), size=size)


def read_layer_ropes(fields: Fields, theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """The rope of layers that see all, which alone is scaled, and that of those with a window.

    Their bases are by default ``theta`` and ``local_theta``.
    """
    both = fields.object("rope_parameters")
    full, sliding = (both.object(key) for key in ("full_attention", "sliding_attention"))
    if not (full.values or sliding.values):
        return read_rope(fields, theta), Rope(float(local_theta))
    if other := sorted(set(both.values) - both.read):
        raise both.error(f"fields {shown(other)} are unknown; jspec reads those of layer types")
    theta = fields.number("rope_theta", theta)
    return rope_of(fields, full, theta), rope_of(fields, sliding, local_theta)


def rope_of(fields: Fields, rope: Fields, theta: float, *, size: int | None = None) -> Rope:
    """The rope that ``rope`` of a config.json says; arguments as of `read_rope`."""
    kind = rope.text("rope_type", rope.text("type", None))
    if kind is None and rope.has("factor"):
        raise rope.error(
            f"factor={shown(rope.values['factor'])} has no rope_type; add the one that the model "
            f"was trained with, of {', '.join(_SCALINGS)}"
        )
    kind = {None: "default", "su": "longrope"}.get(kind, kind)
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise rope.error(f"rope_type={shown(kind)} is not supported; jspec has {known}")
    unknown = sorted(set(rope.values) - _KEYS)
    if unknown:
        raise rope.error(
            f"fields {shown(unknown)} are unknown to jspec; it cannot tell what they change"
        )
    share = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1 or (share != 1 and size is None):
        raise fields.error(f"partial_rotary_factor={share} is not supported; jspec rotates all")
    longrope = [key for key in ("short_factor", "long_factor") if rope.has(key)]
    if longrope and kind != "longrope":
        raise rope.error(f"{longrope[0]} does not go with rope_type={shown(kind)}")
    if kind != "yarn" and rope.number("attn_factor", 1.0) != 1:
        value = shown(rope.values["attn_factor"])
        raise rope.error(f"attn_factor={value} is not supported with rope_type={shown(kind)}")
    theta = float(rope.number("rope_theta", theta))
    if theta <= 1:
        raise fields.error(f"rope_theta={theta} must be above 1")
    try:
        rotated = None if size is None or share == 1 else int(size * share)
        return Rope(theta, _SCALINGS[kind](fields, rope), rotated)
    except CheckpointError:
        raise
    except ValueError as error:
        raise rope.error(str(error)) from None


def _default(fields: Fields, rope: Fields) -> None:
    """None, as ``dynamic`` is within max_position_embeddings, the limit on the tokens of a row."""


def _linear(fields: Fields, rope: Fields) -> RopeScaling:
    original = _original_context(fields, rope, 0)
    return RopeScaling("linear", float(rope.number("factor")), original_context=original)


def _original_context(fields: Fields, rope: Fields, default: int | None = None) -> int:
    key = "original_max_position_embeddings"
    whole = fields.integer("max_position_embeddings") if default is None else default
    return fields.integer(key, rope.integer(key, whole))


def _llama3(fields: Fields, rope: Fields) -> RopeScaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        raise rope.error(
            f"high_freq_factor={shown(high)} must be above low_freq_factor={shown(low)}"
        )
    return RopeScaling(
        "llama3",
        float(rope.number("factor")),
        original_context=_original_context(fields, rope),
        low_frequency_factor=float(low),
        high_frequency_factor=float(high),
    )


def _yarn(fields: Fields, rope: Fields) -> RopeScaling:
    original = _original_context(fields, rope)
    whole = fields.integer("max_position_embeddings")
    factor = float(rope.number("factor", whole / original))
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise rope.error(f"beta_fast={shown(fast)} must be at least beta_slow={shown(slow)}")
    return RopeScaling(
        "yarn",
        factor,
        original_context=original,
        beta_fast=float(fast),
        beta_slow=float(slow),
        attention_factor=_attention_factor(rope, factor),
        truncate=rope.boolean("truncate", True),
    )


def _attention_factor(rope: Fields, factor: float) -> float | None:
    """YaRN's factor on cosine and sine; None is that of the paper.

    The field attn_factor of the authors' code multiplies what mscale or the paper gives.
    """
    whole, times = rope.number("attention_factor", None), float(rope.number("attn_factor", 1.0))
    if whole is not None:
        if times != 1:
            raise rope.error(
                f"attention_factor={shown(whole)} is in place of what attn_factor={times} "
                "multiplies; keep the one that the model was trained with"
            )
        return float(whole)
    growth = 0.1 * math.log(max(factor, 1.0))
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        scale, scale_all = rope.number("mscale"), rope.number("mscale_all_dim")
        return times * (growth * scale + 1) / (growth * scale_all + 1)
    return None if times == 1 else times * (growth + 1)


def _longrope(fields: Fields, rope: Fields) -> RopeScaling:
    """The factors within the trained context, the limit on the tokens of a row.

    Those beyond it would change the keys of earlier tokens.
    """
    original = _original_context(fields, rope)
    factor = float(rope.number("factor", fields.integer("max_position_embeddings") / original))
    attention = rope.number("attention_factor", None)
    return RopeScaling(
        "longrope",
        max(factor, 1.0),
        original_context=original,
        attention_factor=None if attention is None else float(attention),
        wave_factors=rope.positive_numbers("short_factor"),
    )


_SCALINGS = {
    "default": _default,
    "dynamic": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "yarn": _yarn,
}
