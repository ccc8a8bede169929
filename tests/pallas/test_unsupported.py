"""What Mosaic GPU does not lower, each by its smallest program: why kernels have inline code.

Where one of these lowers, `jspec.pallas.inline` can lose a function.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.inline import TILE, slot_layout
from tests.pallas.mosaic import lower

pytestmark = pytest.mark.skipif(
    jax.__version_info__[:2] != (0, 11), reason="other versions may lower more"
)


def store_bits(vector, out):
    out[...] = lax.population_count(vector)


def store_sums(vector, out):
    out[...] = jnp.cumsum(vector)


def store_at_places(vector, out):
    out[vector] = vector


def add_at_places(vector, out):
    plgpu.atomic_add(out.at[vector], vector)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (store_bits, "Unimplemented primitive .* population_count"),
        (store_sums, "Unimplemented primitive .* cumsum"),
        (store_at_places, "int_indexer_shape"),
        (add_at_places, "int_indexer_shape"),
    ],
)
def test_mosaic_does_not_lower(body, message):
    def kernel(source, out):
        vector = plgpu.load(source, layout=slot_layout(), optimized=False)  # pyright: ignore[reportCallIssue]
        body(vector, out)

    like = jax.ShapeDtypeStruct((TILE,), jnp.int32)
    with pytest.raises(NotImplementedError, match=message):
        lower(plgpu.kernel(kernel, out_type=like), like)


def test_mosaic_lowers_the_rest_of_the_program():
    def kernel(source, out):
        out[...] = plgpu.load(source, layout=slot_layout(), optimized=False)  # pyright: ignore[reportCallIssue]

    like = jax.ShapeDtypeStruct((TILE,), jnp.int32)
    assert lower(plgpu.kernel(kernel, out_type=like), like).count("stablehlo.custom_call") == 1
