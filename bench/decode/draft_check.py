"""Whether a draft and its verification are right: against ``xla``'s version of every operation.

On the first `LAYERS` layers, greedily, with new keys so loud that they count among thousands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode.check import LAYERS, NEW_KEYS, TOLERANCE, layers_of
from bench.decode.shapes import part_of
from jspec.decode.draft import Drafted
from jspec.decode.settings import OPERATIONS, StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import draft, run_target
from jspec.dispatch import Backends
from jspec.typing import Array

REFERENCE = Backends({x.name: "xla" for x in OPERATIONS if "xla" in x.backends})
# Of what the two pick in a layer. Scores that differ by 1 % of their spread turn around one pick in
# 25 at 7 %; picks that have nothing to do with each other share 7 %.
SHARED = 0.9
# Where logits are off by more than `TOLERANCE`, those of float32 say whether they are wrong: they
# may be so many times as far from these as the reference's are, which is what rounding does to
# them. Rounding sends a token of a mixture to other experts where two are nearly tied: the mean of
# all tokens is compared, as a position has few of them.
ROUNDINGS = 1.5
ROUNDED = 0.15  # the most of the reference's own distance by which others are judged


class DraftCheck:
    """Compares an iteration of ``config`` with the reference, on random draft tokens.

    ``own_state(models, lengths, layers)``: the drafter's own state for a model of so many layers.
    """

    def __init__(self, models: Models, config: StepConfig, drafter_state: Callable[[Models], Any]):
        target: Any = models.target
        self.layers = slice(min(LAYERS, target.config.num_layers))
        arrays = None if models.policy is None else models.policy[self.layers]
        small = Models(part_of(target, self.layers), policy=arrays)
        self._models = config.draft.prepare(small)
        self._config, self._drafter_state = config, drafter_state

    def lowerings(self, shapes: DecodeState) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """What lowers the two programs for a state of these shapes."""
        drafter_state = jax.eval_shape(self._drafter_state, self._models)
        state = self._cut(shapes, drafter_state)
        tokens = jax.ShapeDtypeStruct((shapes.tokens.shape[0], self._config.gamma), jnp.int32)

        def lower(config: StepConfig) -> jax.stages.Lowered:
            return _iteration.lower(_loud(self._models), state, tokens, config)

        reference = dataclasses.replace(self._config, backends=REFERENCE, exact=False)
        return {"own": partial(lower, self._config), "reference": partial(lower, reference)}

    def wrong(self, state: DecodeState, programs: Mapping[Any, Any]) -> tuple[str | None, float]:
        """What is wrong with the iteration, or None, and the error of its logits.

        On the keys and values of ``state``, which stay as they are.
        """
        vocabulary = self._models.target.config.vocab_size
        size = state.tokens.shape[0], self._config.gamma
        tokens = np.random.default_rng(1).integers(0, vocabulary, size, np.int32)
        state = self._cut(state, self._drafter_state(self._models))
        arguments = _loud(self._models), state, tokens
        actual, expected = (programs[name](*arguments) for name in ("own", "reference"))
        errors = _errors(actual, expected)
        error = max(errors.values())
        beyond = {what: off for what, off in errors.items() if not off <= TOLERANCE}
        if beyond:
            exact = self._in_float32(state, tokens)
            if reason := _more_than_rounding(actual, expected, exact, beyond):
                return reason, error
        shared = min(map(share, actual.picks, expected.picks), default=1.0)
        if shared < SHARED:
            return f"it picks {shared:.0%} of what the reference picks in a layer", error
        return None, error

    def _in_float32(self, state: DecodeState, tokens: Any) -> _Result:
        """What the reference finds in float32."""
        config = dataclasses.replace(self._config, backends=REFERENCE, exact=False)
        models, state = jax.tree.map(_widened, (self._models, state))
        with jax.default_matmul_precision("highest"):
            return _iteration(_loud(models), state, tokens, config)

    def _cut(self, state: DecodeState, drafter_state: Any) -> DecodeState:
        """The state for the first layers; ``sampled``, so that drafts give their logits."""
        cache = layers_of(state.cache, self.layers)
        return dataclasses.replace(state, cache=cache, draft=drafter_state, mode="sampled")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Loud:
    """A model whose new keys are `NEW_KEYS` times as large."""

    model: Any

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    def __call__(self, tokens: Array, positions: Array, attend: Any, cache: Any) -> Any:
        def louder(layer: int, q: Any, k: Any, v: Any, cache: Any, **rest: Any) -> Any:
            return attend(layer, q, jnp.asarray(NEW_KEYS, k.dtype) * k, v, cache, **rest)

        return self.model(tokens, positions, louder, cache)

    def logits(self, hidden: Array) -> Array:
        return self.model.logits(hidden)


def _loud(models: Models) -> Models:
    copy = None if models.draft is None else _Loud(models.draft)
    return models._replace(target=_Loud(models.target), draft=copy)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Result:
    """``tokens [B, gamma]``, ``lengths [B]`` and logits ``draft [B, gamma, V]`` of a draft, the
    logits ``target [B, gamma + 1, V]`` of a verification, and its ``picks``."""

    tokens: Array
    lengths: Array
    draft: Array | None
    target: Array
    picks: list[Array]


@partial(jax.jit, static_argnames="config")
def _iteration(models: Models, state: DecodeState, tokens: Array, config: StepConfig) -> _Result:
    with config.of_models():
        drafted, after = draft(models, state, config)
        after = dataclasses.replace(after, cache=after.cache.with_lengths(state.cache.lengths))
        whole = Drafted(tokens, jnp.full(state.lengths.shape, config.gamma, jnp.int32))
        target, _, pass_state = run_target(models, after, whole, config)
    picks = [result for result in pass_state.found or () if isinstance(result, jax.Array)]
    return _Result(drafted.tokens, drafted.lengths, drafted.logits, target, picks)


def _widened(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _more_than_rounding(
    actual: _Result, expected: _Result, exact: _Result, beyond: Mapping[str, float]
) -> str | None:
    """What rounding does not explain of logits that are so far ``beyond`` those of ``wanted``."""
    errors, reference = (_errors(x, exact, overall=True) for x in (actual, expected))
    for what, off in beyond.items():
        if not (reference[what] <= ROUNDED and errors[what] <= ROUNDINGS * reference[what]):
            return (
                f"the logits of its {what} are {off:.1%} from the reference's; from those of "
                f"float32, its are {errors[what]:.1%} and the reference's {reference[what]:.1%}"
            )
    return None


def _errors(actual: _Result, expected: _Result, *, overall: bool = False) -> dict[str, float]:
    """By how much the logits of a verification, and of a draft, are off; settings of `_error`."""
    errors = {"verification": _error(actual.target, expected.target, overall=overall)}
    if actual.draft is None or expected.draft is None:
        return errors
    # A draft goes on from its own tokens: once these part, logits say nothing.
    alike = (actual.tokens[:, :-1] == expected.tokens[:, :-1]).cumprod(axis=1).astype(bool)
    known = jnp.pad(alike, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.minimum(actual.lengths, expected.lengths)[:, None]
    known &= jnp.arange(known.shape[1])[None] < ends
    return errors | {"draft": _error(actual.draft, expected.draft, known, overall=overall)}


def _error(
    actual: Array, expected: Array, known: Array | None = None, *, overall: bool = False
) -> float:
    """By how much logits ``[B, T, V]`` are off, over the norm of those that are wanted.

    The largest of a row's mean and of a position's, of what is ``known [B, T]``: drafts are long,
    and one of many positions is off by twice as much as the others where nothing is wrong.
    ``overall``: the mean of all.
    """
    distance = jnp.linalg.norm(actual - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)
    known = jnp.ones_like(distance, bool) if known is None else known
    distance, many = jnp.where(known, distance, 0), known.astype(distance.dtype)
    if overall:
        return float(distance.sum() / jnp.maximum(many.sum(), 1))
    means = (distance.sum(axis) / jnp.maximum(many.sum(axis), 1) for axis in (0, 1))
    return max(float(mean.max()) for mean in means)


def share(actual: Array | np.ndarray, expected: Array | np.ndarray) -> float:
    """The least share of a row's picks ``[B, ...]`` that the two have in common."""
    pairs = zip(np.asarray(actual), np.asarray(expected), strict=True)
    sets = [(set(a[a >= 0].ravel().tolist()), set(b[b >= 0].ravel().tolist())) for a, b in pairs]
    return min(len(a & b) / max(len(b), 1) for a, b in sets)
