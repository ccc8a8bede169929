"""The tables of docs/exact.md: a column for each way, by model and batch."""

from bench.report import exact, real_cells
from bench.report.runs import Run


def run(device, *rows, suite="quality", name="", date="1", **versions):
    machine = {"device": device, "date": date, "versions": versions}
    return Run(device, suite, name, {"machine": machine, "rows": list(rows)})


def step(name, level, *milliseconds, **case):
    case = {"model": "m", "B": 4, "S": 8192, "gamma": 5, "percent": 7, "exact": level} | case
    times = [round(1e6 * x) for x in milliseconds]
    return {"operation": "draft", "case": case, "name": name, "checked": True, "step_ns": times}


def prices(*runs):
    """The cells of each line, after the headings."""
    lines = exact.tables(runs)["price"].splitlines()[2:]
    return [tuple(x.strip() for x in line.split("|")[1:-1]) for line in lines if "---" not in line]


def passes(name, compared, differing):
    case = {"model": "m", "exact": "tokens"}
    return {
        "operation": "passes",
        "case": case,
        "name": name,
        "compared": compared,
        "differing": differing,
    }


def flips(batch, prompts, name, count, fell_back=0):
    case = {"model": "m", "B": batch, "prompts": prompts, "new": 512}
    measured = {"flips": count, "fell_back": fell_back}
    return {"operation": "flips", "case": case, "name": name, **measured}


def test_bits_and_flips_of_a_gpu_have_a_line_each_and_those_of_a_cpu_none():
    plain = {"operation": "passes", "case": {"model": "m", "exact": "tokens"}, "name": "1"}
    rows = [plain, passes("2", 2000, 0), passes("10", 2000, 1234)]
    rows += [flips(96, 64, "vegas", 0), flips(8, 64, "vegas", 3, 2), flips(8, 64, "none", 0)]
    tables = exact.tables([run("NVIDIA H200", *rows), run("cpu", flips(8, 64, "suffix", 1))])
    assert tables["bits"].splitlines()[-1] == "| H200 | m | tokens | 2,000 | 0 | 1,234 |"
    heading, _, *lines = tables["flips"].splitlines()[2:]
    assert heading == "| card | model | batch | prompts x tokens | vegas | none |"
    assert lines == ["| H200 | m | 8 | 64 x 512 | 3 (2) | 0 |", "|  |  | 96 | 64 x 512 | 0 |  |"]
    assert exact.tables([run("cpu", *rows)]) == {"bits": "", "flips": "", "price": ""}


def test_the_price_is_of_what_was_right_at_both_levels():
    rows = [
        step("vegas", "no", 40),
        step("verification", "no", 1),
        step("plain", "no", 9, 20, 99),
        step("ngram", "no", 30),
        step("plain", "tokens", 21),
        step("vegas", "tokens", 39),
        step("verification", "tokens", 1),
        step("ngram", "tokens", 50) | {"checked": False},
        step("suffix", "bits", 50),
        step("plain", "bits", 60),
        step("vegas", "no", 4, B=8),
        step("vegas", "tokens", 5, B=8),
        step("plain", "no", 2, S=2048),  # interrupted
        step("plain", "tokens", 2, S=2048) | {"step_ns": []},
        {"operation": "pass", "case": {"model": "m"}, "name": "plain", "checked": True},
        {"name": "of a suite without operations", "case": {}, "checked": True},
    ]
    at = ("H200", "m, random weights", "4", "8K", "5")
    assert prices(run("NVIDIA H200", *rows, suite="decode")) == [
        ("card", "model", "B", "S", "gamma", "plain", "vegas"),
        (*at, "20.00, 21.00 (+5.0%)", "40.00, 39.00 (-2.5%)"),
        ("", "", "8", "8K", "5", "", "4.00, 5.00 (+25.0%)"),
    ]
    assert not prices(run("cpu", *rows, suite="decode"))
    assert not prices(run("NVIDIA H200", *rows, suite="throughput"))


def test_a_price_is_within_a_run_where_one_has_both_levels():
    def of(name, date, *rows, jax="1", device="NVIDIA H200"):
        return run(device, *rows, suite="decode", name=name, date=date, jax=jax)

    usual, slower = step("plain", "no", 10), step("plain", "tokens", 11)
    halves = of("later", "4", step("plain", "tokens", 15)), of("earlier", "2", usual)
    assert prices(*halves)[1][5] == "10.00, 15.00 (+50.0%)"
    both = of("older", "0", usual, slower), of("both", "1", usual, step("plain", "tokens", 12))
    assert prices(*halves, *both[::-1])[1][5] == "10.00, 12.00 (+20.0%)"
    assert not prices(halves[0], of("earlier", "2", usual, jax="2"))
    assert not prices(halves[0], of("earlier", "2", usual, device="NVIDIA H100"))
    assert not prices(halves[0], of("earlier", "2", step("plain", "no", 10, percent=5)))


def test_the_price_of_real_models_is_of_greedy_steps_by_the_measured_backends():
    def row(name, level, milliseconds, **case):
        case = {"sampling": "greedy", "new": 128, "backends": "default", "drafts": "few"} | case
        return step(name, level, milliseconds, **case) | {"operation": "real", "run": 0}

    def result(date, *rows, jax="1"):
        machine = {"device": "NVIDIA H100", "date": date, "versions": {"jax": jax}}
        return {"machine": machine, "model": {"name": "m"}, "rows": list(rows)}

    def joined(*results):
        return prices(Run("h100", "real", "", real_cells.joined(results)))

    some = result(
        "1",
        row("none", "no", 2, drafts="all"),
        row("none", "no", 9, sampling="t0.8"),
        row("none", "no", 9, backends="xla"),
        row("none", "tokens", 9, backends="xla"),
    )
    at = ("H100", "m, real texts", "4", "8K", "5")
    (_, line) = joined(some, result("2", row("none", "tokens", 3)))
    assert line == (*at, "2.00, 3.00 (+50.0%)")
    assert not joined(some, result("2", row("none", "tokens", 3), jax="2"))
    assert not joined(some, result("2", row("none", "tokens", 3, new=1024)))
    assert not joined(some, result("2", row("none", "tokens", 3, sampling="t0.8")))
