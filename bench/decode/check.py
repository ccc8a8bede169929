"""Compares an iteration with the backend ``xla`` of every operation.

On the first layers, greedily, with new keys scaled so that they matter among thousands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.decode.shapes import part_of
from jspec.cache import Cache
from jspec.decode.draft import Drafted
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.decode.step import draft, run_target
from jspec.dispatch import Backends
from jspec.ops.registry import step_operations
from jspec.ops.vocabulary import Axes
from jspec.policies import ScoredPolicy
from jspec.typing import Array, Attend

LAYERS = 2
# Relative to the logits' norm, the mean over the positions of the worst row: a fault shows at all
# positions, while rounding moves a single one by 0.06 where new keys have nearly equal scores.
# Correct passes in bfloat16 are within 0.04, since matmuls round differently for each number of
# rows. Leaving out a block of 128 of 8192 keys gives 0.06 or more, a new key that is left out or
# visible too early 1.3.
TOLERANCE = 0.05
NEW_KEY_SCALE = 6.0
REFERENCE = Backends({x.name: "xla" for x in step_operations() if "xla" in x.backends})
# The least share of picks in common in a layer. At a budget of 7 %, scores that differ by 1 % of
# their spread change one pick in 25; independent picks share 7 %.
MIN_SHARED = 0.9
# Where the error of logits exceeds `TOLERANCE`, it is measured against float32 as well, and may be
# this many times the reference's own error, which is due to rounding. Rounding sends a token of a
# mixture to other experts where two are nearly tied: the mean over all tokens is compared, since a
# position has few of them.
ROUNDINGS = 1.5
MAX_ROUNDING = 0.15  # the largest error of the reference against float32 that counts as rounding


class Check:
    """Compares an iteration of ``config`` with the reference, on random draft tokens.

    The first `LAYERS` layers are compared, or only the first layer that selects if the target reads
    a selection: queries of later layers differ by rounding, and their selections among random keys
    by much more.

    Args:
        models: of the iteration.
        config: of the iteration.
        drafter_state: the state of the drafter for some models.
    """

    def __init__(self, models: Models, config: StepConfig, drafter_state: Callable[[Models], Any]):
        target: Any = models.target
        self.layers = slice(min(LAYERS, target.config.num_layers))
        if isinstance(config.target, ScoredPolicy):
            first = first_selecting(target.config.layers, config.target)
            self.layers = slice(first, first + 1)
            config = dataclasses.replace(
                config, target=dataclasses.replace(config.target, dense_layers=0)
            )
        arrays = None if models.policy is None else models.policy[self.layers]
        small = Models(part_of(target, self.layers), policy=arrays)
        self._models = config.draft.prepare(small)
        self._config, self._drafter_state = config, drafter_state
        self._reference = dataclasses.replace(config, backends=REFERENCE, exact=None)

    @property
    def compared(self) -> str:
        """The number of compared layers in words, for a row's ``checked``."""
        count = self.layers.stop - (self.layers.start or 0)
        return "1 layer" if count == 1 else f"{count} layers"

    def lowerings(self, shapes: DecodeState) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Functions that lower the two programs for a state of these shapes."""
        state = self._cut(shapes, jax.eval_shape(self._drafter_state, self._models))
        tokens = jax.ShapeDtypeStruct((shapes.tokens.shape[0], self._config.gamma), jnp.int32)

        def lower(config: StepConfig) -> jax.stages.Lowered:
            return _iteration.lower(_checked(self._models), state, tokens, config)

        return {
            "checked": partial(lower, self._config),
            "reference": partial(lower, self._reference),
        }

    def wrong(self, state: DecodeState, programs: Mapping[str, Any]) -> tuple[str | None, float]:
        """Why the iteration is wrong, or None, and the error of its logits.

        Does not change the keys and values of ``state``.
        """
        vocabulary = self._models.target.config.vocab_size
        size = state.tokens.shape[0], self._config.gamma
        tokens = np.random.default_rng(1).integers(0, vocabulary, size, np.int32)
        state = self._cut(state, self._drafter_state(self._models))
        arguments = _checked(self._models), state, tokens
        actual, expected = (programs[name](*arguments) for name in ("checked", "reference"))
        errors = _errors(actual, expected)
        error = max(errors.values())
        beyond = {what: off for what, off in errors.items() if not off <= TOLERANCE}
        if beyond:
            exact = self._in_float32(state, tokens)
            if reason := _more_than_rounding(actual, expected, exact, beyond):
                return reason, error
        shared = min(map(share, actual.picks, expected.picks), default=1.0)
        if shared < MIN_SHARED:
            return f"it picks {shared:.0%} of what the reference picks in a layer", error
        return None, error

    def _in_float32(self, state: DecodeState, tokens: Any) -> _Result:
        """The result of the reference in float32."""
        models, state = jax.tree.map(_widened, (self._models, state))
        with jax.default_matmul_precision("highest"):
            return _iteration(_checked(models), state, tokens, self._reference)

    def _cut(self, state: DecodeState, drafter_state: Any) -> DecodeState:
        """The state of the compared layers, in sampled mode: drafts then return their logits."""
        storage = self._config.cache_policy.storage
        cache = dataclasses.replace(layers_of(state.cache, self.layers), storage=storage)
        return dataclasses.replace(state, cache=cache, draft=drafter_state, mode="sampled")


def layers_of(cache: Cache, layers: slice) -> Cache:
    """Some layers of a cache."""
    parts = ("columns", "specs", "layouts", "pages")
    return dataclasses.replace(cache, **{name: getattr(cache, name)[layers] for name in parts})


def first_selecting(specs: Any, policy: ScoredPolicy) -> int:
    """The first layer that selects; `ValueError` where none does."""
    for layer, spec in enumerate(specs):
        if spec.window is None and layer >= policy.dense_layers:
            return layer
    raise ValueError(f"{policy} selects in none of {len(specs)} layers; take more of them")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CheckedModel:
    """A model that is compared with another one.

    Attributes:
        model: the model.
        tokens: ``[B, S]``, what it reads at each position, whatever a step feeds it; None to read
            that.
        key_scale: of its new keys.
    """

    model: Any
    tokens: Array | None = None
    key_scale: float = dataclasses.field(default=1.0, metadata={"static": True})

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    @property
    def vocabulary_axes(self) -> Axes | None:
        return vocabulary_axes(self.model)

    def __call__(self, tokens: Array, positions: Array, attend: Any, cache: Any) -> Any:
        scale = self.key_scale

        class ScaledKeys(Attend):
            def __call__(self, layer, q, k, v, cache, /, **rest: Any) -> Any:
                return attend(layer, q, jnp.asarray(scale, k.dtype) * k, v, cache, **rest)

        if self.tokens is not None:
            tokens = jnp.take_along_axis(self.tokens, positions, axis=1, mode="clip")
        return self.model(tokens, positions, attend if scale == 1 else ScaledKeys(), cache)

    def logits(self, hidden: Array) -> Array:
        return self.model.logits(hidden)


def _checked(models: Models) -> Models:
    target, copy = (
        None if model is None else CheckedModel(model, key_scale=NEW_KEY_SCALE)
        for model in (models.target, models.draft)
    )
    return models._replace(target=target, draft=copy)


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
        drafted, after = draft(models, state.with_processor_states(), config)
        after = dataclasses.replace(after, cache=after.cache.with_lengths(state.cache.lengths))
        lengths = jnp.full(state.lengths.shape, config.gamma, jnp.int32)
        whole = Drafted(tokens, lengths, parents=drafted.parents)
        target, _, pass_state = run_target(models, after, whole, config)
    picks = [result for result in pass_state.collected or () if isinstance(result, jax.Array)]
    return _Result(drafted.tokens, drafted.lengths, drafted.logits, target, picks)


def _widened(x: Array) -> Array:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def _more_than_rounding(
    actual: _Result, expected: _Result, exact: _Result, beyond: Mapping[str, float]
) -> str | None:
    """Why the errors ``beyond`` the tolerance are not due to rounding, or None if they are."""
    errors, reference = (_errors(x, exact, overall=True) for x in (actual, expected))
    for what, off in beyond.items():
        if not (reference[what] <= MAX_ROUNDING and errors[what] <= ROUNDINGS * reference[what]):
            return (
                f"the logits of its {what} are {off:.1%} from the reference's; from those of "
                f"float32, its are {errors[what]:.1%} and the reference's {reference[what]:.1%}"
            )
    return None


def _errors(actual: _Result, expected: _Result, *, overall: bool = False) -> dict[str, float]:
    """The errors of the logits of a verification, and of a draft, by `_error`."""
    errors = _error_arrays(actual, expected, overall=overall)
    return {what: float(error) for what, error in errors.items()}


@partial(jax.jit, static_argnames="overall")
def _error_arrays(actual: _Result, expected: _Result, *, overall: bool) -> dict[str, Array]:
    errors = {"verification": _error(actual.target, expected.target, overall=overall)}
    if actual.draft is None or expected.draft is None:
        return errors
    # A draft continues from its own tokens: logits are comparable until these differ.
    alike = (actual.tokens[:, :-1] == expected.tokens[:, :-1]).cumprod(axis=1).astype(bool)
    known = jnp.pad(alike, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.minimum(actual.lengths, expected.lengths)[:, None]
    known &= jnp.arange(known.shape[1])[None] < ends
    return errors | {"draft": _error(actual.draft, expected.draft, known, overall=overall)}


def _error(
    actual: Array, expected: Array, known: Array | None = None, *, overall: bool = False
) -> Array:
    """The error of logits ``[B, T, V]`` relative to the norm of those expected.

    The largest mean of a row or of a position, over the tokens that are ``known [B, T]``: in long
    drafts, a single position may have twice the error of the others without a fault. ``overall``:
    the mean of all tokens.
    """
    distance = jnp.linalg.norm(actual - expected, axis=-1) / jnp.linalg.norm(expected, axis=-1)
    known = jnp.ones_like(distance, bool) if known is None else known
    distance, many = jnp.where(known, distance, 0), known.astype(distance.dtype)
    if overall:
        return distance.sum() / jnp.maximum(many.sum(), 1)
    means = [distance.sum(axis) / jnp.maximum(many.sum(axis), 1) for axis in (0, 1)]
    return jnp.concatenate(means).max()


def share(actual: Array | np.ndarray, expected: Array | np.ndarray) -> float:
    """The smallest share of a row's picks ``[B, ...]`` that the two have in common."""
    pairs = zip(np.asarray(actual), np.asarray(expected), strict=True)
    sets = [(set(a[a >= 0].ravel().tolist()), set(b[b >= 0].ravel().tolist())) for a, b in pairs]
    return min(len(a & b) / max(len(b), 1) for a, b in sets)
