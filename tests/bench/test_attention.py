"""The suites of attention: their cases, their caches, and a check that can fail."""

import dataclasses
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from bench import attention, caches, gather, point, table
from bench.__main__ import SUITES, main
from bench.clocks import DeviceClock, Times
from bench.rivals import flash
from bench.rivals import gather as rivals
from bench.settings import Settings
from jspec.dispatch import Backend, always
from tests.bench.test_report import MACHINE, ceilings, row

DENSE = attention.case("B=3,S=96,heads=4/2,H=16,T=3,lengths=ragged")
SHARED = gather.case("B=2,S=96,n=20,heads=4/2,H=16,T=3")
PER_HEAD = SHARED | {"indices": "per-head"}
GRIDS = pytest.mark.parametrize("quick", [True, False], ids=["quick", "whole"])
SUITES_HERE = pytest.mark.parametrize("suite", [attention, gather], ids=["attention", "gather"])


def gathered(case, counts=None, change=lambda slots: slots):
    """The selection, and what reading it gives, by float64 and one query and head at a time."""
    data = gather.inputs(case)
    q, k, v = (np.asarray(x, np.float64) for x in (data.q, data.k, data.v))
    out = np.zeros(q.shape)
    tail = np.asarray(data.tail)
    for b, t, n in itertools.product(*map(range, q.shape[:3])):
        head = n * k.shape[2] // q.shape[2]
        selected = np.asarray(data.selected)[b]
        own = selected if selected.ndim == 1 else selected[head]
        slots = change(np.concatenate([own, tail[b][: t + 1]]))
        weights = softmax(k[b, slots, head] @ q[b, t, n] / 4)
        out[b, t, n] = weights @ v[b, slots, head]
    return data, out


def check_of(case, data) -> caches.Check:
    slots = gather._with_tail(data.selected, data.tail)
    counts = case["n"] + 1 + jnp.arange(case["T"], dtype=jnp.int32)
    counts = jnp.broadcast_to(counts, data.positions.shape)
    return caches.Check.of(
        data.q, gather.picked(data.k, slots), gather.picked(data.v, slots), counts
    )


def test_the_check_of_a_dense_cache_is_attention_up_to_each_position():
    data = caches.dense(DENSE)
    q, k, v = (np.asarray(x, np.float64) for x in (data.q, data.k, data.v))
    check = caches.Check.of(data.q, data.k, data.v, data.positions + 1)
    out, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, t, n in itertools.product(*map(range, q.shape[:3])):
        seen = np.asarray(data.positions)[b, t] + 1
        scores = k[b, :seen, n // 2] @ q[b, t, n] / 4
        out[b, t, n], lse[b, t, n] = (
            softmax(scores) @ v[b, :seen, n // 2],
            np.logaddexp.reduce(scores),
        )
    np.testing.assert_allclose(check.out, out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(check.lse, lse, rtol=1e-5, atol=1e-5)
    assert data.positions[:, -1].tolist() == (data.lengths - 1).tolist()
    assert check.both((out, lse))
    assert not check.both((out, lse + 0.02))
    assert not check.both((np.where(np.arange(16) == 3, np.nan, out), lse))


@pytest.fixture(scope="module")
def long() -> tuple[caches.Inputs, caches.Check]:
    """A cache so long that one key is little, and what must be read of it."""
    data = caches.dense(DENSE | {"B": 2, "S": 16384, "T": 1})
    assert data.lengths.max() < 16384  # there is a slot behind the newest of each
    return data, caches.Check.of(data.q, data.k, data.v, data.positions + 1)


@pytest.mark.parametrize("more", [(-1, 0), (0, 1)], ids=["one-fewer", "one-more"])
def test_one_key_too_many_or_too_few_in_a_single_row_is_found(more, long):
    data, check = long
    counts = data.positions + 1 + jnp.asarray(more, jnp.int32)[:, None]
    assert check.output(check.out)
    assert not check.output(caches.expected(data.q, data.k, data.v, counts)[0])


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
    assert check_of(case, data).output(out) == right


@pytest.mark.parametrize("case", [SHARED, PER_HEAD], ids=["shared", "per-head"])
def test_a_selection_has_each_slot_once_and_none_of_the_newest(case):
    data = gather.inputs(case)
    selected = np.asarray(data.selected).reshape(-1, case["n"])
    assert all(len(set(x)) == case["n"] for x in selected.tolist())
    assert selected.max() < data.context_len[0] == 93
    assert data.selected.shape == gather.argument_shapes(case)[4].shape


@pytest.mark.parametrize("case", [SHARED, PER_HEAD], ids=["shared", "per-head"])
def test_pages_of_one_token_name_the_selected_slots(case):
    data = gather.inputs(case)
    (q, k, v), pages, restore = rivals.paged(data)
    found = [np.asarray(x).reshape(pages.shape)[pages.table, 0] for x in (k, v)]
    slots = gather._with_tail(data.selected, data.tail)
    for own, x in zip(found, (data.k, data.v), strict=True):
        want = gather.picked(x, slots)
        if case["indices"] == "per-head":  # a row a head
            want = jnp.swapaxes(want, 1, 2).reshape(own.shape)
        np.testing.assert_array_equal(own, np.asarray(want))
    assert q.shape[0] == len(pages.table)
    np.testing.assert_array_equal(restore(np.asarray(q)), np.asarray(data.q))


def test_pages_are_listed_up_to_each_rows_length():
    pages = flash.Pages((8, 16, 2, 4), np.arange(8, dtype=np.int32).reshape(2, 4))
    begins, which, last = pages.lists(np.array([33, 64], np.int32))
    assert (begins.tolist(), last.tolist()) == ([0, 3, 7], [1, 16])
    assert which.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert {x.dtype for x in (begins, which, last)} == {np.dtype(np.int32)}


def test_a_case_says_what_it_changes():
    assert attention.case("B=4,S=128K,heads=64/8") == attention.DEFAULT | {
        "B": 4,
        "S": 131072,
        "heads": "64/8",
    }
    assert attention.case("T=10,S=32K") == attention.case("S=32768,T=10")


@pytest.mark.parametrize(
    ("suite", "text", "message"),
    [
        ("attention", "Q=3", "'Q=3' must be one of B, S, heads, H, T, lengths, a = and a value"),
        ("attention", "B=0", "B=0 must be a whole number of 1 or more, such as 8 or 32K"),
        ("attention", "heads=32", "heads=32 must be query heads / KV heads, such as 32/8"),
        ("attention", "heads=32/5", "heads=32/5: 32 is no multiple of 5"),
        ("attention", "lengths=odd", "lengths=odd must be one of full, ragged"),
        ("attention", "S=8,T=3,lengths=ragged", "T=3 must be at most 2, the least length of a row"),
        ("gather", "S=1K,n=1K", "n=1024 and T=1 must fit into S=1024"),
        ("verify", "B=3", "--case does not apply to verify, whose cases are fixed"),
    ],
    ids=lambda x: x if x in SUITES else None,
)
def test_a_case_that_is_none_is_refused_before_anything_runs(
    suite, text, message, capsys, monkeypatch
):
    monkeypatch.setattr("bench.__main__._run", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        main([suite, "--case", text])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@GRIDS
@SUITES_HERE
def test_no_case_comes_twice_and_those_of_the_figures_are_there(suite, quick, monkeypatch):
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr("jax.default_backend", lambda backend=backend: backend)
        cases = suite.grid(Settings(quick=quick))
        assert len({tuple(case.items()) for case in cases}) == len(cases)
        assert all(case.keys() == suite.DEFAULT.keys() for case in cases)
    if suite is attention and not quick:
        figure = [case for case in cases if (case["B"], case["T"]) == (4, 1)]
        assert {case["S"] for case in figure} == set(attention.CONTEXTS)
        figure = [case for case in cases if (case["B"], case["S"]) == (4, 32768)]
        assert {case["T"] for case in figure} == set(attention.TOKENS)


def test_the_bytes_of_a_case_are_of_what_it_reads(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        point, "measure", lambda name, *x, moved, **more: seen.setdefault(name, moved) and []
    )
    ragged = attention.case("B=2,S=256,heads=4/2,H=16,T=3,lengths=ragged")
    attention.measured(ragged, Settings(only=("none",)))
    total = int(caches.lengths(ragged).sum())
    # Keys and values of two heads, queries and outputs of four; 16 numbers of two bytes.
    assert seen["attention"] == 2 * 16 * (2 * 2 * total + 2 * 4 * 2 * 3)
    list(gather._measured(PER_HEAD, Settings(only=("xla",))))
    read = 2 * 16 * (2 * 2 * 2 * 23 + 2 * 4 * 2 * 3)
    assert seen["gathered_attention"] == read + 4 * 2 * 2 * 20
    assert seen["compact_read"] == read
    assert seen["compact_copy"] == 2 * 2 * 16 * (2 * 2 * 2 * 20) + 4 * 2 * 2 * 20


def test_with_a_device_clock_it_times_the_device_behind_other_data(monkeypatch):
    assert attention.clock() == {"states": ("warm",), "clocks": ("wall",)}
    device = DeviceClock()
    device.__dict__["reason"] = None
    monkeypatch.setattr(point, "DEVICE", device)
    assert attention.clock() == {"states": ("cold",), "clocks": ("device",)}


@pytest.mark.parametrize("name", ["attention", "gather"])
def test_a_wrong_backend_is_named_and_one_that_refuses_is_a_row(
    name, monkeypatch, capsys, tmp_path
):
    module, symbol = (attention, "ATTENTION") if name == "attention" else (gather, "GATHERED")
    operation = getattr(module, symbol)
    right = operation.backend("xla")

    def wrong(q, k, v, positions, *rest, **static):
        return right.run(q, k, v, positions - 1, *rest, **static)

    backends = {
        "xla": right,
        "wrong": Backend("wrong", wrong, always),
        "refuses": Backend("refuses", wrong, lambda *arguments, **static: "needs sm_90"),
    }
    operation = dataclasses.replace(operation, backends=backends)
    monkeypatch.setattr(module, symbol, operation)
    suite = dataclasses.replace(SUITES[name], operations=(operation,), rivals=())
    monkeypatch.setitem(SUITES, name, suite)
    monkeypatch.setattr("bench.ceilings.SMALL", 2**16)
    text = "B=2,S=96,heads=4/2,H=16,T=3" + (",n=20" if name == "gather" else "")
    path = tmp_path / "result.json"
    only = [x for backend in backends for x in ("--backend", backend)]
    assert main([name, "--quick", "--case", text, *only, "--json", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{operation.name}, wrong: its output is wrong" in out
    assert f"{operation.name}, refuses: needs sm_90" in out
    rows = [r for r in json.loads(path.read_text())["rows"] if r["operation"] == operation.name]
    assert [r["name"] for r in rows if r["checked"]] == ["xla"]


class Steady(DeviceClock):
    """A device clock by which the n-th program of a point takes n microseconds."""

    reason = None

    def time(self, programs, repeats, *, cold):
        return [Times([1000 * (n + 1)] * repeats, 1) for n in range(len(programs))]


@pytest.mark.parametrize("name", ["attention", "gather"])
def test_by_the_device_clock_each_row_says_its_bytes_and_share_of_read(
    name, monkeypatch, capsys, tmp_path
):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(point, "DEVICE", Steady())
    monkeypatch.setattr("bench.ceilings.SMALL", 2**19)
    monkeypatch.setattr("bench.ceilings.sizes", lambda: [2**20, 2**19])
    path = tmp_path / "result.json"
    case = "B=2,S=96,heads=4/2,H=16,T=3" + (",n=20" if name == "gather" else "")
    only = ["--backend", "xla", "--backend", "flashinfer"]
    assert main([name, "--case", case, *only, "--json", str(path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    found = json.loads(path.read_text())
    timed = [r for r in found["rows"] if r["checked"]]
    assert {r["case"]["l2"] for r in timed} == {"cold"}
    assert not any("wall_ns" in r for r in found["rows"])
    # The ceiling is 2**20 bytes in 1 us, and so long takes each row.
    lines = {tuple(line.split()[-6:]) for line in out.splitlines() if " xla" in line}
    for r in timed:
        mega, share = r["bytes"] / 1e6, r["bytes"] / 2**20
        chosen = "xla*" if r["chosen"] else "xla"
        wanted = (chosen, "1.00", "1.00-1.00", table.number(mega), f"{share:.1%}", "1.00x")
        assert wanted in lines
    assert "device" in out
    assert "no device clock" not in out


def rows_of(part: str, microseconds: float, **case):
    at = gather.DEFAULT | {"part": part, "l2": "cold"} | case
    return row(gather.OPERATIONS[part], at, "triton", microseconds, bytes=10**8)


def test_the_copy_wins_from_the_read_on_that_pays_for_it():
    rows = [rows_of("gather", 100.0), rows_of("copy", 90.0), rows_of("read", 80.0)]
    even = gather.evens(rows)[0]
    assert even.reads == 5  # 490 against 500; at 4, 410 against 400
    assert "the copy wins from read 5 on" in str(even)
    rows[2] = rows_of("read", 100.0)
    assert str(gather.evens(rows)[0]).endswith("the copy wins never")
    assert gather.evens(rows[:2]) == []


@SUITES_HERE
@pytest.mark.parametrize("compared", [False, True], ids=["alone", "compared"])
def test_the_widest_table_fits_and_says_its_share_of_the_read_ceiling(
    suite, compared, capsys, monkeypatch
):
    more = (
        {"lengths": "ragged"} if suite is attention else {"part": "gather", "indices": "per-head"}
    )
    case = suite.DEFAULT | {"B": 128, "S": 262144, "heads": "128/16", "T": 16} | more
    rows = [row("attention", case, "flashinfer_fa3", 1000.0, bytes=10**9, chosen=True)]
    rows[0]["device_ns"] = [1_000_000, 1_100_000, 1_200_000]
    del rows[0]["wall_ns"]
    if compared:
        rows[0]["ratio"] = 1.5
    monkeypatch.setenv("COLUMNS", "100")
    result = {"suite": suite.SUITE.name, "rows": rows, "machine": MACHINE}
    table.show(result, suite.COLUMNS, table.Floor(2e12, suite.BYTES))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    text = " ".join(lines)
    assert "256K" in text
    assert "45.5%" in text  # 1 GB in 1.1 ms, of 2 TB/s
    assert "read ceiling of this run, 2,000 GB/s" in text
    assert ("p10-p90" in text) == (not compared or suite is attention)


def test_shares_are_of_the_read_ceiling_of_the_run():
    result = {"ceilings": list(ceilings())}  # 100 MB in 50 us
    own = row("attention", DENSE, "triton", 100.0, bytes=10**8)
    assert attention.floor(result).share(own) == 0.5
    assert gather.floor({"ceilings": []}).share(own) is None
