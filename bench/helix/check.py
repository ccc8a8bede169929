"""Compares steps on a mesh with steps on one device, on the same tokens.

The first layers run on the mesh, on one device, and on one device in float32, with the same
weights, keys and values. The error that bfloat16 causes on one device bounds the difference between
the mesh and that device: the mesh rounds as often and sums in another order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench.cases import Case
from bench.decode.check import LAYERS, MIN_SHARED, REFERENCE, TOLERANCE, CheckedModel, share
from bench.decode.running import rewound
from bench.helix.states import alone, filled, model_of, step_config
from jspec.decode.draft import Drafted, NoDraft
from jspec.decode.on_mesh import jit_steps, on_mesh_of
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models, vocabulary_axes
from jspec.decode.step import draft, run_target
from jspec.ops.verify import Verified
from jspec.ops.vocabulary import Axes
from jspec.typing import Array

TOKENS = 16  # compared at least: a block of positions that a device holds
# If the mesh and one device have the same error against float32, they differ by at most twice that
# (triangle inequality).
APART = 2
STEPS = 2  # at least: the second one drafts from what the first one picked
# How errors ``[B, T]`` are reduced, and the limit for one device. A fault at all positions shows in
# the mean, one at a single position in the maximum, which rounding moves by 0.06.
SUMS = (
    ("in the mean of a row", lambda x: float(x.mean(axis=1).max()), TOLERANCE),
    ("at the worst position", lambda x: float(x.max()), 2 * TOLERANCE),
)


@dataclasses.dataclass(frozen=True)
class Computed:
    """The results of steps over given tokens.

    ``logits``: float32 ``[B, T, V]`` of the ``verification`` and, where there is one, the
    ``draft``. ``picked``: int32 ``[B, n]`` of each step and layer, the positions that verification
    picked for the next draft, -1 for none.
    """

    logits: dict[str, np.ndarray]
    picked: list[np.ndarray]


def check(case: Case) -> tuple[str | None, dict[str, float]]:
    """Why the first layers of a case are wrong, or None, and the errors of their logits."""
    one, right = _reference(tuple(alone(case).items()))
    mesh = one if case == alone(case) else computed(case, one)
    return judged(mesh, one, right)


@functools.lru_cache(maxsize=1)
def _reference(case: tuple[tuple[str, Any], ...]) -> tuple[Computed, Computed]:
    """The results of one device in bfloat16, and in float32 by the backend ``xla``."""
    one = computed(dict(case))
    with jax.default_matmul_precision("highest"):  # GPUs use less by default
        return one, computed(dict(case), one, in_float32=True)


def computed(
    case: Case, reference: Computed | None = None, *, in_float32: bool = False
) -> Computed:
    """Run steps on the tokens around position S, half of them after it, by the first layers.

    At S the block of another device begins. Drafts read the positions that were picked for
    ``reference``: with random keys a head may attend to a single one, which two nearly equal
    selections need not share.
    """
    model, config = model_of(case, LAYERS), step_config(case)
    if in_float32:
        model = jax.tree.map(lambda x: x.astype(jnp.float32), model)
        config = dataclasses.replace(config, backends=REFERENCE, exact=None)
    state = filled(model, case, config)
    size = step_config(case).gamma + 1
    steps = max(STEPS, -(-TOKENS // size))
    state = _giving_drafts(rewound(state, max(case["S"] - steps * size // 2, 0)))
    logits: list[dict[str, np.ndarray]] = []
    picked: list[np.ndarray] = []
    for _ in range(steps):
        step_logits, state = _step(model, state, config=config)
        logits.append(jax.device_get(step_logits))
        if state.draft is None:
            continue
        picked_now = state.draft.picked
        if reference is not None:
            reference_picked = reference.picked[len(picked) : len(picked) + len(picked_now)]
            placed = tuple(map(_placed, reference_picked, picked_now))
            draft_state = dataclasses.replace(state.draft, picked=placed)
            state = dataclasses.replace(state, draft=draft_state)
        picked += map(np.array, picked_now)  # copies: the next step takes the state
    names = logits[0]
    return Computed({x: np.concatenate([y[x] for y in logits], axis=1) for x in names}, picked)


def _placed(positions: np.ndarray, like: Array) -> Array:
    """``positions [B, n]`` on each device of ``like``, which reads those that it holds."""
    devices = like.shape[1] // positions.shape[1]
    return jax.device_put(np.tile(positions, (1, devices)), like.sharding)


def judged(mesh: Computed, one: Computed, right: Computed) -> tuple[str | None, dict[str, float]]:
    """Why ``mesh`` is wrong, or None, and the error of its logits at the worst position.

    ``one`` and ``right`` are of one device, in bfloat16 and in float32. The error is relative to
    ``one``; if ``mesh`` is ``one``, relative to ``right``.
    """
    rounding, apart = distances(one, right), distances(mesh, one)
    error = {name: float(x.max()) for name, x in (rounding if mesh is one else apart).items()}
    for name, (where, total, limit) in itertools.product(rounding, SUMS):
        one_device_error, off = total(rounding[name]), total(apart[name])
        if not one_device_error <= limit:
            return (
                f"one device's logits of its {name} are wrong by {one_device_error:.1%} {where}",
                error,
            )
        if not off <= APART * one_device_error:
            reason = f"the logits of its {name} are wrong by {off:.1%} {where}; by rounding, one "
            return reason + f"device's are by {one_device_error:.1%}", error
    for who, actual, expected in (("one device", one, right), ("it", mesh, one)):
        shared = min(map(share, actual.picked, expected.picked), default=1.0)
        if shared < MIN_SHARED:
            return f"{who} picks {shared:.0%} of what it should in a layer", error
    return None, error


def distances(actual: Computed, expected: Computed) -> dict[str, np.ndarray]:
    """The relative error of the logits at each position ``[B, T]``."""

    def of(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
        return np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)

    return {name: of(actual.logits[name], x) for name, x in expected.logits.items()}


def _giving_drafts(state: DecodeState) -> DecodeState:
    """The state in sampled mode, in which drafts return their logits."""
    return dataclasses.replace(state, mode="sampled")


@jit_steps(static_argnames="config", donate_argnames="state")
def _step(model: Any, state: DecodeState, config: StepConfig) -> tuple[dict[str, Any], DecodeState]:
    """A step that drafts the tokens of ``state.tokens`` after the lengths and accepts all of them.

    Returns the logits ``[B, gamma + 1, V]`` of the verification and ``[B, gamma, V]`` of the draft.
    """
    names = ["verification"] if isinstance(config.draft, NoDraft) else ["verification", "draft"]

    def run(models: Models, state: DecodeState) -> tuple[dict[str, Any], DecodeState]:
        models = models._replace(target=CheckedModel(models.target, state.tokens))
        drafted, state = draft(models, state, config)
        before, many = state.cache.lengths, jnp.full_like(drafted.lengths, config.gamma)
        whole = Drafted(drafted.tokens, many)
        logits, state, pass_state = run_target(models, state, whole, config)
        cache = state.cache.with_lengths(before + config.gamma + 1)
        state = dataclasses.replace(state, cache=cache)
        # A drafter learns how many were accepted; the tokens are in the state already.
        none, block = jnp.zeros_like(state.done), jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
        accepted = Verified(many, many + 1, none, block[:, -1], none, block)
        state = config.draft.learn(state, pass_state, accepted)
        axes, logits_by_name = vocabulary_axes(models.target), {"verification": logits}
        if drafted.logits is not None:
            logits_by_name["draft"] = drafted.logits
        return {name: _whole(x, axes) for name, x in logits_by_name.items()}, state

    with config.of_models():
        like = dict.fromkeys(names, state.done), state
        return on_mesh_of(model, config, run, Models(model), state, like=like)


def _whole(logits: Array, axes: Axes | None) -> Array:
    """The whole logits ``[..., V]`` from the parts of the devices of ``axes``."""
    if axes is None:
        return logits
    size, axis = logits.shape[-1], logits.ndim - 1
    whole = jnp.zeros((*logits.shape[:-1], size * lax.axis_size(axes)), logits.dtype)
    start = lax.axis_index(axes) * size
    return lax.psum(lax.dynamic_update_slice_in_dim(whole, logits, start, axis), axes)
