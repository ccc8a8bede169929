"""Rows of a decode state: making them, inserting them into slots, and growing their capacity."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cache import Cache
from jspec.cache.cache import longer
from jspec.cache.paged import rows_into_blocks
from jspec.config import SamplingMode, SamplingParams, shown, whole_number
from jspec.decode.checks import Prompt, asks_experts, logprobs_of, mode_of, sampling_of
from jspec.decode.processors import LogitsProcessor, Processing
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Exact
from jspec.host import in_host, to_device, to_host
from jspec.sharding import with_auto_axes
from jspec.typing import Array


def state_of(
    tokens: np.ndarray,
    lengths: np.ndarray,
    params: Sequence[SamplingParams],
    ends: Sequence[int],
    cache: Cache,
    drafter_state: Any,
    *,
    exact: Exact | None,
    room: int | None = None,
    mode: SamplingMode | None = None,
    processors: Sequence[LogitsProcessor] = (),
    vocab_size: int = 0,
    prompt_lengths: np.ndarray | None = None,
) -> DecodeState:
    """The state of prompts whose keys and values are in ``cache``.

    ``tokens`` int32 ``[B, S]`` has -1 after each prompt; ``params`` have seeds; ``ends``: the
    model's stop tokens; ``room``: stop tokens that a row has room for; ``room`` and ``mode`` are
    None for what ``params`` need; ``processors``: of logits of a model with ``vocab_size`` tokens,
    which serve all ``params``; ``prompt_lengths`` int32 ``[B]``: how many of a row's tokens are its
    prompt, where the others were generated earlier; None for all. Its arrays are of numpy, but for
    those that are passed: a program takes all of them at once, while copying each to the device
    would take as long as copying all.
    """
    if room is None:  # with that of the model's always, so that `ignore_eos` changes no shape
        room = power_of_two(max(len(p.stop_tokens) for p in params) + len(ends))
    prompt_lengths = lengths if prompt_lengths is None else prompt_lengths
    no_limit = np.iinfo(np.int32).max
    limits = [no_limit if p.draft_limit is None else p.draft_limit for p in params]
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "limits": prompt_lengths + np.array([p.max_new_tokens for p in params], np.int32),
        "done": np.zeros(len(params), bool),
        "stop_tokens": padded([stops_of(p, ends) for p in params], room)[0],
        "draft_limits": np.array(limits, np.int32),
    }
    return DecodeState(
        cache=cache,
        sampling=sampling_of(params),
        draft=drafter_state,
        mode=mode_of(params) if mode is None else mode,
        exact=exact,
        logprobs=logprobs_of(params),
        routed_experts=asks_experts(params),
        processing=Processing.of(processors, vocab_size, params, prompt_lengths),
        **arrays,
    )


def stops_of(params: SamplingParams, ends: Sequence[int]) -> tuple[int, ...]:
    """The tokens that end a request of a model whose stop tokens are ``ends``."""
    stop_tokens = params.stop_tokens if params.ignore_eos else (*params.stop_tokens, *ends)
    return tuple(dict.fromkeys(stop_tokens))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedRows:
    """Rows of a `DecodeState` to be inserted into slots of another one.

    Attributes:
        cache: Their cache, without lengths.
        draft: The drafter's state.
        packed: int32 ``[n, W]``: the bits of the slots and of all other arrays, concatenated, as
            copying each array to the device by itself takes as long as copying all of them.
    """

    cache: Cache
    draft: Any
    packed: Array | np.ndarray

    @classmethod
    def of(cls, rows: DecodeState, slots: Sequence[int]) -> PackedRows:
        """``rows``, whose arrays other than the cache's columns and the draft are of numpy."""
        cache: Any = dataclasses.replace(rows.cache, lengths=None)
        arrays = np.array(slots, np.int32), *jax.tree.leaves(_small(rows))
        return cls(cache, rows.draft, np.concatenate([*map(_ints, arrays)], axis=1))

    def unpacked(self, like: DecodeState) -> tuple[DecodeState, Array]:
        """The rows, with the structure of ``like``, and their slots int32 ``[n]``. Call it in a
        program.
        """
        leaves, structure = jax.tree.flatten(_small(like))
        widths = [1, *(math.prod(x.shape[1:]) for x in leaves)]
        slots, *parts = jnp.split(self.packed, np.cumsum(widths)[:-1].tolist(), axis=1)
        small = jax.tree.unflatten(structure, [*map(_as, parts, leaves)])
        cache = dataclasses.replace(self.cache, lengths=small.cache)
        return dataclasses.replace(small, cache=cache, draft=self.draft), slots[:, 0]


def insert_row(
    state: DecodeState, row: PackedRows, slot: int, run: Callable[..., Any] | None = None
) -> DecodeState:
    """``state``, which is donated, with ``row``, which was packed for ``slot``.

    ``run`` as in `jspec.start_decoding`.
    """
    call = (lambda function, *args: function(*args)) if run is None else run
    after = call(_insert, _without_host(state), _without_host(row))
    # One at a time: no more than one of them is on the device.
    columns = tuple(
        columns_after
        | {
            name: call(_insert_in_host, x, row_columns[name], np.int32(slot))
            for name, x in old_columns.items()
            if in_host(x)
        }
        for columns_after, old_columns, row_columns in zip(
            after.cache.columns, state.cache.columns, row.cache.columns, strict=True
        )
    )
    return dataclasses.replace(after, cache=dataclasses.replace(after.cache, columns=columns))


@jax.jit(donate_argnames="state")
def _insert(state: DecodeState, row: PackedRows) -> DecodeState:
    def insert(state: DecodeState, row: PackedRows) -> DecodeState:
        rows, slots = row.unpacked(state)

        def write(x: Array, row: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(x, row, slots[0], axis=0)

        return insert_rows(state, rows, slots, write)

    return with_auto_axes(insert, state, row, like=state)


def _without_host(state: Any) -> Any:
    """A state, or rows for it, without the columns in the host's memory."""
    columns = tuple(
        {name: x for name, x in layer_columns.items() if not in_host(x)}
        for layer_columns in state.cache.columns
    )
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, columns=columns))


@jax.jit(donate_argnames="column")
def _insert_in_host(column: Array, row: Array, slot: Array) -> Array:
    whole, row = to_device(column), to_device(row)
    return to_host(lax.dynamic_update_slice_in_dim(whole, row, slot, axis=0))


def insert_rows(
    state: DecodeState, rows: DecodeState, slots: Array, write: Callable[[Array, Array], Array]
) -> DecodeState:
    """``state`` with ``rows`` in ``slots [n]``; a row whose slot is past the end is dropped.

    ``write(whole, rows)`` writes an array of the cache's columns and pages and of the draft, but
    for columns in blocks: a slot has those of the block table. The other arrays are chosen element
    by element, which XLA does for most of them in one kernel; each would be written by a kernel of
    its own.
    """
    batch = jnp.arange(len(state.tokens), dtype=slots.dtype)

    def choose(whole: Array, rows: Array) -> Array:
        for index in range(len(rows)):
            is_slot = (batch == slots[index]).reshape(-1, *[1] * (whole.ndim - 1))
            whole = jnp.where(is_slot, rows[index][None], whole)
        return whole

    small = jax.tree.map(choose, _small(state), _small(rows))
    leaves, structure = jax.tree.flatten(_large(state))
    pairs = zip(leaves, jax.tree.leaves(_large(rows)), strict=True)
    pages, draft = jax.tree.unflatten(structure, [write(*pair) for pair in pairs])
    columns = []
    for layer, row_columns in enumerate(rows.cache.columns):
        write_column = write
        if (table := state.cache.table_of(layer)) is not None:
            table = table.at[slots].get(mode="fill", fill_value=-1)
            write_column = functools.partial(rows_into_blocks, table=table)
        whole = state.cache.columns[layer]
        columns.append({name: write_column(x, row_columns[name]) for name, x in whole.items()})
    cache = dataclasses.replace(
        state.cache, columns=tuple(columns), pages=pages, lengths=small.cache
    )
    return dataclasses.replace(small, cache=cache, draft=draft)


def packed_rows(
    state: DecodeState,
    slots: Sequence[int],
    prompts: Sequence[np.ndarray],
    params: Sequence[SamplingParams],
    ends: Sequence[int],
    cache: Cache,
    drafter_state: Any,
    prompt_lengths: Sequence[int] | None = None,
) -> PackedRows:
    """Requests for ``slots`` of ``state``, packed; their keys and values are in ``cache``.

    The other arguments are those of `state_of`.
    """
    tokens, lengths = padded(prompts, state.tokens.shape[1])
    cache = dataclasses.replace(cache, lengths=lengths - 1)
    like: dict[str, Any] = {"exact": state.exact, "mode": state.mode}
    like["room"] = state.stop_tokens.shape[1]
    if prompt_lengths is not None:
        like["prompt_lengths"] = np.array(prompt_lengths, np.int32)
    if state.processing is not None:
        like["processors"] = state.processing.processors
        like["vocab_size"] = state.processing.vocab_size
    row = state_of(tokens, lengths, params, ends, cache, drafter_state, **like)
    return PackedRows.of(row, slots)


def grow_capacity(state: DecodeState, capacity: int, config: StepConfig) -> DecodeState:
    """The same batch with room for ``capacity`` positions per row.

    The cache's columns are copied one after the other, and the old memory of each is freed, so that
    at most one of them is in memory twice. Programs are compiled for each capacity: double it
    rather than add to it. On a mesh each device makes room for its own share, in whole blocks, and
    nothing is sent.

    Args:
        state: The batch. It is donated: use the returned one.
        capacity: Positions per row, at least the present ones.
        config: The config of the steps, whose drafter makes room too.

    Returns:
        The batch with more room.

    Raises:
        ValueError: For a capacity below the present one.
    """
    present = state.tokens.shape[1]
    if (whole_number(capacity) or 0) < present:
        raise ValueError(
            f"capacity={shown(capacity)} must be at least the present one, {present} positions"
        )
    draft = config.draft.grow(state.draft, capacity)
    tokens = longer(state.tokens, capacity, fill=-1)
    return dataclasses.replace(state, cache=state.cache.grown(capacity), tokens=tokens, draft=draft)


def _large(state: DecodeState) -> tuple[Any, Any]:
    """The large arrays of a state, but for the columns of the cache."""
    return state.cache.pages, state.draft


def _small(state: DecodeState) -> Any:
    """The small arrays of a state: lengths in place of the cache, and no draft."""
    lengths: Any = state.cache.lengths
    return dataclasses.replace(state, cache=lengths, draft=None)


def _ints(x: np.ndarray) -> np.ndarray:
    """``x [n, ...]`` as int32 ``[n, W]`` of the same bits."""
    rows = x.reshape(len(x), -1)
    return rows.astype(np.int32) if x.dtype == bool else rows.view(np.int32)


def _as(ints: Array, like: Array) -> Array:
    """The inverse of `_ints`: an array like the rows of ``like``."""
    rows = ints.reshape(len(ints), *like.shape[1:])
    return rows != 0 if like.dtype == bool else lax.bitcast_convert_type(rows, like.dtype)


def power_of_two(number: int) -> int:
    """The smallest power of two of at least ``number``, so that close numbers share a program."""
    return 1 << max(number - 1, 0).bit_length()


def padded(rows: Sequence[Prompt], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as int32 ``[B, width]`` padded with -1, and their lengths ``[B]``."""
    out = np.full((len(rows), width), -1, np.int32)
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = np.asarray(row, np.int32)
    return out, np.array([len(row) for row in rows], np.int32)
