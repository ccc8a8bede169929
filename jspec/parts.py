"""Settings of parts of a layer: rotary embeddings, latent attention, experts."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jspec.checks import (
    check_flags,
    check_numbers,
    check_sizes,
    is_number,
    present_fields,
    require,
    shown,
)

EXPERT_LIMIT = 4096  # a file that asks for more is damaged
# The gate of a feed-forward: SwiGLU's, or GeGLU's with the tanh approximation.
Activation = Literal["silu", "gelu_tanh"]


def _check_rope_numbers(setting: Any, *names: str, low: float = 1e-6) -> None:
    # No model comes near the bounds, and products of such numbers stay finite.
    for name in names:
        value = getattr(setting, name)
        valid = is_number(value) and low <= value <= 1e12
        require(valid, f"{name}={shown(value)} must be a finite number from {low:g} to 1e12")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        kind: ``linear`` (positions divided by ``factor``), ``llama3`` (Llama 3.1: long waves are
            divided by ``factor``, short ones are not, with a ramp between), ``yarn`` (Peng et al.
            2023, with its attention temperature) or ``longrope`` (Ding et al. 2024: each wave is
            divided by its own of ``wave_factors``, with an attention temperature).
        factor: The ratio of the contexts, at least 1.
        original_context: The trained context in tokens, which all but ``linear`` need.
        low_frequency_factor: Where the ramp of ``llama3`` begins.
        high_frequency_factor: Where the ramp of ``llama3`` ends.
        beta_fast: Where the ramp of ``yarn`` begins, in rotations.
        beta_slow: Where the ramp of ``yarn`` ends, in rotations.
        attention_factor: The factor on cosine and sine of ``yarn`` and ``longrope``; None is the
            paper's.
        truncate: Whether the ends of the ramp of ``yarn`` are rounded to whole channels.
        wave_factors: The divisors of ``longrope``, one for each pair of rotated channels.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    wave_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(
            self.kind in ("linear", "llama3", "yarn", "longrope"),
            f"rope scaling {shown(self.kind)} is unknown; jspec has linear, llama3, yarn and "
            "longrope",
        )
        factors = self.wave_factors
        require(
            isinstance(factors, tuple) and all(is_number(x) and 1e-6 <= x <= 1e12 for x in factors),
            f"wave_factors={shown(factors)} must be a tuple of finite numbers from 1e-06 to 1e12",
        )
        require(
            bool(factors) == (self.kind == "longrope"),
            f"wave_factors={shown(factors)} do not go with rope scaling {self.kind}",
        )
        _check_rope_numbers(self, "factor", low=1)
        require(
            type(self.original_context) is int and 0 <= self.original_context < 2**31,
            f"original_context={shown(self.original_context)} must be an int32, at least 0",
        )
        require(
            self.kind == "linear" or self.original_context > 0,
            f"rope scaling {self.kind} needs original_context, got {self.original_context}",
        )
        _check_rope_numbers(self, "low_frequency_factor", "high_frequency_factor")
        _check_rope_numbers(
            self, "beta_fast", "beta_slow", *present_fields(self, "attention_factor")
        )
        check_flags(self, "truncate")
        low, high = self.low_frequency_factor, self.high_frequency_factor
        require(
            low < high, f"high_frequency_factor={high} must be above low_frequency_factor={low}"
        )
        fast, slow = self.beta_fast, self.beta_slow
        require(fast >= slow, f"beta_fast={fast} must be at least beta_slow={slow}")


@dataclasses.dataclass(frozen=True)
class Rope:
    """A rotary position embedding.

    Attributes:
        theta: Its base, above 1.
        scaling: How it is stretched beyond the trained context; None is not at all.
        rotated: Channels of a head that it rotates, even; 0 is none (NoPE), None is all. Of H
            channels the pairs are those of number i and i + H / 2, and the first are rotated.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    rotated: int | None = None

    def __post_init__(self) -> None:
        _check_rope_numbers(self, "theta", low=1)
        require(self.theta > 1, f"theta={self.theta} must be above 1")
        require(
            self.scaling is None or isinstance(self.scaling, RopeScaling),
            f"scaling={shown(self.scaling)} must be a RopeScaling or None",
        )
        rotated = self.rotated
        require(
            rotated is None or (type(rotated) is int and rotated >= 0 and rotated % 2 == 0),
            f"rotated={shown(rotated)} must be an even number of channels, or None for all",
        )


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Keys and values of all heads are linear maps of one latent vector of a token; a rotated key is
    shared by all heads.

    Attributes:
        rank: channels of the latent vector.
        rope_size: channels of the rotated key, even.
        plain_size: channels of a head's key that are not rotated.
        value_size: channels of a head's value.
        query_rank: channels of the latent vector that queries are computed from; None for none.
    """

    rank: int
    rope_size: int
    plain_size: int
    value_size: int
    query_rank: int | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "rank", "rope_size", "plain_size", "value_size")
        check_sizes(self, *present_fields(self, "query_rank"))
        require(self.rope_size % 2 == 0, f"rope_size={self.rope_size} must be even for RoPE")

    @property
    def query_size(self) -> int:
        """Channels of a head's query as its projection gives it."""
        return self.plain_size + self.rope_size


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """The activation of gpt-oss's experts: ``(up + 1) * gate * sigmoid(alpha * gate)``.

    Before it, gate is clamped to at most ``limit``, and up to ``-limit .. limit``.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        check_numbers(self, "limit", "alpha")


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts as feed-forward (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Attributes:
        routed: the number of experts that the router chooses from.
        chosen: experts of each token.
        size: channels of an expert.
        shared_size: channels of an expert that every token takes as well; None for none.
        dense_layers: indices of the layers with a plain feed-forward instead.
        score: how the router's logits become scores.
        groups: experts are in so many groups of the same size.
        chosen_groups: experts are chosen only from so many groups, those with the highest score.
        group_score: the score of a group: the highest of its experts' scores, or the sum of its two
            highest.
        corrected: whether a learned bias is added to the scores by which experts are chosen; their
            weights do not have it.
        normalized: whether the weights of a token's experts are scaled to sum to 1.
        factor: of the weights.
        bias: whether the router and both matmuls of an expert have a bias.
        clamped: the activation of the routed experts; None is SwiGLU.
        shared_gated: whether the output of the shared expert is multiplied by the sigmoid of a
            learned projection of the token to one number.
    """

    routed: int
    chosen: int
    size: int
    shared_size: int | None = None
    dense_layers: tuple[int, ...] = ()
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    group_score: Literal["highest", "two_highest"] = "highest"
    corrected: bool = False
    normalized: bool = False
    factor: float = 1.0
    bias: bool = False
    clamped: ClampedSwiGLU | None = None
    shared_gated: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "routed", "chosen", "size", "groups", "chosen_groups")
        check_sizes(self, *present_fields(self, "shared_size"))
        check_numbers(self, "factor")
        check_flags(self, "shared_gated", "corrected", "normalized", "bias")
        require(
            self.shared_size is not None or not self.shared_gated,
            "shared_gated=True needs shared_size, the channels of the shared expert",
        )
        require(self.routed <= EXPERT_LIMIT, f"routed={self.routed} must be at most {EXPERT_LIMIT}")
        require(
            self.clamped is None or isinstance(self.clamped, ClampedSwiGLU),
            f"clamped={shown(self.clamped)} must be a ClampedSwiGLU or None",
        )
        dense = self.dense_layers
        require(
            isinstance(dense, tuple) and all(type(n) is int and 0 <= n < 2**31 for n in dense),
            f"dense_layers={shown(dense)} must be a tuple of numbers of layers, from 0",
        )
        for name, known in (
            ("score", ("softmax", "sigmoid")),
            ("group_score", ("highest", "two_highest")),
        ):
            value = getattr(self, name)
            require(value in known, f"{name}={shown(value)} must be one of {', '.join(known)}")
        require(
            self.routed % self.groups == 0,
            f"routed={self.routed} must be a multiple of groups={self.groups}",
        )
        require(
            self.chosen_groups <= self.groups,
            f"chosen_groups={self.chosen_groups} must be at most groups={self.groups}",
        )
        within = self.routed // self.groups * self.chosen_groups
        require(
            self.chosen <= within,
            f"chosen={self.chosen} must be at most {within}, the experts of {self.chosen_groups} "
            "groups",
        )
        require(
            self.group_score == "highest" or self.routed // self.groups >= 2,
            f"group_score={self.group_score!r} needs groups of at least two experts",
        )
