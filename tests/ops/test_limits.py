"""Around each limit of a backend: what `supports` takes runs, and what it refuses, others take.

A refusal that only the handler knows would end a call with ``implementation=None``, which has a
backend that could have served.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import BackendError, Operation
from jspec.ops.cases import counts, kv_rows, ragged_tokens
from jspec.ops.commit import VERIFY_AND_COMMIT
from jspec.ops.fused import VERIFY_AND_PACK
from jspec.ops.packing import PACK
from jspec.ops.sample import SAMPLE, Role, unfiltered
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from jspec.ops.verify import VERIFY_GREEDY

SAMPLED = {"filtered": False, "axis_name": None}


def draws(positions: int, vocabulary: int, batch: int = 1) -> tuple:
    """Arguments of `SAMPLE`, each position certain of a token."""
    logits = np.full((batch, positions, vocabulary), -np.inf, jnp.bfloat16)
    logits[:, :, vocabulary // 2] = 0
    return logits, unfiltered(batch), np.zeros((batch, positions), np.int32)


def drafted(positions: int, batch: int = 2) -> tuple:
    """Arguments of `VERIFY_STOCHASTIC` with ``positions`` of the target, all accepted."""
    draft, target, lengths, stops = ragged_tokens(batch, positions - 1, 1)
    draft, target = draft % 4, np.concatenate([draft % 4, target[:, -1:] % 4], axis=1)
    logits = 40 * np.eye(4, dtype=np.float32)[target]
    return draft, logits, lengths, stops, unfiltered(batch), np.zeros(batch, np.int32), None


def greedy(batch: int, gamma: int, stops: int = 1) -> tuple:
    return ragged_tokens(batch, gamma, stops)


def committing(positions: int) -> tuple:
    """Arguments of `VERIFY_AND_COMMIT` with ``positions`` of the target, of a row that goes on."""
    draft, _, lengths, stops = greedy(1, positions - 1)
    logits = np.zeros((1, positions, 3), np.float32)
    state = np.zeros((1, 2 * positions), np.int32), np.zeros(1, np.int32), np.zeros(1, bool)
    return draft, logits, lengths, stops, np.full(1, 2 * positions, np.int32), *state


def packing(batch: int, gamma: int = 3) -> tuple:
    return kv_rows(batch, gamma, 8, "float32"), counts(batch, gamma)


def fused(batch: int, gamma: int = 3) -> tuple:
    return *greedy(batch, gamma), kv_rows(batch, gamma, 8, "float32")


# Operation, backend, arguments of a size, static arguments, a size that is taken, one that is not.
LIMITS = {
    "sample-positions": (SAMPLE, "cuda", lambda n: draws(n, 3), 1024, 1025),
    "sample-vocabulary": (SAMPLE, "cuda", lambda n: draws(1, n), 2**24, 2**24 + 1),
    "verify-positions": (VERIFY_STOCHASTIC, "cuda", drafted, 1024, 1025),
    "commit-positions": (VERIFY_AND_COMMIT, "cuda", committing, 1024, 1025),
    "triton-sample-vocabulary": (SAMPLE, "triton", lambda n: draws(1, n), 2**20, 2**20 + 1),
    "triton-verify-positions": (VERIFY_STOCHASTIC, "triton", drafted, 1024, 1025),
    "single-block": (VERIFY_AND_PACK, "cuda_single", fused, 32, 33),
    "pack-empty": (PACK, "cuda", packing, 1, 0),
    "fused-empty": (VERIFY_AND_PACK, "cuda", fused, 1, 0),
}


@pytest.mark.parametrize(
    ("operation", "backend", "arguments", "within", "refused"), LIMITS.values(), ids=list(LIMITS)
)
def test_what_is_within_a_limit_runs_and_what_is_refused_goes_elsewhere(
    operation, backend, arguments, within, refused
):
    static = _static(operation)
    args = arguments(within)
    if reason := operation.backend(backend).supports(*args, **static):
        pytest.skip(f"{backend}: {reason}")
    _run(operation, backend, args)
    args = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, arguments(refused)))
    with pytest.raises(BackendError, match=f"{operation.name} cannot run as asked; {backend}: "):
        operation.choose(backend, *args, **static)
    served = operation.choose(None, *args, **static)
    assert served.supports(*args, **static) is None
    if operation is not VERIFY_STOCHASTIC and args[0].size < 2**20:  # else XLA takes seconds
        _run(operation, None, arguments(refused))


def _static(operation: Operation) -> dict:
    if operation is SAMPLE:
        return SAMPLED | {"role": Role.DRAFT}
    return SAMPLED | {"rule": "token"} if operation is VERIFY_STOCHASTIC else {}


def _run(operation: Operation, backend: str | None, args: tuple) -> None:
    run = jax.jit(partial(operation, implementation=backend, **_static(operation)))
    jax.block_until_ready(run(*jax.device_put(args)))


# Arguments whose sizes no machine of a test has: only their shapes are made.
HUGE = {
    "tokens": (VERIFY_GREEDY, ((2**21, 1023), (2**21, 1024), (2**21,), (2**21, 1))),
    "stop-tokens": (VERIFY_GREEDY, ((2**21, 1), (2**21, 2), (2**21,), (2**21, 1024))),
}


@pytest.mark.parametrize(("operation", "shapes"), HUGE.values(), ids=list(HUGE))
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_more_tokens_than_int32_counts_are_refused(operation, shapes, backend):
    args = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    reason = operation.backend(backend).supports(*args)
    assert reason is not None
    assert "are over" in reason
    assert operation.choose(None, *args).supports(*args) is None


@pytest.mark.parametrize("field", ["rate", "top_k", "top_p", "min_p", "seeds"])
def test_settings_of_another_dtype_are_refused(field):
    logits, settings, where = draws(1, 3)
    changed = settings._replace(**{field: getattr(settings, field).astype(jnp.float16)})
    reason = SAMPLE.backend("cuda").supports(logits, changed, where, **_static(SAMPLE))
    assert reason is not None
    assert f"{field} is float16" in reason
    assert SAMPLE.choose(None, logits, changed, where, **_static(SAMPLE)).name == "xla"
