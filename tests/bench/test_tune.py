"""The order of backends that is fitted to results whose best orders are known."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from bench import blocks, tune
from bench.__main__ import main
from bench.report import RESULTS
from bench.suite import OperationBenchmark, Setup
from bench.tune import Point, fit, points_of, refined, text, tune_blocks
from jspec import tuned
from jspec.dispatch import Backend, Operation, always
from jspec.ops.attention.dense import ATTENTION
from jspec.tuned import Rule
from tests.bench.test_report import MACHINE, row

TOY = Operation(
    "toy",
    {"xla": Backend("xla", print, always), "one": "no:WHERE", "two": "no:WHERE"},
    dict,
    list,
)


def point(batch: int, gamma: int, **ratios: float) -> Point:
    return Point({"batch": batch, "gamma": gamma}, ratios)


def grid(time) -> list[Point]:
    """Points of every batch and gamma, with what ``time`` gives as ratios."""
    sizes = itertools.product((1, 8, 64, 512), (2, 32))
    return [point(batch, gamma, **time(batch, gamma)) for batch, gamma in sizes]


def orders(rules: list[Rule], batch: int, gamma: int) -> list[str]:
    sizes = {"batch": batch, "gamma": gamma}
    return next(r.take for r in rules if all(sizes[k] <= v for k, v in r.up_to.items()))


def test_one_order_serves_where_one_backend_is_always_best():
    rules = fit(grid(lambda batch, gamma: {"xla": 3.0, "one": 1.2, "two": 1.0}), TOY)
    assert rules == [Rule({}, ["two", "one", "xla"])]


def test_a_bound_lies_halfway_between_the_sizes_where_the_best_changes():
    rules = fit(grid(lambda b, g: {"xla": 3.0, "one": 1 + (b > 8), "two": 1 + (b <= 8) * 0.5}), TOY)
    assert rules == [
        Rule({"batch": 22}, ["one", "two", "xla"]),
        Rule({}, ["two", "one", "xla"]),
    ]


def test_rules_of_two_sizes_give_the_best_everywhere():
    """One is best in small batches and, of large ones, in long drafts."""

    def time(batch: int, gamma: int) -> dict[str, float]:
        one = batch <= 8 or gamma > 2
        return {"xla": 9.0, "one": 1 if one else 2.0, "two": 2.0 if one else 1}

    rules = fit(grid(time), TOY)
    assert len(rules) == 3
    for batch, gamma in itertools.product((1, 8, 64, 512), (2, 32)):
        ratios = time(batch, gamma)
        assert ratios[orders(rules, batch, gamma)[0]] == 1


def test_what_gains_too_little_is_no_rule():
    rules = fit(grid(lambda b, g: {"xla": 3.0, "one": 1 + (b > 8) * 1e-3, "two": 1.0005}), TOY)
    assert len(rules) == 1


def test_a_backend_that_ran_at_few_points_goes_first_where_it_is_best():
    few = [point(1, 2, xla=2.0, one=1.0), point(8, 2, xla=1.0)]
    assert fit(few, TOY) == [Rule({}, ["one", "xla"])]


def test_an_order_ends_with_a_backend_that_never_refuses():
    rules = fit([point(1, 2, one=1.0, two=1.5)], TOY)
    assert rules == [Rule({}, ["one", "two", "xla"])]
    rules = fit([point(1, 2, xla=1.0, one=1.5)], TOY)
    assert rules == [Rule({}, ["xla"])]


def test_a_rule_stays_for_what_was_not_measured():
    """One is best in small batches of two draft tokens; other drafts were not measured."""
    before = [Rule({"batch": 99}, ["two", "xla"]), Rule({}, ["xla"])]
    points = [point(batch, 2, two=1 + (batch < 64), one=1 + (batch >= 64)) for batch in (1, 8, 64)]
    assert refined(TOY, points, before) == [
        Rule({"batch": 8, "gamma": 2}, ["one", "two", "xla"]),
        Rule({"batch": 64, "gamma": 2}, ["two", "one", "xla"]),
        *before,
    ]


def test_a_choice_holds_up_to_the_largest_sizes_measured_for_it():
    """Of small batches, drafts of two tokens alone were measured. Of large ones the table has the
    best backend, and its order stays. In a new table a cut lies halfway."""
    before = [Rule({}, ["two", "one", "xla"])]
    points = [point(1, 2, one=1.0, two=2.0), point(64, 8, one=2.0, two=1.0, xla=1.5)]
    small = Rule({"batch": 1, "gamma": 2}, ["one", "two", "xla"])
    assert refined(TOY, points, before) == [small, *before]
    assert refined(TOY, points, None) == [
        Rule({"batch": 8}, small.take),
        Rule({}, ["two", "xla"]),
    ]


def test_a_choice_does_not_hold_for_larger_sizes_at_which_others_alone_were_measured():
    before = [Rule({}, ["two", "one", "xla"])]
    points = [point(8, 2, one=1.0, two=2.0), point(64, 2, two=1.0, xla=1.5)]
    assert refined(TOY, points, before) == [
        Rule({"batch": 8, "gamma": 2}, ["one", "two", "xla"]),
        *before,
    ]


def test_a_rule_stays_for_values_below_its_bound_that_were_not_measured():
    before = [Rule({"gamma": 4}, ["two", "xla"]), Rule({}, ["xla"])]
    points = [point(batch, 2, two=2.0, one=1.0) for batch in (1, 8)]
    best = Rule({"gamma": 2, "batch": 8}, ["one", "two", "xla"])
    assert refined(TOY, points, before) == [best, *before]


def test_a_choice_holds_for_sizes_that_were_measured_together():
    before = [Rule({}, ["two", "one", "xla"])]
    measured = ((1, 2), (8, 2), (1, 4), (2, 4))
    points = [point(*sizes, one=1.0, two=2.0) for sizes in measured]
    best = ["one", "two", "xla"]
    assert refined(TOY, points, before) == [
        Rule({"batch": 8, "gamma": 2}, best),
        Rule({"batch": 2, "gamma": 4}, best),
        *before,
    ]


def test_a_rule_that_the_next_one_repeats_is_dropped():
    before = [Rule({"batch": 8}, ["one", "xla"]), Rule({"batch": 64}, ["xla"]), Rule({}, ["xla"])]
    points = [point(batch, 2, xla=2.0, one=1.0) for batch in (1, 16, 32)]
    assert refined(TOY, points, before) == [
        before[0],
        Rule({"batch": 32, "gamma": 2}, ["one", "xla"]),
        before[2],
    ]


def test_a_rule_that_no_size_reaches_is_dropped():
    before = [Rule({"batch": 8}, ["one", "xla"]), Rule({"batch": 4}, ["xla", "one"])]
    last = Rule({}, ["xla"])
    points = [point(2, 2, xla=2.0, one=1.0), point(16, 2, xla=1.0)]
    assert refined(TOY, points, [*before, last]) == [before[0], last]


def results(folder: Path, **machine: str) -> Path:
    """Greedy verification by ``cuda`` and ``pallas``, the one best to 32 rows, the other beyond."""
    folder.mkdir()
    rows = []
    for batch, gamma in itertools.product((1, 32, 1024), (8, 128)):
        case = {"B": batch, "gamma": gamma, "alpha": 0.9, "l2": "warm"}
        sizes = {"sizes": {"batch": batch, "gamma": gamma, "drafted": batch * gamma}}
        rows.append(row("verify_greedy", case, "cuda", 1.0 + (batch > 32), **sizes))
        rows.append(row("verify_greedy", case, "pallas", 1.5, **sizes))
        rows.append(row("verify_greedy", case, "torch", 0.1))
    file = {"suite": "verify", "machine": MACHINE | machine, "rows": rows}
    (folder / "verify.json").write_text(json.dumps(file))
    return folder


def test_the_command_writes_a_table_that_loads(tmp_path, capsys):
    folder = results(tmp_path / "r", device="NVIDIA New", compute_capability="9.0")
    path = tmp_path / "new.json"
    assert main(["tune", str(folder), "--json", str(path)]) == 0
    table = tuned.load(path)
    assert (table.gpu, table.compute_capability, table.measured) == ("NVIDIA New", (9, 0), True)
    # What was not measured is that of the nearest GPU.
    nearest = tuned.nearest("NVIDIA New", (9, 0), list(tuned.tables().values()))
    assert table.orders["verify_greedy"][-1] == nearest.orders["verify_greedy"][-1]

    def order(batch: int) -> tuple[str, ...] | None:
        sizes = {"batch": batch, "gamma": 128, "drafted": batch * 128}
        return table.order("verify_greedy", sizes)

    assert order(32) == ("cuda", "pallas", "xla")
    assert order(1024) == ("pallas", "cuda", "xla")
    assert order(1025) == tuple(nearest.orders["verify_greedy"][-1].take)
    assert table.orders["pack"] == nearest.orders["pack"]
    assert table.blocks == nearest.blocks
    assert "fitted: mean 1.0000x, worst 1.00x, 6 points, 4 rules" in capsys.readouterr().out


def test_a_table_for_cpus_has_orders_alone(tmp_path):
    path = tmp_path / "cpu.json"
    tune.tune(results(tmp_path / "r", device="cpu"), path)
    table = tuned.load(path)
    assert (table.gpu, table.compute_capability, table.blocks) == ("cpu", None, {})
    assert [rule.take[0] for rule in table.orders["verify_greedy"]] == ["cuda", "pallas"]
    # What was not measured runs the reference.
    assert list(table.orders["pack"]) == [Rule({}, ["xla"])]


def test_a_table_that_is_there_keeps_its_blocks(tmp_path):
    path = tmp_path / "test.json"
    base = tuned.tables()["h100"]
    blocks = {"verify_greedy": {"cuda": [Rule({}, {"warps": 2})]}}
    mine = dataclasses.replace(base, gpu="NVIDIA Test", blocks=blocks, measured=False)
    path.write_text(text(mine))
    assert main(["tune", str(results(tmp_path / "r")), "--json", str(path)]) == 0
    table = tuned.load(path)
    assert table.block("verify_greedy", "cuda", {}) == {"warps": 2}
    assert table.measured


@pytest.mark.parametrize(
    ("machine", "path", "message"),
    [
        ({}, "new.json", "do not say the compute capability of NVIDIA Test"),
        ({"device": "NVIDIA Other"}, "old.json", "is for NVIDIA Test, and the results are of"),
        ({}, None, "tune needs --json, the table to write"),
    ],
    ids=["no-capability", "another-gpu", "no-json"],
)
def test_what_cannot_be_fitted_is_said(machine, path, message, tmp_path, capsys):
    mine = dataclasses.replace(tuned.tables()["h100"], gpu="NVIDIA Test")
    (tmp_path / "old.json").write_text(text(mine))
    folder = results(tmp_path / "r", **machine)
    where = [] if path is None else ["--json", str(tmp_path / path)]
    with pytest.raises(SystemExit):
        main(["tune", str(folder), *where])
    assert message in capsys.readouterr().err


def test_an_order_that_costs_no_more_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "GAIN", 9)
    path = tmp_path / "test.json"
    rules = [Rule({"batch": 99}, ["cuda", "xla"]), Rule({}, ["pallas", "xla"])]
    base = tuned.tables()["h100"]
    orders = dict(base.orders) | {"verify_greedy": rules}
    path.write_text(text(dataclasses.replace(base, gpu="NVIDIA Test", orders=orders)))
    assert main(["tune", str(results(tmp_path / "r")), "--json", str(path)]) == 0
    assert list(tuned.load(path).orders["verify_greedy"]) == rules


def test_a_folder_without_results_and_one_of_two_gpus_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has the sizes of its arguments; measure again by"):
        tune.tune(tmp_path, tmp_path / "x.json")
    folder = results(tmp_path / "r")
    other = json.loads((folder / "verify.json").read_text()) | {"suite": "pack"}
    other["machine"]["device"] = "NVIDIA Other"
    (folder / "pack.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="several devices: NVIDIA Other, NVIDIA Test"):
        tune.tune(folder, tmp_path / "x.json")


@pytest.mark.parametrize("name", tuned.tables())
def test_a_committed_table_is_as_the_command_writes_it(name):
    path = tuned.FOLDER / f"{name}.json"
    assert text(tuned.load(path)) == path.read_text()


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_committed_table_follows_from_the_committed_results(name, tmp_path):
    committed = tuned.FOLDER / f"{name}.json"
    path = tmp_path / committed.name
    path.write_text(committed.read_text())
    tune.tune(RESULTS / name, path)
    assert path.read_text() == committed.read_text()


def test_exact_is_for_those_who_ask_for_it():
    rows = [
        row("attention", {"B": 1}, name, time, sizes={"batch": 1})
        for name, time in (("exact", 1.0), ("triton", 2.0), ("xla", 4.0))
    ]
    (point,) = points_of(rows, ATTENTION)
    assert point == Point({"batch": 1}, {"triton": 1.0, "xla": 2.0})


def test_a_launch_that_waits_costs_what_it_does_in_a_step():
    rows = [
        row("toy", {"B": 1}, name, time, sizes={"batch": 1}) | {"waits": waits}
        for name, time, waits in (("one", 10.0, 3), ("two", 11.0, 0))
    ]
    (point,) = points_of(rows, TOY)
    assert point.ratios == {"one": pytest.approx((10 + 3 * tune.WAIT) / 11), "two": 1.0}
    rows = [row | {"span_ns": [12_000 + row["waits"]]} for row in rows]  # with what is idle
    (point,) = points_of(rows, TOY)
    assert point.ratios == {"one": pytest.approx(12.003 / 12), "two": 1.0}


def toy_benchmark(times, wrong=()):
    """A benchmark whose kernel takes as long as ``times`` says of its tile, and is ``wrong`` for
    some tiles."""
    tiles = []

    def run(x):
        tiles.append(tuned.block("hash_encode", "one", {"batch": len(x)})["tile"])
        return x

    def check(out):
        return tiles[-1] not in wrong

    backends = {"xla": Backend("xla", print, always), "one": Backend("one", run, always)}
    operation = Operation("hash_encode", backends, lambda x: {"batch": len(x)}, list)
    bench = OperationBenchmark(
        operation=operation,
        setup=lambda case: Setup((jnp.zeros(case["B"]),), check, 1),
        default={"B": 1},
        **dict.fromkeys(("gpu", "quick", "cpu"), ("B=1",)),
    )
    return bench, lambda program, repeats: [times(tiles[-1])] * repeats


@pytest.mark.parametrize(
    ("wrong", "best"), [((), 64), ((64,), 32)], ids=["fastest", "fastest-that-is-right"]
)
def test_the_fastest_right_block_size_is_chosen(wrong, best, monkeypatch):
    """Tiles nearer to 64 are faster; a second rule has no case and stays."""
    bench, samples = toy_benchmark(lambda tile: 1000 + 100 * abs(tile - 64), wrong)
    monkeypatch.setattr("bench.point.wall", samples)
    rules = [Rule({"batch": 8}, {"tile": 16, "flag": False}), Rule({}, {"tile": 2, "flag": True})]
    base = dataclasses.replace(tuned.tables()["h100"], blocks={"hash_encode": {"one": rules}})
    table = blocks.search(base, [(bench, [bench.case("")])])
    assert table.block("hash_encode", "one", {"batch": 1}) == {"tile": best, "flag": False}
    assert table.blocks["hash_encode"]["one"][1] == rules[1]
    assert blocks.search(base, [(bench, [bench.case("")])], ["two"]) == base


def test_block_sizes_are_searched_at_the_cases_that_are_named(monkeypatch, tmp_path):
    """A larger batch reaches the second rule, and the first one stays."""
    bench, samples = toy_benchmark(lambda tile: 1000 + 100 * abs(tile - 64))
    monkeypatch.setattr("bench.point.wall", samples)
    monkeypatch.setattr("bench.tune.gpu_in_use", lambda: ("NVIDIA H100 80GB HBM3", (9, 0)))
    rules = [Rule({"batch": 8}, {"tile": 16}), Rule({}, {"tile": 32})]
    path = tmp_path / "h100.json"
    table = dataclasses.replace(tuned.tables()["h100"], blocks={"hash_encode": {"one": rules}})
    path.write_text(text(table))
    tune_blocks(path, [bench], ["op=hash_encode,B=9"])
    assert tuned.load(path).blocks["hash_encode"]["one"] == (rules[0], Rule({}, {"tile": 64}))
    with pytest.raises(ValueError, match="'op=nothing,B=9' must begin with op= and one of hash_"):
        tune_blocks(path, [bench], ["op=nothing,B=9"])


def test_block_sizes_are_searched_on_a_gpu_alone(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--json", str(tmp_path / "new.json")])
    assert "block sizes are searched on an NVIDIA GPU" in capsys.readouterr().err
