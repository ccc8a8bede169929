"""The caches of suite `attention`, and a check that can fail."""

import itertools
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from bench import attention, caches, paged, point, table
from bench.__main__ import SUITES, main
from bench.clocks import DeviceClock, Times
from bench.program import reference
from bench.rivals import attention as rivals
from bench.rivals import flash
from bench.settings import Settings
from jspec.ops.attention.dense import ATTENTION
from jspec.ops.attention.gathered import GATHERED

DENSE = SUITES["attention"].case("B=3,S=96,heads=4/2,H=16,T=3,lengths=ragged")[1]
SHARED = SUITES["attention"].case("op=gathered_attention,B=2,S=96,n=20,heads=4/2,H=16,T=3")[1]
PER_HEAD = SHARED | {"indices": "per-head"}
PAGES = SHARED | {"indices": "pages-4"}


def test_rows_are_read_in_blocks_too_and_a_wrong_block_is_detected():
    case = SUITES["attention"].case("op=in_blocks,B=2,S=512,heads=4/2,H=16,T=3")[1]
    rows = list(paged.rows(case, Settings(quick=True)))
    checked = {row["name"]: row["checked"] for row in rows}
    assert checked["xla"] is checked["xla+blocks"] is True
    assert checked["cuda+blocks"] is None
    inputs, static = caches.dense(case), attention.static(case)
    k, v, table = paged.in_blocks(case, inputs.k, inputs.v)
    assert k.shape == (8, 128, 2, 16)
    assert sorted(np.ravel(table)) == list(range(8))
    right, wrong = (
        reference(ATTENTION, (inputs.q, k, v, inputs.positions), table=x, **static)
        for x in (table, table.at[0, 0].set(table[0, 1]))
    )
    assert not caches.Check(*right).output(wrong[0])
    with pytest.raises(ValueError, match="S=300 must be a multiple of 128"):
        SUITES["attention"].case("op=in_blocks,S=300")


def gathered(case, counts=None, change=lambda slots: slots):
    """The selection, and what reading it gives, by float64 and one query and head at a time."""
    data = attention.selected_inputs(case)
    q, k, v = (np.asarray(x, np.float64) for x in (data.q, data.k, data.v))
    out = np.zeros(q.shape)
    tail = np.asarray(data.tail)
    for b, t, n in itertools.product(*map(range, q.shape[:3])):
        head = n * k.shape[2] // q.shape[2]
        selected = np.asarray(data.selected)[b]
        of_head = selected if selected.ndim == 1 else selected[head]
        slots = change(np.concatenate([of_head, tail[b][: t + 1]]))
        weights = softmax(k[b, slots, head] @ q[b, t, n] / 4)
        out[b, t, n] = weights @ v[b, slots, head]
    return data, out


@pytest.mark.parametrize("more", [(-1, 0), (0, 1)], ids=["one-fewer", "one-more"])
def test_one_key_too_many_or_too_few_in_a_single_row_is_detected(more):
    """In a cache so long that one key is little."""
    case = DENSE | {"B": 2, "S": 16384, "T": 1}
    data, static = caches.dense(case), attention.static(case)
    assert data.lengths.max() < 16384  # there is a slot after the newest of each
    positions = data.positions, data.positions + jnp.asarray(more, jnp.int32)[:, None]
    right, wrong = (
        reference(ATTENTION, (data.q, data.k, data.v, where), **static) for where in positions
    )
    check = caches.Check(*right)
    assert check.both(right)
    assert not check.output(wrong[0])
    assert not check.both((right[0], right[1] + 0.02))
    assert not check.both((np.where(np.arange(16) == 3, np.nan, right[0]), right[1]))


@pytest.mark.parametrize("case", [SHARED, PER_HEAD], ids=["shared", "per-head"])
@pytest.mark.parametrize(
    ("change", "right"),
    [
        (lambda slots: slots, True),
        (lambda slots: slots[np.arange(len(slots)) != 19], False),
        (lambda slots: slots[:-1], False),
        (lambda slots: np.append(slots, min(set(range(90)) - set(slots.tolist()))), False),
    ],
    ids=["right", "without-the-last-selected", "without-the-newest", "one-that-is-not-selected"],
)
def test_the_check_of_a_selection_is_attention_over_it(case, change, right):
    data, out = gathered(case, change=change)
    static = attention.gathered_setup(case).static
    assert caches.Check(*reference(GATHERED, data.arguments, **static)).output(out) == right


@pytest.mark.parametrize("case", [SHARED, PER_HEAD, PAGES], ids=["shared", "per-head", "pages"])
def test_a_selection_has_each_slot_once_and_none_of_the_newest(case):
    data = attention.selected_inputs(case)
    selected = np.asarray(data.selected).reshape(-1, case["n"])
    assert all(len(set(x)) == case["n"] for x in selected.tolist())
    assert selected.max() < data.context_len[0] == 93
    if case is PAGES:
        pages = selected.reshape(2, 5, 4)
        assert not (pages[..., 0] % 4).any()
        assert (np.diff(pages) == 1).all()
        with pytest.raises(ValueError, match="n=20 must be a multiple of 8 for pages-8"):
            attention.checked(case | {"indices": "pages-8"})


@pytest.mark.parametrize("case", [SHARED, PER_HEAD], ids=["shared", "per-head"])
def test_pages_of_one_token_name_the_selected_slots(case):
    data = attention.selected_inputs(case)
    (q, k, v), pages, restore = rivals.paged_selection(data)
    result = [np.asarray(x).reshape(pages.shape)[pages.table, 0] for x in (k, v)]
    tail = data.tail
    if case["indices"] == "per-head":
        tail = jnp.broadcast_to(tail[:, None], (2, 2, 3))
    slots = jnp.concatenate([data.selected, tail], axis=-1)
    for values, x in zip(result, (data.k, data.v), strict=True):
        rows, x = np.arange(2), np.asarray(x)
        if case["indices"] == "per-head":  # a row a head
            heads = np.arange(2)[None, :, None]
            want = x[rows[:, None, None], slots, heads].reshape(values.shape)
        else:
            want = x[rows[:, None], slots]
        np.testing.assert_array_equal(values, want)
    assert q.shape[0] == len(pages.table)
    np.testing.assert_array_equal(restore(np.asarray(q)), np.asarray(data.q))


def test_pages_are_listed_up_to_each_rows_length():
    pages = flash.Pages((8, 16, 2, 4), np.arange(8, dtype=np.int32).reshape(2, 4))
    begins, which, last = pages.lists(np.array([33, 64], np.int32))
    assert (begins.tolist(), last.tolist()) == ([0, 3, 7], [1, 16])
    assert which.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert {x.dtype for x in (begins, which, last)} == {np.dtype(np.int32)}


class Steady(DeviceClock):
    """A device clock by which the n-th program of a point takes n microseconds."""

    reason = None

    def time(self, programs, repeats, *, cold):
        return [Times([1000 * (n + 1)] * repeats, [], 1, 0) for n in range(len(programs))]


def test_by_the_device_clock_a_row_has_its_bytes_and_share_of_the_read_ceiling(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(point, "DEVICE", Steady())
    monkeypatch.setattr("bench.ceilings.SMALL", 2**19)
    monkeypatch.setattr("bench.ceilings.sizes", lambda: [2**20, 2**19])
    path = tmp_path / "result.json"
    case = "B=2,S=96,heads=4/2,H=16,T=3"
    assert main(["attention", "--case", case, "--backend", "xla", "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["case"]["l2"] == "cold"
    assert "wall_ns" not in row
    # The ceiling is 2**20 bytes in 1 us, and so long takes the row.
    share = row["bytes"] / 2**20
    assert table.share(json.loads(path.read_text()), row) == pytest.approx(share)
    (line,) = (
        line for line in capsys.readouterr().out.splitlines() if re.search(r"\bxla\*? ", line)
    )
    rate = table.number(row["bytes"] * 1e6 / 1e9)
    cells = [table.number(row["bytes"] / 1e6), rate, f"{share:.1%}", "1.00x"]
    assert line.split()[-4:] == cells
