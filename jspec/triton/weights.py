"""Mean softmax weights of a cache's keys in Triton: one more pass over the keys."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.attention.dense import attention_sizes
from jspec.triton.attention import keys_of_tile, refuses, rows_of_tile, tile_shape
from jspec.triton.call import refuses_triton, triton_call
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes of the kernel.

    Attributes:
        bytes: of the keys of a tile.
        rows: of queries of a tile, at most, a power of 2.
        warps: of a program.
    """

    bytes: int
    rows: int
    warps: int


def mean_weights_triton(
    q: Array,
    k: Array,
    lse: Array,
    *,
    scale: float,
    softcap: float | None,
    blocks: Blocks | None = None,
) -> Array:
    """The Triton backend of `jspec.ops.mean_weights`."""
    from jspec.triton.weights_kernel import weights_kernel

    blocks = blocks or Blocks(**tuned.block("mean_weights", "triton", attention_sizes(q, k)))
    batch, tokens, heads, _ = q.shape
    slots, kv_heads = k.shape[1:3]
    shape = tile_shape(k, None, 0)
    keys = keys_of_tile(shape, k, None, blocks.bytes)
    tiles = -(-slots // keys)
    return triton_call(
        weights_kernel,
        *(q, k, lse),
        out=(jax.ShapeDtypeStruct((batch, kv_heads, slots), jnp.float32),),
        programs=batch * tiles * kv_heads,
        warps=blocks.warps,
        TOKENS=tokens,
        SLOTS=slots,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SIZE=shape["SIZE"],
        WIDTH=shape["WIDTH"],
        SCALE=float(scale),
        SOFTCAP=softcap,
        TILES=tiles,
        ROWS=rows_of_tile(tokens * heads // kv_heads, q, k, blocks.rows),
        KEYS=keys,
    )[0]


def _supports(q: Array, k: Array, *args, **kwargs) -> str | None:
    return refuses(q, k, None) or refuses_triton(k)


WEIGHTS = Backend("triton", mean_weights_triton, _supports)
