"""Attention over selected slots on the matrix units of NVIDIA GPUs, without a copy of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.dispatch import Backend, named_backend
from jspec.ops.append import QKRope
from jspec.ops.attention.appended import PARTS
from jspec.ops.attention.dense import IN_BLOCKS
from jspec.ops.attention.gathered import gathered_sizes
from jspec.ops.norm import CENTERED, RMS
from jspec.typing import Array

# As in src/gathered/gathered.h.
CHANNELS = (64, 128)  # of a key and of a value
MAX_LISTED = 131072  # slots of a list, with those of the tail
MAX_LISTED_MANY = 65536  # of heads of more than FEW_ROWS rows
MAX_PARTS = 32  # into which they are split
TILE = 16  # slots
FEW_ROWS = 8  # T * G up to which a block shares a part, and merges what its warps leave
# Parts of such heads that are merged without a launch of their own, and slots of a part up to which
# that is worth more than more parts.
MERGED_PARTS, MERGED_CHUNK = 8, 1024
# Slots of a part, which shared memory has room for.
MAX_CHUNK = MAX_LISTED_MANY // MAX_PARTS
MAX_SHARED_CHUNK = 16384
MAX_BATCH = 65535
MAX_ALL = 4096  # slots of a row that `ALL_SLOTS` reads


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
    return _attend(q, k, v, positions, selected, tail, context_len, counts, scale=scale)


def _attend(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    selected: Array | None,
    tail: Array,
    context_len: Array,
    counts: Array | None,
    *,
    scale: float,
) -> tuple[Array, Array]:
    """Call the kernel. ``selected``: None is every slot, in order."""
    listed = jax.ShapeDtypeStruct(k.shape[:2], jnp.int32) if selected is None else selected
    results, cut = _results_and_cut(q, k, v, positions, listed, tail)
    out, lse, *_ = library.call(
        "gathered_attention",
        results,
        *(q, k, v, positions),
        jnp.zeros((len(q), 0), jnp.int32) if selected is None else selected,
        *(tail, context_len, *(() if counts is None else (counts,))),
        vmap_method="sequential",
        scale=np.float32(scale),
        all_slots=np.bool_(selected is None),
        **cut,
    )
    return out, lse


def _results_and_cut(
    q: Array,
    k: Array,
    v: Array,
    positions: Array,
    listed: Array | jax.ShapeDtypeStruct,
    tail: Array,
) -> tuple[tuple[jax.ShapeDtypeStruct, ...], dict[str, Any]]:
    """The results of a kernel that reads the slots ``listed``, and its launch configuration."""
    blocks = tuned.block("gathered_attention", "cuda", gathered_sizes(q, k, v, positions, listed))
    batch, tokens, heads, size = q.shape
    kv_heads = k.shape[2]
    rows = tokens * heads // kv_heads
    max_chunk = MAX_SHARED_CHUNK if rows <= FEW_ROWS else MAX_CHUNK
    listed_slots = listed.shape[-1] + tail.shape[1]
    parts = parts_of(listed_slots, min(blocks["chunk"], max_chunk))
    if rows <= FEW_ROWS and listed_slots <= MERGED_PARTS * MERGED_CHUNK:
        parts = min(parts, MERGED_PARTS)
    lead = (batch, kv_heads, parts, rows)
    shapes = (q.shape[:3], (*lead, size), (*lead, 2))
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    cut = {"parts": parts, "stages": blocks["stages"], "warps": blocks["warps"]}
    return (
        (jax.ShapeDtypeStruct(q.shape, q.dtype), *floats),
        {name: np.int32(number) for name, number in cut.items()},
    )


def append_attend_cuda(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array, Array, Array]:
    """The CUDA backend of `jspec.ops.rotate_append_attend`."""
    del k, softcap  # in `joined`; None: `_refuses_append`
    assert qk_rope.joined is not None  # `_refuses_append`
    results, cut = _results_and_cut(q, keys, values, positions, selected, tail)
    norms = qk_rope.q_norm, qk_rope.k_norm
    q_eps, k_eps = (np.float32(0 if norm is None else norm.eps) for norm in norms)
    none = jnp.zeros(0, q.dtype)
    columns = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values)]
    out, lse, _, _, keys, values = library.call(
        "rotate_append_attend",
        (*results, *columns),
        *(qk_rope.joined, keys, values, positions, selected, tail, context_len),
        *(qk_rope.cosine, qk_rope.sine, *(none if x is None else x.scale for x in norms)),
        vmap_method="sequential",
        aliases={1: 4, 2: 5},
        scale=np.float32(scale),
        normed=np.bool_(norms[0] is not None),
        q_eps=q_eps,
        k_eps=k_eps,
        **cut,
    )
    return out, lse, keys, values


def _refuses_append(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    positions: Array,
    selected: Array,
    tail: Array,
    context_len: Array,
    *,
    scale: float,
    softcap: float | None,
) -> str | None:
    """Why `append_attend_cuda` cannot take these arguments, or None."""
    del k, v, positions, context_len
    for part in PARTS:
        if named_backend(part):
            return f"a backend is named for {part}, which it takes the place of"
    norms: list[RMS] = [x for x in (qk_rope.q_norm, qk_rope.k_norm) if x is not None]
    if qk_rope.joined is None:
        return "queries, keys and values are not slices of one array"
    if len(norms) == 1:
        return "of queries and keys only one has a norm"
    if any(norm.centered for norm in norms):
        return CENTERED
    if any(x.dtype != jnp.bfloat16 for x in (qk_rope.joined, *(norm.scale for norm in norms))):
        return "projections and norms are not all bfloat16"
    group = q.shape[2] // keys.shape[2]
    if group > FEW_ROWS:
        return f"it takes up to {FEW_ROWS} query heads a KV head, and there are {group}"
    settings = {"log_weights": None, "scale": scale, "softcap": softcap}
    if reason := refuses(q, keys, values, selected.shape[-1], tail.shape[1], **settings):
        return reason
    return library.refusal("gathered")


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
    selected_count: int,
    tail_count: int,
    *,
    log_weights: Array | None,
    scale: float,
    softcap: float | None,
) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, heads, size = q.shape
    listed = selected_count + tail_count
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
    if 0 in q.shape or 0 in k.shape or not selected_count:
        return f"q {q.shape}, k {k.shape} or the selection of {selected_count} slots is empty"
    limit = MAX_LISTED if tokens * heads // k.shape[2] <= FEW_ROWS else MAX_LISTED_MANY
    if listed > limit:
        return f"n + m = {listed} slots are over {limit}"
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
    if reason := refuses(q, k, v, selected.shape[-1], tail.shape[1], **settings):
        return reason
    return library.refusal("gathered")


def _all_slots(
    q, k, v, positions, *, key_positions, scale, window, softcap, value_size, table=None
) -> tuple[Array, Array]:
    """`jspec.ops.attention` of one token a row: the selection is all slots that the row fills."""
    del key_positions, window, softcap, value_size, table  # None: `_refuses_all_slots`
    batch, slots = k.shape[:2]
    tail, context_len = jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32)
    counts = jnp.clip(positions[:, 0] + 1, 0, slots)
    return _attend(q, k, v, positions, None, tail, context_len, counts, scale=scale)


def _refuses_all_slots(
    q, k, v, positions, *, key_positions, scale, window, softcap, value_size, table=None
) -> str | None:
    """Why `_all_slots` cannot take these arguments, or None."""
    del positions, value_size
    if q.shape[1] > 1:
        return f"T={q.shape[1]} tokens would read different slots"
    if key_positions is not None or window is not None:
        return f"window={window} or key_positions leave slots out"
    if table is not None:
        return IN_BLOCKS
    if k.shape[1] > MAX_ALL:
        return f"S={k.shape[1]} is over {MAX_ALL}: the kernels of attention are faster there"
    if reason := refuses(q, k, v, k.shape[1], 0, log_weights=None, scale=scale, softcap=softcap):
        return reason
    return library.refusal("gathered")


GATHERED = Backend("cuda", gathered_cuda, _supports)
APPEND_ATTEND = Backend("cuda", append_attend_cuda, _refuses_append)
# Of `jspec.ops.attention`, for short contexts: its own kernels take longer to start than to read
# these.
ALL_SLOTS = Backend("gathered", _all_slots, _refuses_all_slots)
