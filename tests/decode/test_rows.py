"""Inserting rows into slots: what the host sent arrives bit by bit, and no other row changes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.prefill import start_decoding
from jspec.decode.rows import PackedRows, insert_rows, padded, state_of
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState
from tests.decode.common import prompts

ENDS, ROOM = (7, 9), 4
PARAMS = [
    SamplingParams(max_new_tokens=5, temperature=0.7, top_p=0.9, seed=2**32 - 1, stop_tokens=(3,)),
    SamplingParams(max_new_tokens=1, top_k=5, min_p=0.1, seed=0, ignore_eos=True, draft_limit=2),
]


@pytest.fixture(scope="module")
def rows() -> DecodeState:
    """Two rows that the host knows, with every dtype of a state."""
    tokens, lengths = padded(prompts((6, 3)), 256)
    cache: Any = None
    result = state_of(
        *(tokens, lengths, PARAMS, ENDS, cache, None), exact=None, room=ROOM, mode="greedy"
    )
    result = dataclasses.replace(result, done=np.array([True, False]))
    temperature = np.array([np.nan, -0.0], np.float32)
    sampling = dataclasses.replace(result.sampling, temperature=temperature)
    return dataclasses.replace(result, sampling=sampling)


@pytest.fixture
def batch(tiny) -> DecodeState:
    params = [
        SamplingParams(max_new_tokens=9, seed=row, stop_tokens=(1, 2, 4, 5)) for row in range(4)
    ]
    result = start_decoding(tiny, prompts((4, 5, 6, 7)), params, StepConfig(2), capacity=256)
    return dataclasses.replace(result, mode="greedy")


def of(batch: DecodeState, rows: DecodeState) -> DecodeState:
    """``rows`` with columns of ones and their own lengths."""
    columns = jax.tree.map(lambda x: np.ones((2, 8, *x.shape[2:]), x.dtype), batch.cache.columns)
    lengths = np.array([5, 2], np.int32)
    cache = dataclasses.replace(batch.cache, columns=columns, lengths=lengths)
    return dataclasses.replace(rows, cache=cache)


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


def test_rows_arrive_bit_by_bit(batch, rows):
    packed = PackedRows.of(of(batch, rows), [3, 1])
    assert len(jax.tree.leaves(packed)) == len(jax.tree.leaves(batch.cache.columns)) + 1
    got, slots = jax.jit(lambda packed, batch: packed.unpacked(batch))(packed, batch)
    assert slots.tolist() == [3, 1]
    for want, result in zip(jax.tree.leaves(of(batch, rows)), jax.tree.leaves(got), strict=True):
        assert (want.shape, want.dtype, bits(want)) == (result.shape, result.dtype, bits(result))


@pytest.mark.parametrize("slots", [[3, 1], [2, 4], [4, 4]])
def test_rows_are_in_their_slots_and_those_past_the_end_nowhere(batch, rows, slots):
    new = of(batch, rows)
    expected = [np.array(x) for x in jax.tree.leaves(batch)]
    for whole, rows_of_field in zip(expected, jax.tree.leaves(new), strict=True):
        for slot, row in zip(slots, rows_of_field, strict=True):
            if slot < 4:
                whole[(slot, *map(slice, row.shape))] = row

    @jax.jit
    def insert(batch, packed):
        rows, slots = packed.unpacked(batch)

        def write(x, rows_of_field):
            return x.at[slots, : rows_of_field.shape[1]].set(rows_of_field, mode="drop")

        return insert_rows(batch, rows, slots, write)

    got = jax.tree.leaves(insert(batch, PackedRows.of(new, slots)))
    for want, result in zip(expected, got, strict=True):
        assert (want.dtype, bits(want)) == (result.dtype, bits(result))
