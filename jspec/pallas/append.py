"""Norm, rotation, the write into the cache and the codes of keys, as one Mosaic GPU launch.

As in `jspec.pallas.encode` a program has 32 columns of the matrix of a KV head, and computes a word
of the codes of some tokens' keys. The programs of a head's words divide its queries among
themselves; the first one also writes keys and values.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec import tuned
from jspec.dispatch import Backend
from jspec.ops.append import QKRope, append_sizes
from jspec.ops.cached import FLOAT8
from jspec.ops.norm import CENTERED, RMS
from jspec.pallas.encode import (
    columns_layout,
    encoded_word,
    load_columns,
    load_vector,
    refuses_encode,
)
from jspec.pallas.mosaic import WARPS, floor_power, refuses_pallas, store
from jspec.sharding import opaque, varying_axes
from jspec.typing import Array


@dataclasses.dataclass(frozen=True)
class AppendBlocks:
    """Block sizes of the kernel: ``tokens`` per program, a power of 2."""

    tokens: int


def append_encode_pallas(
    q: Array,
    k: Array,
    v: Array,
    qk_rope: QKRope,
    keys: Array,
    values: Array,
    codes: Array,
    w: Array,
    slots: Array,
    *,
    blocks: AppendBlocks | None = None,
) -> tuple[Array, Array, Array, Array]:
    """The Pallas backend of `jspec.ops.append.rotate_append_encode`.

    It reads q, k and v in ``qk_rope.joined``.
    """
    assert qk_rope.joined is not None  # `refuses`
    blocks = blocks or AppendBlocks(
        **tuned.block("rotate_append_encode", "pallas", append_sizes(q))
    )
    batch, per_row, heads, size = q.shape
    (kv_heads, value_size), words = v.shape[2:], codes.shape[3]
    group, half, tokens = heads // kv_heads, size // 2, batch * per_row
    per_program, capacity = min(blocks.tokens, floor_power(tokens)), keys.shape[1]
    dtype, norms = q.dtype, (qk_rope.q_norm, qk_rope.k_norm)

    def rotate_append_encode(joined, cosine, sine, slots, w, *refs):
        *scale_refs, keys, values, codes, queries = refs
        program, tiles = lax.axis_index("program"), -(-tokens // per_program)
        word, tile = lax.rem(program, words), lax.div(program, words)
        head, tile = lax.div(tile, tiles), lax.rem(tile, tiles)
        # The last tile ends with the tokens: those of two tiles are written twice and alike.
        first_token = jnp.minimum(tile * per_program, tokens - per_program)
        upper, lower = (
            load_columns(w.at[head, pl.ds(start, half), pl.ds(word * 32, 32)])
            for start in (0, half)
        )

        def halves(ref) -> list[Array]:
            """Both halves of the channels ``[H]`` of a head."""
            return [load_vector(ref.at[pl.ds(start, half)]) for start in (0, half)]

        def rounded(x: Array) -> Array:
            return x.astype(dtype).astype(jnp.float32)

        def norm_and_rotate(ref, norm: RMS | None, scale, angles) -> list[Array]:
            """Both halves, normed and rotated, in the dtype of the queries."""
            parts, (cosines, sines) = halves(ref), angles
            if norm is not None:
                squares = sum((x * x).sum() for x in parts)
                root = lax.rsqrt(squares / size + norm.eps)
                # Rounded where the model rounds: after the norm, and after its scale.
                scales = halves(scale)
                parts = [rounded(rounded(x * root) * s) for x, s in zip(parts, scales, strict=True)]
            first, second = parts
            rotated = first * cosines - second * sines, second * cosines + first * sines
            return [x.astype(dtype) for x in rotated]

        def write(ref, parts: list[Array]) -> None:
            for start, part in zip((0, half), parts, strict=True):
                store(ref.at[pl.ds(start, half)], part.astype(ref.dtype))

        def append(index, carry):
            token = first_token + index
            row, slot = lax.div(token, per_row), slots[token]
            angles = load_vector(cosine.at[token]), load_vector(sine.at[token])
            q_scale, k_scale = scale_refs or (None, None)
            vectors = joined.at[token, head]
            for i in range(group):

                @pl.when(word == i % words)
                def _(i=i):
                    query = vectors.at[pl.ds(i * size, size)]
                    parts = norm_and_rotate(query, norms[0], q_scale, angles)
                    write(queries.at[token, head * group + i], parts)

            @pl.when(slot < capacity)
            def _():
                key = vectors.at[pl.ds(group * size, size)]
                parts = norm_and_rotate(key, norms[1], k_scale, angles)
                # The code is that of the key as the cache holds it.
                stored = [x.astype(keys.dtype).astype(jnp.float32) for x in parts]
                codes[row, slot, head, word] = encoded_word(stored, [upper, lower])

                @pl.when(word == 0)
                def _():
                    write(keys.at[row, slot, head], parts)
                    value = vectors.at[pl.ds((group + 1) * size, value_size)]
                    layout = columns_layout().reduce(1)
                    value = plgpu.load(value, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
                    store(values.at[row, slot, head], value.astype(values.dtype))

            return carry

        lax.fori_loop(0, per_program, append, 0)

    call = plgpu.kernel(
        rotate_append_encode,
        out_type=jax.ShapeDtypeStruct((tokens, heads, size), dtype),
        grid=(kv_heads * -(-tokens // per_program) * words,),
        grid_names=("program",),
        # No program reads what one writes, so nothing has to wait for a write.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )

    def update(keys, values, codes, *arrays):
        """The columns are written in place: a `jax.Ref` is an input and an output in one."""
        columns = [jax.new_ref(x) for x in (keys, values, codes)]
        queries = call(*arrays, *columns)
        return queries, *(jax.freeze(x) for x in columns)

    angles = [x.reshape(tokens, half) for x in (qk_rope.cosine, qk_rope.sine)]
    scales = [norm.scale for norm in norms if norm is not None]
    joined = qk_rope.joined.reshape(tokens, kv_heads, -1)
    arrays = joined, *angles, slots.reshape(tokens), w, *scales
    queries, *columns = opaque(update, keys, values, codes, *arrays)
    return queries.reshape(q.shape), *columns


def refuses(q: Array, v: Array, qk_rope: QKRope, w: Array) -> str | None:
    """Why the kernel cannot take these arguments, or None."""
    batch, tokens, heads, size = q.shape
    kv_heads, value_size = v.shape[2:]
    if qk_rope.joined is None:
        return "queries, keys and values are not slices of one array"
    if (qk_rope.q_norm is None) != (qk_rope.k_norm is None):
        return "of queries and keys only one has a norm"
    if qk_rope.q_norm is not None and qk_rope.q_norm.centered:
        return CENTERED
    columns = heads // kv_heads * size + size + value_size
    if qk_rope.joined.shape != (batch, tokens, kv_heads, columns):
        return f"joined {qk_rope.joined.shape} is not [B, T, K, {columns}]"
    if size % (2 * WARPS) or value_size % WARPS or not value_size:
        return (
            f"heads of {size} and values of {value_size} channels are not multiples of "
            f"{2 * WARPS} and {WARPS}; name another backend"
        )
    return refuses_encode(q, None, w)


def _supports(q, k, v, qk_rope, keys, values, codes, w, slots) -> str | None:
    if axes := varying_axes((q, keys, codes, w)):
        return f"arrays that vary over {sorted(axes)} of a mesh cannot be `jax.Ref`s of a kernel"
    if keys.dtype == FLOAT8:
        return f"the cache is of {FLOAT8}, and it stores floats of 16 or 32 bits"
    return refuses(q, v, qk_rope, w) or refuses_pallas()


APPEND_ENCODE = Backend("pallas", append_encode_pallas, _supports)
