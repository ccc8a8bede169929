"""Selection by hash codes, scored and counted at once, alone and inside a decoding layer."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cuda_ffi import gathered, library
from jspec.dispatch import Backend, named_backend
from jspec.gpu import multiprocessors
from jspec.ops.append import QKRope
from jspec.ops.attention.hashed import PARTS
from jspec.ops.hash import max_score
from jspec.ops.norm import CENTERED, RMS
from jspec.typing import Array

# As in src/hashed/hashed.h.
MAX_SCORE = 4095
MAX_SLOTS = 2**30  # of a row, and of a selection
MIN_CHUNK, MAX_CHUNK = 256, 4096  # slots of a row that a block scores
EVEN_CHUNK = 1024  # at least, where smaller blocks only share the slots more evenly
SCORE_BYTES = 32768  # bytes of scores that a block holds at once
MAX_PARTS = 1024  # blocks that share a row after its scores
SIZES = (64, 128, 256)  # channels of a head
MAX_GROUP = 8  # query heads of a KV head


@dataclasses.dataclass(frozen=True)
class HashCut:
    """How rows are divided on a GPU.

    Attributes:
        chunk: slots of a row that a block scores, a power of 2 in 256..32768.
        parts: blocks that share the rest of the work of a row, 1 to 1024; attention is summed part
            by part.
    """

    chunk: int
    parts: int

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the handlers."""
        return {"chunk": np.int32(self.chunk), "parts": np.int32(self.parts)}


def hash_cut(k_codes: Array, highest: int, blocks: int = 2) -> HashCut:
    """How to divide codes ``[..., S, K, W]``, whose scores are at most ``highest``.

    ``blocks``: blocks of the launch after the scores that a multiprocessor runs at once. All parts
    of a row must run at once, since they wait for each other.
    """
    *batch, n, heads, words = k_codes.shape
    together = min(heads, 32 // words)  # a block scores heads whose codes are 128 bytes
    lines, chunk = math.prod(batch) * -(-heads // together), MAX_CHUNK

    def at_most(chunk: int) -> int:
        """Slots that the busiest multiprocessor scores."""
        return -(-lines * -(-n // chunk) // multiprocessors()) * chunk

    while chunk > MIN_CHUNK and lines * -(-n // chunk) < 0.9 * multiprocessors():
        chunk //= 2
    while chunk > EVEN_CHUNK and 1.1 * at_most(chunk // 2) < at_most(chunk):
        chunk //= 2
    fit = blocks * multiprocessors() // max(math.prod(batch) * heads, 1)
    return HashCut(chunk, max(min(fit, -(-n * _bytes(highest) // SCORE_BYTES), MAX_PARTS), 1))


def workspace_words(highest: int, n: int, cut: HashCut, floats: int = 0) -> int:
    """Words of 4 bytes that a row keeps between launches, in the layout of `HashPlan`.

    ``floats``: float32 numbers of each part of a row. The handlers refuse another size.
    """
    bins, chunks = (highest + 64) // 64 * 64, max(1, -(-n // cut.chunk))
    scores = -(-n * _bytes(highest) // 16) * 4
    return -(-(scores + chunks * bins // 2 + 4 + cut.parts * floats) // 4) * 4


def _bytes(highest: int) -> int:
    """Of a score."""
    return 1 if highest < 256 else 2


def _refusal(highest: int, n: int, k: int) -> str | None:
    if not 0 < highest <= MAX_SCORE:
        return f"scores to G T R = {highest} are not in 1..{MAX_SCORE}"
    if max(n, k) > MAX_SLOTS:
        return f"n={n} and k={k} must be at most {MAX_SLOTS}"
    return library.refusal("hashed")


def _supports_select(
    q_codes: Array, k_codes: Array, counts: Array, lengths: Array, *, k: int, **rest: Any
) -> str | None:
    return _refusal(max_score(q_codes, k_codes), k_codes.shape[1], k)


def hash_select_cuda(
    q_codes: Array,
    k_codes: Array,
    counts: Array,
    lengths: Array,
    *,
    k: int,
    sinks: int,
    recent: int,
    cut: HashCut | None = None,
) -> Array:
    """The CUDA backend of `jspec.ops.hash_selection.hash_select`.

    ``counts``, ``lengths``: int32 ``[B, K]``; ``cut``: another one than that for these sizes.
    """
    batch, n, heads, _ = k_codes.shape
    highest = max_score(q_codes, k_codes)
    cut = cut or hash_cut(k_codes, highest)
    words = workspace_words(highest, n, cut)
    slots, workspace = (
        jax.ShapeDtypeStruct((batch, heads, size), dtype)
        for size, dtype in ((k, jnp.int32), (words, jnp.uint32))
    )
    return library.call(
        "hash_select",
        (slots, workspace),
        *(q_codes, k_codes, counts, lengths),
        vmap_method="broadcast_all",
        sinks=np.int32(sinks),
        recent=np.int32(recent),
        **cut.attributes,
    )[0]


def hash_attention_cuda(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    positions: Array,
    context_len: Array,
    counts: Array,
    *,
    budget: int,
    sinks: int,
    recent: int,
    num_uncommitted: int,
    scale: float,
    softcap: float | None,
    cut: HashCut | None = None,
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """The CUDA backend of `jspec.ops.attention.hashed.hash_attention`: three launches, in a row.

    The last one picks slots and attends to them, except where there are many rows with groups:
    then it only picks, and `gathered.gathered_cuda` attends. ``counts``: int32 ``[B]``; ``cut``:
    another one than that for these sizes.
    """
    assert qk_rope.joined is not None  # `_supports`
    batch, _, heads, size = q.shape
    n, kv_heads, words = codes.shape[1:]
    group = heads // kv_heads
    highest = group * 32 * words
    tail = context_len[:, None] + jnp.arange(num_uncommitted, dtype=jnp.int32)[None]
    chosen = jax.ShapeDtypeStruct((batch, kv_heads, budget), jnp.int32)
    attention: dict[str, Any] = {"counts": None, "value_size": None}
    attention |= {"scale": scale, "softcap": softcap}
    gathers = _attends_apart(batch * kv_heads, group) and not gathered.GATHERED.supports(
        *(q, keys, values, positions, chosen, tail, context_len), **attention
    )
    blocks = 2 if gathers or group <= 2 else 1
    cut = cut or hash_cut(codes, highest, blocks)
    floats = 0 if gathers else group * (size + 2)
    like = functools.partial(jax.ShapeDtypeStruct, dtype=q.dtype)
    outputs = (
        chosen,
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (keys, values, codes)),
        like(q.shape),
        jax.ShapeDtypeStruct((batch, 1, heads, words), jnp.uint32),
        jax.ShapeDtypeStruct(
            (batch, kv_heads, workspace_words(highest, n, cut, floats)), jnp.uint32
        ),
    )
    # Any array stands for the scales that there are not.
    q_norm, k_norm = qk_rope.q_norm or RMS(qk_rope.cosine), qk_rope.k_norm or RMS(qk_rope.cosine)
    call = functools.partial(
        library.call,
        vmap_method="sequential",
        aliases={7: 1, 8: 2, 9: 3},
        sinks=np.int32(sinks),
        recent=np.int32(recent),
        normed=np.bool_(qk_rope.q_norm is not None),
        q_eps=np.float32(q_norm.eps),
        k_eps=np.float32(k_norm.eps),
        **cut.attributes,
    )
    arguments = (
        *(qk_rope.joined, qk_rope.cosine, qk_rope.sine),
        *(x.scale.astype(jnp.float32) for x in (q_norm, k_norm)),
        *(w, positions, keys, values, codes, context_len, counts),
    )
    if gathers:
        slots, keys, values, codes, q, *_ = call("hash_append_select", outputs, *arguments)
        out, lse = gathered.gathered_cuda(
            *(q, keys, values, positions, slots, tail, context_len), **attention
        )
        return out, lse, slots, keys, values, codes
    attended = like((batch, 1, heads, v.shape[3])), jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)
    slots, keys, values, codes, _, _, _, out, lse = call(
        "hash_attention",
        (*outputs, *attended),
        *arguments,
        tail=np.int32(num_uncommitted),
        scale=np.float32(scale),
    )
    return out, lse, slots, keys, values, codes


def _attends_apart(rows: int, group: int) -> bool:
    """Whether attention is a launch of its own: with fewer than six multiprocessors a row.

    Of groups of more than 2 query heads a multiprocessor runs one block that picks and attends at a
    time: it has few reads in flight, and waits for the others of its row. Blocks of gathered
    attention have many, and multiply on the matrix units.
    """
    return group > 2 and 6 * rows > multiprocessors()


def _supports(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    positions: Array,
    context_len: Array,
    counts: Array,
    *,
    budget: int,
    softcap: float | None,
    **rest: Any,
) -> str | None:
    """Why the kernels cannot take these arguments, or None."""
    for part in PARTS:
        if named_backend(part):
            return f"a backend is named for {part}, which it takes the place of"
    n, kv_heads, words = codes.shape[1:]
    size, group = q.shape[3], q.shape[2] // kv_heads
    if qk_rope.joined is None:
        return "queries, keys and values are not slices of one array"
    if (qk_rope.q_norm is None) != (qk_rope.k_norm is None):
        return "of queries and keys only one has a norm"
    if qk_rope.q_norm is not None and qk_rope.q_norm.centered:
        return CENTERED
    if any(x.dtype != jnp.bfloat16 for x in (q, qk_rope.joined, keys, values)):
        return "queries, keys and values are not all bfloat16"
    if w.dtype != jnp.float32:
        return f"w is of {w.dtype}, not float32"
    if size not in SIZES or v.shape[3] != size:
        return f"it takes heads of {SIZES} channels, and there are {size} and {v.shape[3]}"
    if not 1 <= group <= MAX_GROUP:
        return f"it takes 1 to {MAX_GROUP} query heads a KV head, and there are {group}"
    if softcap is not None:
        return f"softcap={softcap}: the kernel supports none"
    return _refusal(group * 32 * words, n, budget)


HASH_SELECT = Backend("cuda", hash_select_cuda, _supports_select)
HASH_ATTENTION = Backend("cuda", hash_attention_cuda, _supports)
