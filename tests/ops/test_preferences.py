"""What ``implementation=None`` tries on a GPU, from best to worst."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from jspec.ops.fused import VERIFY_AND_PACK
from jspec.ops.pack import PACK
from jspec.ops.verify import VERIFY_GREEDY

OPERATIONS = {x.name: x for x in (VERIFY_GREEDY, PACK, VERIFY_AND_PACK)}
SHAPES = list(itertools.product((1, 32, 65, 256, 1024), (1, 8, 128), (0, 1, 2048)))


def arguments(operation: str, batch: int, gamma: int, width: int) -> list[jax.ShapeDtypeStruct]:
    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    tokens = [integers(batch, gamma), integers(batch, gamma + 1), integers(batch)]
    tokens.append(integers(batch, 1))
    rows = jax.ShapeDtypeStruct((batch, gamma, width), jnp.bfloat16)
    return {
        "verify_greedy": tokens,
        "pack": [rows, integers(batch)],
        "verify_and_pack": [*tokens, rows],
    }[operation]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_the_last_choice_never_refuses(operation):
    for platform, shape in itertools.product(("gpu", "cpu"), SHAPES):
        given = arguments(operation.name, *shape)
        names = operation.preference(platform, *given)
        assert len(set(names)) == len(names)
        assert set(names) <= set(operation.backends)
        assert operation.backend(names[-1]).supports(*given) is None


@pytest.mark.parametrize(
    ("operation", "shape", "names"),
    [
        ("verify_greedy", (32, 128, 0), ("pallas", "cuda", "triton")),
        ("verify_greedy", (256, 8, 0), ("cuda", "triton", "pallas")),
        ("verify_greedy", (1024, 8, 0), ("triton", "cuda", "pallas")),
        ("pack", (1, 8, 512), ("triton", "pallas", "cuda")),
        ("pack", (32, 128, 2048), ("pallas", "triton", "cuda")),
        ("pack", (256, 8, 1024), ("triton", "pallas", "cuda")),
        ("pack", (256, 128, 512), ("pallas", "triton", "cuda")),
        ("pack", (1024, 8, 512), ("triton", "pallas", "cuda")),
        ("pack", (1024, 128, 512), ("pallas", "triton", "cuda")),
        ("verify_and_pack", (32, 8, 2048), ("triton", "cuda", "two_steps")),
        ("verify_and_pack", (32, 128, 2048), ("triton", "two_steps")),
        ("verify_and_pack", (256, 8, 512), ("triton", "two_steps")),
        ("verify_and_pack", (256, 16, 512), ("two_steps",)),
        ("verify_and_pack", (256, 128, 512), ("two_steps",)),
        ("verify_and_pack", (1024, 4, 128), ("two_steps",)),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)),
)
def test_the_order_is_as_measured(operation, shape, names):
    asked = OPERATIONS[operation].preference("gpu", *arguments(operation, *shape))
    assert asked[: len(names)] == names


def test_elsewhere_the_reference_runs():
    for name, operation in OPERATIONS.items():
        assert operation.preference("cpu", *arguments(name, 2, 3, 4)) == ("xla",)
