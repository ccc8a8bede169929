"""Attention over selected slots on the matrix units of NVIDIA GPUs, without a copy of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend
from jspec.ops.attention.gathered import gathered_sizes
from jspec.typing import Array

# As in src/gathered/gathered.h.
CHANNELS = (64, 128)  # of a key and of a value
MAX_LISTED = 65536  # slots of a list, with those of the tail
MAX_PARTS = 32  # into which they are split
TILE = 16  # slots
FEW_ROWS = 8  # T * G up to which a block shares a part, and merges what its warps leave
# Slots of a part, which shared memory has room for.
MAX_CHUNK = MAX_LISTED // MAX_PARTS
MAX_SHARED_CHUNK = 16384
MAX_BATCH = 65535


def gathered_cuda(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    counts: Array | None,
    log_weights: Array | None = None,
    scale: float,
    softcap: float | None,
    value_size: int | None,
) -> tuple[Array, Array]:
    """The CUDA backend of `jspec.ops.gathered_attention`."""
    del log_weights, softcap, value_size  # None: `refuses`
    assert v is not None  # `refuses`
    blocks = tuned.block("gathered_attention", "cuda", gathered_sizes(q, k, v, positions, selected))
    batch, tokens, heads, size = q.shape
    kv_heads = k.shape[2]
    rows = tokens * heads // kv_heads
    max_chunk = MAX_SHARED_CHUNK if rows <= FEW_ROWS else MAX_CHUNK
    parts = parts_of(selected.shape[-1] + tail.shape[1], min(blocks["chunk"], max_chunk))
    lead = (batch, kv_heads, parts, rows)
    shapes = (q.shape[:3], (*lead, size), (*lead, 2))
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    out, lse, *_ = library.call(
        "gathered_attention",
        (jax.ShapeDtypeStruct(q.shape, q.dtype), *floats),
        *(q, k, v, positions, selected, tail, context_len),
        *(() if counts is None else (counts,)),
        vmap_method="sequential",
        scale=np.float32(scale),
        parts=np.int32(parts),
        stages=np.int32(blocks["stages"]),
        warps=np.int32(blocks["warps"]),
    )
    return out, lse


def parts_of(listed: int, chunk: int) -> int:
    """Into how many parts ``listed`` slots are split, of about ``chunk`` slots each.

    It follows from sizes alone: a row's arithmetic must not depend on its neighbours.
    """
    tiles = -(-listed // TILE)
    return min(-(-tiles * TILE // chunk), tiles, MAX_PARTS)


def refuses(
    q: Array,
    k: Array,
    v: Array | None,
    selected: Array,
    tail: Array,
    *,
    log_weights: Array | None,
    scale: float,
    softcap: float | None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, heads, size = q.shape
    listed = selected.shape[-1] + tail.shape[1]
    if v is None:
        return "the values are in the keys"
    if len(k) != batch:
        return f"k {k.shape} has slots that all rows of q {q.shape} read"
    if q.dtype != jnp.bfloat16 or k.dtype != jnp.bfloat16:
        return f"q of {q.dtype}, k and v of {k.dtype} are not all bfloat16"
    if size not in CHANNELS or v.shape[3] != size:
        return f"H={size} and H'={v.shape[3]} are not both {' or both '.join(map(str, CHANNELS))}"
    if log_weights is not None or softcap is not None:
        return f"softcap={softcap} or log_weights are passed: the kernel supports neither"
    if not scale > 0:
        return f"scale={scale} is not positive"
    if 0 in q.shape or 0 in k.shape or not selected.shape[-1]:
        return f"q {q.shape}, k {k.shape} or selected {selected.shape} is empty"
    if listed > MAX_LISTED:
        return f"n + m = {listed} slots are over {MAX_LISTED}"
    if batch > MAX_BATCH:
        return f"B={batch} is over {MAX_BATCH}"
    if batch * tokens * heads * MAX_PARTS > 2**31 - 1:
        return f"q {q.shape} has more rows than int32 counts in {MAX_PARTS} parts"
    return None


def _supports(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    counts: Array | None,
    log_weights: Array | None = None,
    scale: float,
    softcap: float | None,
    value_size: int | None,
) -> str | None:
    del positions, context_len, counts, value_size
    settings = {"log_weights": log_weights, "scale": scale, "softcap": softcap}
    if reason := refuses(q, k, v, selected, tail, **settings):
        return reason
    return library.refusal("gathered")


GATHERED = Backend("cuda", gathered_cuda, _supports)
