"""Verification with a step's bookkeeping on Mosaic GPU: interpreted, lowered, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.ops.commit import VERIFY_AND_COMMIT as OPERATION
from jspec.pallas import commit as module
from jspec.pallas.commit import Blocks, commit_pallas
from jspec.pallas.mosaic import refuses_pallas
from tests.kernels import assert_committed
from tests.ops.backends import every_case
from tests.ops.test_commit import with_later_tokens
from tests.pallas.mosaic import interpret, lower


@every_case(OPERATION, lambda case: case.name != "many-rows")
def test_equals_the_reference_when_interpreted(case):
    arguments = case.arguments
    assert_committed(interpret(commit_pallas, *arguments), arguments)


@pytest.mark.parametrize("name", ["no-draft", "odd"])
def test_parts_equal_the_reference_when_interpreted(name):
    arguments = next(case for case in OPERATION.cases() if case.name == name).arguments
    blocks = Blocks(whole=0, part=16, tile=64)
    got = interpret(lambda *x: commit_pallas(*x, blocks=blocks), *arguments)
    assert_committed(got, arguments)


def test_slots_after_the_block_stay_as_they_are():
    case = next(case for case in OPERATION.cases() if case.name == "odd")
    arguments = with_later_tokens(case.arguments)
    assert_committed(interpret(commit_pallas, *arguments), arguments)


@every_case(OPERATION)
@pytest.mark.parametrize("whole", [0, 2**14])
def test_equals_the_reference_on_a_gpu(case, whole):
    if reason := refuses_pallas():
        pytest.skip(reason)
    arguments = case.arguments
    blocks = Blocks(whole=whole, part=512, tile=8192)
    assert_committed(jax.jit(lambda *x: commit_pallas(*x, blocks=blocks))(*arguments), arguments)


@pytest.mark.parametrize(
    ("gamma", "vocabulary", "launches"), [(0, 260, 1), (8, 260, 1), (0, 151936, 2), (9, 128257, 2)]
)
def test_is_few_launches_and_writes_in_place(gamma, vocabulary, launches):
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    logits = jax.ShapeDtypeStruct((4, gamma + 1, vocabulary), jnp.bfloat16)
    rows = like((4, 512)), like((4,)), jax.ShapeDtypeStruct((4,), jnp.bool_)
    text = lower(commit_pallas, like((4, gamma)), logits, *map(like, [(4,), (4, 2), (4,)]), *rows)
    assert text.count("stablehlo.custom_call") == launches
    assert text.count("#stablehlo.output_operand_alias<") == 3


@pytest.mark.parametrize(("positions", "vocabulary"), [(5, 16), (5, 17), (1, 512)])
def test_few_tokens_lower(positions, vocabulary):
    """A vocabulary of one part, and of two."""
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    logits = jax.ShapeDtypeStruct((4, positions, vocabulary), jnp.float32)
    rows = like((4, 512)), like((4,)), jax.ShapeDtypeStruct((4,), jnp.bool_)
    commit = functools.partial(commit_pallas, blocks=Blocks(whole=0, part=512, tile=8192))
    lower(commit, like((4, positions - 1)), logits, *map(like, [(4,), (4, 2), (4,)]), *rows)


@pytest.mark.parametrize(
    ("positions", "vocabulary", "dtype", "reason"),
    [
        (2, 0, "float32", "B=3, V=0 leave nothing to verify"),
        (2, 9, "float64", "logits of float64 are none of float32, bfloat16, float16"),
        (257, 9, "float32", "257 positions a row are over 256"),
        (9, 2**27, "float32", r"logits (3, 9, 134217728) have more elements than int32 counts"),
    ],
)
def test_refuses_with_a_reason(positions, vocabulary, dtype, reason):
    draft = np.zeros((3, positions - 1), np.int32)
    logits = np.broadcast_to(np.zeros((), dtype), (3, positions, vocabulary))
    stops = np.zeros((3, 1), np.int32)
    assert module.VERIFY_AND_COMMIT.supports(draft, logits, stops[:, 0], stops) == reason


def test_refuses_more_stop_tokens_than_it_unrolls():
    draft, logits, stops = np.zeros((3, 1)), np.zeros((3, 2, 9), np.float32), np.zeros((3, 33))
    reason = module.VERIFY_AND_COMMIT.supports(draft, logits, stops[:, 0], stops)
    assert reason == "33 stop tokens a row are over 32"


def test_refuses_rows_that_devices_share():
    """Mosaic takes no reference to an array that varies over a manual axis."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    case = next(case for case in OPERATION.cases() if case.name == "small")
    reasons = []

    def run(*arguments):
        reasons.append(module.VERIFY_AND_COMMIT.supports(*arguments))
        return arguments[0]

    by_row = jax.sharding.PartitionSpec("x")
    jax.eval_shape(
        jax.shard_map(run, mesh=mesh, in_specs=by_row, out_specs=by_row), *case.arguments
    )
    assert reasons == ["arrays vary over the mesh axes ['x']; it writes none of those in place"]


def test_steps_of_a_scan_write_in_place():
    """As a chunk of decoding calls it: its rows are the carry."""
    case = next(case for case in OPERATION.cases() if case.name == "odd")

    def scanned(run, *arguments):
        *fixed, tokens, cached, done = arguments

        def step(rows, _):
            *_, committed, tokens, cached, done = run(*fixed, *rows)
            return (tokens, cached, done), committed

        return jax.lax.scan(step, (tokens, cached, done), None, length=3)

    run = functools.partial(scanned, commit_pallas)
    expected = jax.jit(functools.partial(scanned, OPERATION.backend("xla").run))(*case.arguments)
    got = interpret(run, *case.arguments)
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(have, want)
    assert lower(run, *case.arguments).count("#stablehlo.output_operand_alias<") == 3
