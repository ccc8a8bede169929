"""Frozen, hashable settings of models, requests and steps, checked when they are made."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

SamplingMode = Literal["greedy", "sampled", "filtered"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    ``kind`` is ``linear`` (positions divided by ``factor``), ``llama3`` (Llama 3.1: long waves are
    divided by ``factor``, short ones kept, a ramp between) or ``yarn`` (Peng et al. 2023, with its
    attention temperature). ``original_context`` is in tokens and is needed by the last two.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_context: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _require(
            self.kind in ("linear", "llama3", "yarn"),
            f"rope scaling {self.kind!r} is unknown; jspec has linear, llama3 and yarn",
        )
        _require(
            math.isfinite(self.factor) and self.factor >= 1.0,
            f"rope scaling factor={self.factor} must be a finite number of at least 1",
        )
        _require(
            self.kind == "linear" or self.original_context > 0,
            f"rope scaling {self.kind} needs original_context, got {self.original_context}",
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shape and conventions of a decoder; see `jspec.models.families` for how families fill it."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    family: str = "llama"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    max_context: int = 4096
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads "
            "head_size max_context"
        ).split():
            value = getattr(self, name)
            _require(
                isinstance(value, int) and value >= 1, f"{name}={value!r} must be a positive int"
            )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}",
        )
        _require(self.head_size % 2 == 0, f"head_size={self.head_size} must be even for RoPE")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    ``temperature=0`` is greedy. ``top_k=0``, ``top_p=1`` and ``min_p=0`` switch a filter off; they
    apply in that order after the temperature, and a tie at a threshold is kept whole. ``seed`` keys
    every random number of the request (see `jspec.ops.sample`). ``draft_limit`` caps the draft
    length of this row below the step's gamma.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_tokens: tuple[int, ...] = ()
    draft_limit: int | None = None

    def __post_init__(self) -> None:
        _require(
            self.max_new_tokens >= 1, f"max_new_tokens={self.max_new_tokens} must be at least 1"
        )
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature={self.temperature} must be 0 (greedy) or a positive finite number",
        )
        _require(self.top_k >= 0, f"top_k={self.top_k} must be at least 0; 0 switches it off")
        _require(0 < self.top_p <= 1, f"top_p={self.top_p} must be in (0, 1]; 1 switches it off")
        _require(0 <= self.min_p <= 1, f"min_p={self.min_p} must be in [0, 1]; 0 switches it off")
        _require(0 <= self.seed < 2**32, f"seed={self.seed} must be in [0, 2**32)")
        _require(
            all(token >= 0 for token in self.stop_tokens),
            f"stop_tokens={self.stop_tokens} must be token ids, at least 0",
        )
        _require(
            self.draft_limit is None or self.draft_limit >= 0,
            f"draft_limit={self.draft_limit} must be at least 0; None leaves it to gamma",
        )

    @property
    def sampling(self) -> SamplingMode:
        """The least machinery that serves this request."""
        if self.temperature == 0:
            return "greedy"
        filtered = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return "filtered" if filtered else "sampled"


@dataclasses.dataclass(frozen=True)
class StreamDraft:
    """Self-speculation over attention sinks and a recent window (StreamingLLM, Xiao et al. 2023).

    The model drafts for itself and reads ``sinks + window`` cached tokens at their original
    positions instead of the whole context.
    """

    sinks: int = 16
    window: int = 496

    def __post_init__(self) -> None:
        _require(self.sinks >= 0, f"sinks={self.sinks} must be at least 0")
        _require(self.window >= 1, f"window={self.window} must be at least 1")


@dataclasses.dataclass(frozen=True)
class NgramDraft:
    """Prompt lookup: what followed the latest, longest earlier match of the last tokens.

    A match of fewer than ``min_match`` tokens drafts nothing; ``max_match`` bounds the comparison.
    """

    min_match: int = 3
    max_match: int = 16

    def __post_init__(self) -> None:
        _require(
            1 <= self.min_match <= self.max_match,
            f"min_match={self.min_match} must be in [1, max_match={self.max_match}]",
        )


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """A separate draft model with the same vocabulary, passed beside the target model."""


Draft = StreamDraft | NgramDraft | ModelDraft


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static part of a step: one compiled program for each value in use.

    ``draft=None`` with ``gamma=0`` is plain decoding through the same code. ``sampling`` says which
    machinery the batch needs: ``greedy`` (argmax only), ``sampled`` or ``filtered`` (any row with
    top-k, top-p or min-p); a row's tokens do not depend on which of the sufficient ones runs.
    ``attention`` and ``implementation`` (of verifying and drawing) name a backend, None for the
    best.
    """

    gamma: int = 4
    draft: Draft | None = StreamDraft()
    sampling: SamplingMode = "greedy"
    attention: str | None = None
    implementation: str | None = None

    def __post_init__(self) -> None:
        if self.draft is None:
            _require(self.gamma == 0, f"gamma={self.gamma} needs a draft source; got draft=None")
        else:
            _require(
                self.gamma >= 1,
                f"gamma={self.gamma} must be at least 1; pass draft=None, gamma=0 for plain "
                "decoding",
            )
        _require(
            self.sampling in ("greedy", "sampled", "filtered"),
            f"sampling={self.sampling!r} must be greedy, sampled or filtered",
        )


PLAIN = StepConfig(gamma=0, draft=None)
