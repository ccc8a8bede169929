"""Settings of what some families have in place of plain attention and feed-forward layers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jspec.checks import check_flags, check_numbers, check_sizes, present_fields, require

# The gate of a feed-forward: SwiGLU's, or GeGLU's with the tanh approximation.
Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A token keeps a latent of ``rank`` channels, of which each head's key of ``plain_size`` and
    value of ``value_size`` channels are linear maps, and a rotated key of ``rope_size`` channels
    that all heads share. Queries come from a latent of ``query_rank`` channels; None is none.
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

    Before that gate is at most ``limit``, and up within ``-limit .. limit``.
    """

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        check_numbers(self, "limit", "alpha")


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts as feed-forward (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    Each token takes ``chosen`` of the ``routed`` experts of ``size`` channels, and one of
    ``shared_size`` channels besides, if any; the layers numbered in ``dense_layers`` have a plain
    feed-forward instead. ``score`` makes the router's logits positive. Experts are in ``groups``,
    of which the ``chosen_groups`` with the highest ``group_score`` are taken: the highest of their
    scores, or the sum of the two highest. With ``corrected`` a learned bias is added to scores
    where experts are chosen, not where they are weighted. Weights are scores, ``normalized`` to sum
    to 1 if so, times ``factor``. With ``bias`` the router and both products of an expert have one.
    ``clamped`` is the activation of the routed experts; None is SwiGLU.
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

    def __post_init__(self) -> None:
        check_sizes(self, "routed", "chosen", "size", "groups", "chosen_groups")
        check_sizes(self, *present_fields(self, "shared_size"))
        check_numbers(self, "factor")
        check_flags(self, "corrected", "normalized", "bias")
        require(
            self.clamped is None or isinstance(self.clamped, ClampedSwiGLU),
            f"clamped={self.clamped!r:.80} must be a ClampedSwiGLU or None",
        )
        dense = self.dense_layers
        require(
            isinstance(dense, tuple) and all(type(n) is int and 0 <= n < 2**31 for n in dense),
            f"dense_layers={dense!r:.80} must be a tuple of numbers of layers, from 0",
        )
        for name, known in (
            ("score", ("softmax", "sigmoid")),
            ("group_score", ("highest", "two_highest")),
        ):
            value = getattr(self, name)
            require(value in known, f"{name}={value!r:.80} must be one of {', '.join(known)}")
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
