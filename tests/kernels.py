"""What the kernels' tests share: comparing with the references, and what can be interpreted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jspec.dispatch import Case
from jspec.ops.commit import VERIFY_AND_COMMIT
from jspec.ops.packing import pack_xla
from jspec.ops.verify import greedy_xla


def takes(refuses: Callable[..., str | None], *arguments: int) -> Callable[[Case], bool]:
    """Whether a kernel that ``refuses`` by these arguments takes a case, and it is quick enough to
    be interpreted."""

    def is_case(case: Case) -> bool:
        operands = case.arguments
        return operands[0].shape[0] <= 100 and refuses(*(operands[i] for i in arguments)) is None

    return is_case


def long_codes(slots: int = 32768, heads: int = 32) -> tuple[jax.Array, ...]:
    """Arguments of `hash_select` of 8 rows of 128 bits, as long as those of a benchmark."""
    keys = jax.random.split(jax.random.key(0))
    q, codes = (
        jax.random.bits(key, (8, n, heads, 4), jnp.uint32)
        for key, n in zip(keys, (1, slots), strict=True)
    )
    lengths = jnp.broadcast_to(slots - 1000 * jnp.arange(8, dtype=jnp.int32)[:, None], (8, heads))
    return q, codes, jnp.full((8, heads), 512, jnp.int32), lengths


def assert_greedy(got, arguments) -> None:
    """What a backend of `verify_greedy` gave is the reference's, bit for bit."""
    with jax.numpy_dtype_promotion("standard"):  # under x64 the reference's positions are int64
        expected = jax.jit(greedy_xla)(*arguments)
    for i, (have, want) in enumerate(zip(got, expected, strict=True)):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want, f"field {i}")


def assert_packed(got, arguments) -> None:
    """What a backend of `pack` gave is the reference's up to its total."""
    kv, offsets, total = jax.jit(pack_xla)(*arguments)
    assert (got[0].shape, got[0].dtype) == (kv.shape, kv.dtype)
    assert (got[1].dtype, got[2].dtype) == (offsets.dtype, total.dtype)
    np.testing.assert_array_equal(got[1], offsets)
    np.testing.assert_array_equal(got[2], total)
    remaining = int(total)
    np.testing.assert_array_equal(np.asarray(got[0])[:remaining], np.asarray(kv)[:remaining])


def assert_fused(got, arguments) -> None:
    """What a backend of `verify_and_pack` gave is what the references give, one after the other."""
    *tokens, kv = arguments
    assert_greedy(got[:6], tokens)
    assert_packed(got[6:], (kv, jnp.asarray(got[0])))


def assert_committed(got, arguments) -> None:
    """What a backend of `verify_and_commit` gave is the reference's, bit for bit."""
    expected = jax.jit(VERIFY_AND_COMMIT.backend("xla").run)(*arguments)
    for i, (have, want) in enumerate(zip(got, expected, strict=True)):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want, f"output {i}")
