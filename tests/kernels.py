"""Random arguments for the kernels' tests, and the comparison with the references."""

import jax
import numpy as np

from jspec.ops.pack import pack_xla
from jspec.ops.verify import greedy_xla

GREEDY = {
    "gamma-1": (5, 1, 1),
    "no-stops": (7, 2, 0),
    "odd": (5, 5, 2),
    "one-row": (1, 8, 1),
    "warp": (9, 32, 3),
    "over-a-warp": (6, 33, 1),
    "two-pieces": (6, 100, 2),
    "largest": (6, 128, 1),
    "three-pieces": (3, 200, 1),
}
"""``(B, gamma, M)`` by name."""

PACK = {
    "one-element-word": (3, 1, 8, "float16"),
    "one-row": (1, 5, 16, "float32"),
    "odd-words": (4, 5, 96, "bfloat16"),
    "bytes": (5, 9, 128, "int8"),
    "many-rows": (67, 3, 8, "uint16"),
    "wide": (2, 3, 1024, "float32"),
}
"""``(B, gamma, D, dtype)`` by name, every row whole words of 16 bytes."""


def greedy_arguments(rng, batch: int, gamma: int, stops: int, dtype=np.int32) -> list[np.ndarray]:
    """Over few ids, so that runs of every length, ragged drafts, padding and stop tokens at every
    place occur; lengths go past both ends of 0..gamma, and the ends of the type are among the ids.
    """
    ids = np.array([0, 1, np.iinfo(dtype).max], dtype)
    target = rng.choice(ids, (batch, gamma + 1), p=[0.45, 0.45, 0.1])
    falls = rng.random((batch, gamma)) < rng.choice([0, 0.5 / gamma, 2 / gamma, 0.5, 1], (batch, 1))
    draft = np.where(falls, rng.choice(ids, (batch, gamma)), target[:, :-1])
    lengths = np.where(rng.random(batch) < 0.5, gamma, rng.integers(-1, gamma + 2, batch))
    draft = np.where(np.arange(gamma) < lengths[:, None], draft, dtype(-1))
    # A stop token among so few ids would end every row at once: one id of its own, set at random.
    stop = dtype(7)
    stop_tokens = np.where(rng.random((batch, stops)) < 0.6, stop, rng.choice(ids, (batch, stops)))
    stop_tokens = np.where(rng.random((batch, stops)) < 0.6, stop_tokens, dtype(-1))
    at = rng.integers(0, gamma + 1, batch)
    target[np.arange(batch), at] = stop
    placed = (at < gamma) & (rng.random(batch) < 0.9)
    draft[placed, at[placed]] = stop
    # An id of -1 in both, which agrees and ends nothing even where a stop token is -1.
    padding = rng.random((batch, gamma + 1)) < rng.choice([0, 0.5 / gamma, 0.3], (batch, 1))
    target[padding] = -1
    draft[padding[:, :-1]] = -1
    return [draft, target, lengths.astype(np.int32), stop_tokens]


def pack_arguments(rng, batch: int, gamma: int, width: int, dtype) -> list[np.ndarray]:
    """Rows of small whole numbers, each other than its neighbours; counts past both ends too."""
    rows = np.arange(batch * gamma * width).reshape(batch, gamma, width) * 7 % 113
    accepted = rng.integers(-1, gamma + 2, batch)
    accepted = np.where(rng.random(batch) < 0.3, rng.choice([0, gamma], batch), accepted)
    return [rows.astype(dtype), accepted.astype(np.int32)]


def assert_greedy(got, arguments) -> None:
    """What a backend of `verify_greedy` gave is the reference's, bit for bit."""
    with jax.numpy_dtype_promotion("standard"):  # under x64 the reference's positions are int64
        expected = jax.jit(greedy_xla)(*arguments)
    for i, (have, want) in enumerate(zip(got, expected, strict=True)):
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have, want, f"field {i}")


def assert_packed(got, arguments) -> None:
    """What a backend of `pack` gave is the reference's up to its total."""
    rows, offsets, total = jax.jit(pack_xla)(*arguments)
    assert (got[0].shape, got[0].dtype) == (rows.shape, rows.dtype)
    assert (got[1].dtype, got[2].dtype) == (offsets.dtype, total.dtype)
    np.testing.assert_array_equal(got[1], offsets)
    np.testing.assert_array_equal(got[2], total)
    kept = int(total)
    np.testing.assert_array_equal(np.asarray(got[0])[:kept], np.asarray(rows)[:kept])
