"""What the kernels that sum each tile once refuse, and why."""

import jax
import jax.numpy as jnp
import pytest

from jspec.ops.sample import SAMPLE, Role, unfiltered
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from tests.ops.drafts import GAMMA, STATIC, arguments_of

DRAWS = {"role": Role.DRAFT, "filtered": False, "axis_name": None}
one_pass = pytest.mark.parametrize("backend", ["pallas", "triton"])


@one_pass
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"filtered": True}, "filtered=True: it has no search for thresholds"),
        ({"rule": "block"}, "rule='block': it sums one residual a row"),
        ({"axis_name": "shards"}, "sharded over 'shards'"),
    ],
    ids=["filters", "block", "sharded"],
)
def test_settings_are_refused_with_a_reason(backend, change, reason):
    arguments = arguments_of(4, 5, one_hot=False)
    verify, sample = (x.backend(backend).supports for x in (VERIFY_STOCHASTIC, SAMPLE))
    assert reason in verify(*arguments, **STATIC | change)
    if "rule" not in change:
        tokens = jnp.zeros((4, GAMMA + 1), jnp.int32)
        assert reason in sample(arguments[1], arguments[4], tokens, **DRAWS | change)


@one_pass
@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((2, 3, 2**20 + 1), "V=1048577 must be in 1..1048576"),
        ((2, 1025, 8), "1025 positions a row are over 1024"),
        ((0, 3, 8), "logits (0, 3, 8) leave nothing to launch"),
        ((2**21, 1, 2**20), "have more than 2147483647 tiles of 1024 tokens"),
    ],
    ids=["vocabulary", "positions", "no-rows", "tiles"],
)
def test_shapes_are_refused_with_a_reason(backend, shape, reason):
    logits = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct(shape[:2], jnp.int32)
    assert reason in SAMPLE.backend(backend).supports(logits, unfiltered(1), tokens, **DRAWS)


def test_limits_of_one_backend_are_refused_with_a_reason():
    draft, target, lengths, stops, *rest = arguments_of(4, 5, one_hot=True)
    many = jnp.zeros((4, 33), jnp.int32)
    triton, pallas = (VERIFY_STOCHASTIC.backend(x).supports for x in ("triton", "pallas"))
    for supports in (triton, pallas):
        got = supports(draft, target, lengths, many, *rest, **STATIC)
        assert got == "33 stop tokens a row are over 32"
    got = pallas(draft[:, :0], target[:, :1], lengths, stops, *rest, **STATIC)
    assert got == "B=4, gamma=0 leave nothing to compare"
