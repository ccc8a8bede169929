"""The tables on real models, their picture and README's part, from a small result."""

import json
import re
from functools import cache

import pytest

from bench import report
from bench.earlier import as_today
from bench.real import figures
from bench.report import branches, readme, real, real_cells
from bench.report import figures as figures_of
from bench.report.runs import Run, read
from tests.bench.test_report import MACHINE, decode_rows, rows_of

ROOT = report.DOCS.parent
LARGE = {"B": 16, "S": 4096}
SMALL = {"B": 1, "S": 4096}


def row(name, ms, *, per_step=1, run=0, checked=True, **rest):
    """Eight answers of 60 tokens, of which the last one repeats itself in half of the steps.

    A step takes ``ms``, the whole batch 10 times as many seconds, the prefill 30 s. The floor of
    plain decoding is 1 ms.
    """
    case = {"model": "m", "gamma": 5, "new": 64, "sampling": "greedy", "drafts": "few"}
    case |= {"exact": "no", "backends": "default"} | rest.pop("case", LARGE)
    line = {"operation": "real", "case": case, "name": name, "run": run, "checked": checked}
    steps = [60 // per_step] * 7 + [60 // per_step // (1 if name == "none" else 2)]
    line |= {"tokens": [60] * 8, "steps": steps, "repeats": [False] * 7 + [True]}
    line |= {"attempts_at": [100, 50], "accepted_at": [90, 20], "rows": 8, "identical_rows": 6}
    line |= {"step_ns": [ms * 10**6] * 3, "decode_s_samples": [10.0 * ms], "prefill_s": 30.0}
    line |= {"switch_s": 0.0, "plain_floor_ns": 1e6, "context": 4000}
    shares = {"parts_ns": {"verification": ms * 8e5}, "floors_ns": {"verification": ms * 2e5}}
    return line | shares | rest


def result(rows, **rest):
    model = {"name": "m", "layers": 2, "weight_bytes": 10**9, "dtype": "bfloat16"}
    common = {"suite": "real", "machine": MACHINE, "model": model, "acceptance": "measured"}
    return common | {"rows": rows} | rest


# Plain decoding takes 2 ms; vegas 4 with 3 tokens a step, 1.5x, and 10 for one row, 0.60x.
FIRST = [
    row("none", 2),
    row("vegas", 4, per_step=3),
    row("ngram", 1, checked=False, reason="its answers are not the model's", per_step=4),
    row("none", 2, case=SMALL),
    row("vegas", 10, per_step=3, case=SMALL),
    row("quest", 5, per_step=3),
    row("none", 8, case=LARGE | {"exact": "bits"}),
    row("vegas", 8, per_step=3, case=LARGE | {"exact": "bits"}, identical_rows=8),
]
# The same cell and run number in another file, where plain decoding took 6 ms.
SECOND = [
    row("none", 6),
    row("suffix", 4, per_step=2),
    row("torch_graph", 9, note="one graph", identical_rows=5),
    {"operation": "real", "case": FIRST[0]["case"], "name": "transformers", "run": 0}
    | {"checked": None, "reason": "no module"},
]


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib")


@pytest.fixture
def text(tmp_path):
    return written(tmp_path)


def written(tmp_path):
    folder = tmp_path / "results" / "some"
    folder.mkdir(parents=True)
    for name, rows in (("real.first", FIRST), ("real.second", SECOND)):
        (folder / f"{name}.json").write_text(json.dumps(result(rows)))
    others = {"suite": "decode", "machine": MACHINE, "rows": list(decode_rows())}
    (folder / "decode.json").write_text(json.dumps(others))
    page = tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    report.write(folder.parent, tmp_path / "docs", page)
    return (tmp_path / "docs" / "RESULTS.md").read_text()


SPEEDS = "Real models, acceptance measured"


def run(rows):
    return Run("some", "real", "", result(rows))


def test_files_of_a_folder_are_one_result_whose_runs_stay_apart(text):
    small, large = rows_of(text, SPEEDS)
    # 16 rows: 3 tokens in 4 ms where plain decoding took 2, or 2 in 4 ms where it took 6.
    assert large[2:7] == ["16", "4K", "5", "8,000 (0.50)", "suffix 3.00x"]
    assert large[7:] == ["3.00", "1.50x", "0.50x, slower", *[""] * 4]
    assert small[:4] == ["Test", "m", "1", "4K"]


def test_every_drafter_stands_in_a_table_where_more_than_everywhere_ran(text):
    rows = rows_of(text, "Every drafter at the largest batch")
    assert [cells[0] for cells in rows] == ["suffix", "vegas", "quest", "ngram"]
    assert rows[1] == ["vegas", "3.00; 1.50x"]
    assert rows[3] == ["ngram", "not timed"]


def test_a_lossy_policy_stands_last_and_is_never_the_fastest():
    lossy = row("hata-lossy", 1, lossy=True, agreement=0.25, steps=[60] * 8)
    rows = [row("none", 2), row("vegas", 4, per_step=3), row("hata", 5, per_step=4), lossy]
    lines = [list(line.cells.values()) for line in real.drafters([run(rows)])]
    assert lines == [
        *(["hata", "4.00; 1.60x"], ["vegas", "3.00; 1.50x"]),
        ["hata-lossy", "lossy, 25% as plain; 2.00x"],
    ]
    (line,) = real.speeds([run(rows)])
    assert line.cells["fastest"] == "hata 1.60x"


def test_the_last_run_with_ngram_and_vegas_is_the_headline():
    """The first has quest, 4x; in the second plain decoding is faster; the third has no ngram."""
    usual = (("ngram", 2), ("vegas", 3))
    first = [row("none", 4), *(row(x, 4, per_step=n) for x, n in (*usual, ("quest", 4)))]
    second = [row("none", 2, run=1), *(row(x, 4, per_step=n, run=1) for x, n in usual)]
    third = [row("none", 8, run=2), row("vegas", 5, per_step=3, run=2)]
    (line,) = real.speeds([run([*first, *second])])
    assert line.cells["plain tok/s"] == "8,000 (0.50)"
    assert (line.cells["fastest"], line.cells["vs plain"]) == ("vegas 1.50x", "1.50x")
    (line,) = real.speeds([run([*first, *second, *third])])
    assert line.cells["plain tok/s"] == "8,000 (0.50)"
    assert (line.cells["fastest"], line.cells["vs plain"]) == ("vegas 1.50x", "1.50x")
    assert ["quest", "4.00; 4.00x"] in [list(x.cells.values()) for x in real.drafters([run(first)])]


def test_speeds_are_of_the_gamma_with_which_vegas_is_fastest():
    """3 tokens in 4 ms with gamma 5; with gamma 10 first 6 in 10 ms, then in 5."""

    def at_10(ms, **rest):
        case = LARGE | {"gamma": 10}
        times = (("none", 2, 1), ("vegas", ms, 6), ("ngram", 1, 6))
        return [row(x, each, per_step=n, case=case, **rest) for x, each, n in times]

    slower, faster = ([*FIRST, *at_10(ms)] for ms in (10, 5))
    assert list(real.speeds([run(slower)])) == list(real.speeds([run(FIRST)]))
    line = {x.cells["gamma"]: x.cells for x in real.speeds([run(faster)])}["10"]
    assert (line["fastest"], line["vs plain"]) == ("ngram 12.00x", "2.40x")
    assert [x.cells["gamma"] for x in real.limited([run(faster)])] == ["10", "5"]
    assert list(real.acceptance([run(faster)])) == list(real.acceptance([run(FIRST)]))


def test_shorter_answers_of_another_gamma_leave_those_of_the_usual_one():
    case = LARGE | {"gamma": 10, "new": 32}
    shorter = [row("none", 2, case=case), row("vegas", 10, per_step=6, case=case)]
    for lines in (real.acceptance, real.speeds):
        assert list(lines([run([*FIRST, *shorter])])) == list(lines([run(FIRST)]))


def test_a_losing_cell_is_shown_and_called_slower(text):
    small, _ = rows_of(text, SPEEDS)
    assert small[6:10] == ["vegas 0.60x, slower", "3.00", "0.60x, slower", "0.20x, slower"]
    (line,) = (x for x in text.splitlines() if "m, B=1, 4K tokens, vegas, acceptance m" in x)
    assert "| 0.60x, slower, T=0.8:  | plain decoding, tokens/s: 500 (0.50); " in line


def test_what_was_not_right_has_a_reason_and_no_speed(text):
    # 64,000 tokens/s would be 4 a step of 16 rows in 1 ms.
    assert "64,000" not in text
    assert "ngram (Test, m, 16, 4K, greedy): its answers are not the model's" in text
    assert "transformers (Test, m, 16, 4K, greedy): no module" in text


def test_a_cell_without_times_of_vegas_says_so():
    rows = [row("none", 2), row("ngram", 1), row("vegas", 1, checked=False, reason="wrong")]
    (line,) = real.speeds([run(rows)])
    assert line.cells["fastest"] == "ngram 2.00x"
    assert line.cells["vegas, tokens/step"] == "not timed"


def test_plain_decoding_has_a_speed_where_all_of_its_answers_repeat():
    rows = [row("none", 2, repeats=[True] * 8), row("vegas", 4, per_step=3)]
    assert figures.over_plain(rows[1], rows, figures.steady_rate) == pytest.approx(1.5)
    looping = row("vegas", 4, per_step=3, repeats=[True] * 8)
    assert figures.over_plain(looping, [rows[0], looping], figures.steady_rate) is None
    (line,) = real.speeds([run([rows[0], looping, row("ngram", 1)])])
    cells = [line.cells[x] for x in ("fastest", "vegas, tokens/step", "vs plain", "batch")]
    assert cells == ["ngram 2.00x", "(3.20)", "", "0.50x, slower"]


def test_exact_mode_and_other_libraries_are_over_plain_decoding(text):
    rows = [cells[2:] for cells in rows_of(text, "Exact mode and other libraries")]
    # Its own run's 6 ms for the rival; 2 ms for exact mode, which takes 8.
    rival = ["16", "4K", "torch, FlashAttention-3, CUDA graph", "1,778", "0.67x, slower", ""]
    assert rows[0] == [*rival, "5/8", ""]
    exact = ["", "", "jspec, exact bits", "2,000", "0.25x, slower", "0.75x, slower"]
    assert rows[1:] == [[*exact, "8/8", "6/8"]]


def test_acceptance_and_limits_of_vegas(text):
    (accepted,) = rows_of(text, "How often vegas is accepted")
    assert accepted == ["m", "4K", "3.00 ±0.00: 90 40"]
    limits = rows_of(text, "What limits a step")
    slow = ["20%, 60%, 20%", "20%, 60%, 20%; verification 80%", "3.00", "5.00", "0.60x, slower"]
    assert limits[1][2:] == ["1", "4K", "5", *slow]


def test_real_models_come_first_and_imposed_acceptance_has_a_title(tmp_path, text):
    results, docs = tmp_path / "results", tmp_path / "docs"
    (results / "another").mkdir()  # which comes after the other machine
    other = result([row("none", 2), row("vegas", 4, per_step=3)], machine=MACHINE | {"device": "A"})
    (results / "another" / "real.json").write_text(json.dumps(other))
    report.write(results, docs)
    titles = re.findall(r"^## (.*)$", (docs / "RESULTS.md").read_text(), re.MULTILINE)
    assert titles[:3] == ["At a glance: NVIDIA Test", "At a glance: A", SPEEDS]
    assert titles[-1] == "Throughput with imposed acceptance"
    glance = text.split("## Real models")[0]
    assert glance.index("m, B=16") < glance.index("imposed acceptance (the paper's)")


def test_results_of_two_devices_are_not_joined():
    other = result(SECOND, machine=MACHINE | {"device": "A"})
    with pytest.raises(ValueError, match="of A, NVIDIA Test"):
        real_cells.joined([result(FIRST), other])


def test_the_picture_marks_what_is_slower():
    from matplotlib.figure import Figure

    figure = Figure()
    both = real_cells.joined([result(FIRST), result(SECOND)])
    assert figures_of.OF_MODELS.draw(figure, Run("some", "real", "", both))
    rows, context = figure.axes
    drawn = {x.get_label(): list(map(tuple, x.get_xydata())) for x in rows.get_lines()}
    assert drawn["4K tokens"] == [(1, pytest.approx(0.6)), (16, pytest.approx(1.5))]
    crosses = [tuple(x.get_xydata()[0]) for x in rows.get_lines() if x.get_marker() == "x"]
    assert crosses == [(1, pytest.approx(0.6))]
    assert {x.get_label() for x in context.get_lines()} >= {"vegas", "suffix", "quest"}
    assert not figures_of.OF_MODELS.draw(Figure(), run([row("none", 2)]))


def test_readme_has_the_largest_and_the_slowest_cell(tmp_path, text):
    page = (tmp_path / "README.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert "(docs/some-real.png)" in page
    rows, slow = [line for line in page.splitlines() if "| 4K |" in line], "0.60x, slower"
    assert rows == [
        f"| Test | m | 1 | 4K | 5 | 500 (0.50) | vegas {slow} | {slow} | 0.20x, slower |  |",
        "|  |  | 16 | 4K | 5 | 8,000 (0.50) | suffix 3.00x | 1.50x | 0.50x, slower |  |",
    ]
    assert "It is slower than plain decoding with 1 row of 4K tokens (m)." in page
    assert readme.refreshed(page, []).count(readme.NOTHING) == 1
    with pytest.raises(ValueError, match=r"README\.md must have the lines"):
        readme.refreshed("nothing", [])


@cache
def speeds_in(device):
    """Formatted speeds of every timed row of a device, from its files, by the words of a line."""
    said_by_case = {}
    for path in report.RESULTS.glob("*/real*.json"):
        content = as_today(json.loads(path.read_text()))
        if content["machine"]["device"] != device:
            continue
        for line in filter(figures.is_timed, content["rows"]):
            case = line["case"]
            sampling = {"greedy": "greedy", "t0.8": "T=0.8"}.get(case["sampling"])
            at = case["model"], str(case["B"]), f"{case['S'] // 1024}K", sampling, line["name"]
            rates = (figures.steady_rate, figures.batch_rate)
            steady, batch = (figures.over_plain(line, content["rows"], x) for x in rates)
            usual = (case["exact"], case["backends"]) == ("no", "default")
            if steady is not None and batch is not None and usual:
                said_by_case.setdefault(at, []).append((said_of(steady), said_of(batch)))
    return said_by_case


def said_of(speed):
    said = f"{speed:.2f}x"
    return said if float(f"{speed:.2f}") >= 1 else f"{said}, slower"


def test_earlier_results_have_one_level_of_exactness():
    line = row("none", 8, case=LARGE | {"exact": "yes"})
    (renamed,) = as_today({"suite": "real", "rows": [line]})["rows"]
    assert renamed["case"] == line["case"] | {"exact": "bits"}


def test_the_part_of_readme_is_that_of_the_results():
    page = (ROOT / "README.md").read_text()
    runs = [run for run in read(report.RESULTS) if run.suite == "real"]
    assert readme.refreshed(page, runs) == page


def test_the_speeds_of_the_committed_tables_are_those_of_the_results():
    before, checked = [""] * 4, 0
    for cells in rows_of((report.DOCS / "RESULTS.md").read_text(), SPEEDS):
        same = next(index for index, cell in enumerate(cells) if cell)
        before = [*before[:same], *cells[same:4]]
        card, *at = before
        device = next(x for x in DEVICES if card in x)
        for sampling, said in (("greedy", cells[8:10]), ("T=0.8", cells[12:14])):
            if said[0]:
                assert tuple(said) in speeds_in(device)[*at, sampling, "vegas"], (before, sampling)
                checked += 1
    assert checked > 40


DEVICES = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def of_trees(*speeds, later=(), **rest):
    """Plain decoding in 2 ms, and the drafters of a cell that commit 3 tokens a step, by ms.

    ``later``: those of a second run.
    """
    case = {"model": branches.NAMED["model"], "B": 12, "S": 2048, "gamma": 15, "new": 128} | rest
    case = {"sampling": "t0.8"} | case
    runs = []
    for of_run in (speeds, later) if later else (speeds,):
        drafted = [row(name, ms, per_step=3, case=case) for name, ms in of_run]
        runs.append(result([row("none", 2, case=case), *drafted]))
    return [Run("h200", "real", "", real_cells.joined(runs))]


def test_trees_pay_where_they_reach_what_was_asked():
    speeds = ("ngram-1", 3), ("suffix", 4), ("vegas", 6)
    words = branches.timed(of_trees(*speeds, ("ngram-tree", 2)))
    assert "`ngram-tree` decodes 18,000 tokens/s" in words
    assert "`ngram-1`, the fastest with as wide a pass, 12,000." in words
    assert "1.50 times as many, at least 1.15, which was asked for: trees pay there." in words
    (line,) = [x for x in words.splitlines() if x.startswith("| Test")]
    assert [x.strip() for x in line.split("|")][2:6] == [
        "SmolLM2-135M-Instruct, 12 rows of 2K, T=0.8, 15 draft tokens",
        "1.50x",
        "6,000",
        "3.00; 2.00x",
    ]
    lost = branches.timed(of_trees(*speeds, ("ngram-tree", 3)))
    assert "1.00 times as many, less than 1.15, which was asked for: trees stay exp" in lost


def test_a_tree_is_compared_with_the_chains_of_its_own_run():
    speeds = ("ngram-1", 3), ("ngram-tree", 2)
    assert branches.timed(of_trees(*speeds, later=[("ngram-tree", 1)])) == branches.timed(
        of_trees(*speeds)
    )


@pytest.mark.parametrize(
    "other", [{"sampling": "greedy"}, {"gamma": 7}, {"B": 16}, {"backends": "xla"}, {"new": 64}]
)
def test_other_cells_do_not_say_whether_trees_pay(other):
    words = branches.timed(of_trees(("ngram-1", 3), ("ngram-tree", 2), **other))
    assert words.startswith("Trees are experimental: SmolLM2-135M-Instruct, 12 rows of 2K, T=0.8")
    assert ("1.50x" in words) == ("backends" not in other)


def test_a_tree_without_a_chain_next_to_it_decides_nothing():
    assert branches.timed(of_trees(("ngram-tree", 2))).startswith("Trees are experimental")
    assert "|" not in branches.timed(of_trees(("ngram-1", 3)))
