"""Prefill of several short prompts in one pass, straight into the slots of a running batch.

A pass of few tokens takes about as long as reading the weights, which these prompts share. A pass
of a light model takes about as long as its host needs to launch it, which they share as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache
from jspec.config import SamplingParams
from jspec.decode.on_mesh import mesh_model
from jspec.decode.options import ResolvedOptions
from jspec.decode.prefill import init_drafter_state, pass_sizes, prefill_chunk
from jspec.decode.programs import Timed
from jspec.decode.rows import PackedRows, insert_rows, packed_rows
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, FlatModels, Models
from jspec.sharding import bytes_on_device, explicit_mesh_sharding
from jspec.typing import Array

MAX_ROWS = 8
MIN_ROWS = 4  # so that no prompt is long enough to keep a device busy by itself
# Bytes of weights up to which a pass of `LARGE_PASS` tokens, padding included, takes a GPU about as
# long as its host needs to launch one.
LIGHT = 2**28
LARGE_PASS = 2048


class ShortPrompts:
    """Prefills whole prompts in passes of at most ``chunk`` tokens, padding included.

    One program per size of a row serves all mixes: the size alone decides how many rows a pass has.
    There is none for a model on a mesh, nor for a cache in the host's memory.

    Attributes:
        sizes: Tokens per row of the passes, ascending; empty where there are none.
        tokens: Most tokens of a pass.
        has_large_passes: Whether the model is light. Passes then have up to `LARGE_PASS` tokens,
            and take all prompts of up to ``chunk`` tokens, also a single one: fewer passes save
            more time than less padding does.
    """

    def __init__(
        self, options: ResolvedOptions, slots: int, capacity: int, chunk: int, programs: Timed
    ) -> None:
        self._options, self._slots, self._programs = options, slots, programs
        models, policy = options.models, options.config.cache_policy
        is_on_mesh = (
            mesh_model(models.target) is not None or explicit_mesh_sharding(models) is not None
        )
        there_are = not (is_on_mesh or policy.storage is not None or slots < 2)
        self.has_large_passes = there_are and is_light(models)
        max_tokens = max(chunk, min(LARGE_PASS, MAX_ROWS * chunk))
        self.tokens = max_tokens if self.has_large_passes else chunk  # of a pass at most
        self.sizes = pass_sizes(min(chunk, capacity)) if there_are else []
        longest = chunk if self.has_large_passes else chunk // min(MIN_ROWS, slots)
        self._longest = min(longest, capacity)

    def size_of(self, length: int) -> int:
        """The size of a pass for one prompt of ``length``; 0 where none is large enough."""
        return next((size for size in self.sizes if length - 1 <= size), 0)

    def rows(self, size: int) -> int:
        """Rows of a pass of ``size`` tokens each."""
        return min(MAX_ROWS, self._slots, self.tokens // size)

    def together(self, lengths: Sequence[int]) -> tuple[int, int]:
        """How many of the first prompts, of these ``lengths``, go into one pass, and its size.

        At least two that fill half of it, or 0: they are better prefilled one by one. Large passes
        take any number.
        """
        best, size = (0, 0), 0
        for count, length in enumerate(lengths, 1):
            size = max(size, self.size_of(length))
            if not self.size_of(length) or size > self._longest or count > self.rows(size):
                break
            if self.has_large_passes or count >= max(2, self.rows(size) / 2):
                best = count, size
        return best

    def take_up(
        self,
        state: DecodeState,
        size: int,
        slots: Sequence[int],
        prompts: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
    ) -> DecodeState:
        """``state``, which is donated, with the prompts in ``slots``, to be decoded by ``params``.

        ``size``: what `together` returned for them.
        """
        missing = self.rows(size) - len(prompts)
        rows = [*prompts, *[np.zeros(1, np.int32)] * missing]
        settings = [*params, *[SamplingParams(seed=0)] * missing]
        slots = [*slots, *[self._slots] * missing]  # past the end: nowhere
        cache = dataclasses.replace(state.cache, columns=(), pages=())
        ends = self._options.models.target.config.stop_tokens
        packed = packed_rows(state, slots, rows, settings, ends, cache, None)
        static = {"size": size, "config": self._options.config}
        return self._programs(_take_up, self._options.flat, state, packed, **static)

    def warmed(self, state: DecodeState) -> DecodeState:
        """The same state, with every program compiled."""
        for size in self.sizes:
            state = self.take_up(state, size, (), (), ())
        return state


def is_light(models: Models) -> bool:
    """Whether a large pass takes about as long on this device as launching it."""
    return jax.default_backend() == "gpu" and bytes_on_device(models) <= LIGHT


@partial(jax.jit, static_argnames=("size", "config"), donate_argnames="state")
def _take_up(
    models: FlatModels,
    state: DecodeState,
    packed: PackedRows,
    size: int,
    config: StepConfig,
) -> DecodeState:
    """``state`` with the prompts of ``packed``, of at most ``size + 1`` tokens, in their slots.

    ``packed`` has no keys and values yet. A slot is written only as far as a prompt may reach.
    """
    rows, slots = packed.unpacked(state)
    count, capacity = rows.tokens.shape
    drafter_state = init_drafter_state(models, config, count, capacity)
    columns, pages = jax.tree.map(
        lambda x: jnp.zeros((count, *x.shape[1:]), x.dtype),
        (state.cache.columns, state.cache.pages),
    )
    cache = dataclasses.replace(rows.cache, columns=columns, pages=pages)
    cache, drafter_state = jax.tree.map(
        lambda x: _shorter(x, size) if isinstance(x, Cache) else x,
        (cache, drafter_state),
        is_leaf=lambda x: isinstance(x, Cache),
    )
    cache, drafter_state = prefill_chunk(
        models, cache, drafter_state, rows.tokens, jnp.int32(0), config=config, size=size
    )
    rows = dataclasses.replace(rows, cache=cache, draft=drafter_state)

    return insert_rows(state, rows, slots, lambda whole, rows: _written(whole, rows, slots))


def _written(whole: Array, rows: Array, slots: Array) -> Array:
    """``whole [B, ...]`` with ``rows [n, ...]``, which may be shorter, in ``slots [n]``."""
    part = tuple(slice(width) for width in rows.shape[1:])
    return whole.at[(slots, *part)].set(rows, mode="drop")


def _shorter(cache: Cache, size: int) -> Cache:
    """The first ``size`` positions of each row."""
    layouts = tuple(layout.grown(min(size, layout.size)) for layout in cache.layouts)
    columns = tuple(
        {name: x[:, : layout.size] for name, x in layer_columns.items()}
        for layout, layer_columns in zip(layouts, cache.columns, strict=True)
    )
    pages = tuple(
        {name: x[:, : -(-layout.size // cache.page)] for name, x in layer_pages.items()}
        for layout, layer_pages in zip(layouts, cache.pages, strict=True)
    )
    return dataclasses.replace(cache, columns=columns, layouts=layouts, pages=pages)
