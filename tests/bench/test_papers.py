"""The page of the papers' figures, from results whose times are known and from committed ones."""

import re

from bench import report
from bench.report import papers, systems
from bench.report.markdown import refreshed
from bench.report.runs import Run, read
from tests.bench.test_comparison import lines


def run(suite, *rows, date="2026-01-01", device="NVIDIA H100 80GB HBM3"):
    result = {"suite": suite, "machine": {"device": device, "date": date}, "rows": list(rows)}
    return Run("h100", suite, "", result)


def row(operation, name, case, microseconds=None, clock="device_ns", **rest):
    line = {"operation": operation, "case": case, "name": name, "checked": True}
    return line | ({} if microseconds is None else {clock: [1000 * microseconds] * 3}) | rest


def cells(name, *runs):
    return lines(papers.tables(runs)[name])


LAYER = {"B": 1, "S": 32768, "heads": "32/8", "H": 128, "n": 512}


def layer(name, microseconds, **case):
    return row("hata_layer", name, LAYER | case, microseconds)


def test_layers_are_over_the_fastest_dense_attention_of_the_last_run():
    dense = [layer("cudnn", 100), layer("triton", 120), layer("dense", 10)]
    old = run("hata", layer("cudnn", 1000), layer("hata", 1))
    new = run("hata", *dense, layer("hata", 20), layer("loki", 200), date="2026-01-02")
    whole = run("hata", layer("cudnn", 300, heads="32/32"), layer("hata", 100, heads="32/32"))
    first, second = cells("layer", new, old, whole)
    assert first == ["H100", "32/32", "1", "32K", "300 us (cudnn)", "100", "3.00x", "", ""]
    assert second[1:] == [
        "32/8",
        "1",
        "32K",
        "100 us (cudnn)",
        "20.0",
        "5.00x",
        "",
        "0.50x, slower",
    ]


def test_scores_stand_next_to_the_steps_of_the_same_policies():
    case = {"S": 32768, "questions": 8, "budget": 1 / 64}
    scores = [row("read", "hata", case, score=84.25), row("read", "quest", case, score=30.0)]
    scores.append(row("read", "hata", case | {"budget": 1 / 32}, score=99.0))
    step = {"model": "m", "B": 4, "S": 131072}
    times = {"dense": 60, "hata": 20, "quest_32": 30}
    steps = [row("read", x, step, us, "step_ns", over_floor=1.0) for x, us in times.items()]
    assert cells("score and speed", run("ruler", *scores), run("decode", *steps)) == [
        ["hata", "84.2 %", "3.00x"],
        ["quest", "30.0 %", "2.00x"],
    ]


def test_what_each_kernel_takes_off_is_a_share_of_the_plain_layer():
    stages = {"plain": 200, "score": 100, "select": 80, "one_operation": 40}
    rows = [row("hata_parts", x, LAYER, us) for x, us in stages.items()]
    (line,) = cells(
        "parts", run("hata", *rows), run("hata-ablation", row("hata_parts", "plain", LAYER, 1))
    )
    assert line[1:] == [
        "B=1, S=32K, 32/8 heads",
        *("200 us", "100 us (-50.0%)", "80.0 us (-10.0%)", "40.0 us (-20.0%)", "5.00x"),
    ]


def test_prefill_is_of_gpus():
    case = {"model": "m", "layers": 8, "B": 1, "S": 32768}
    rows = [row("prefill", "dense", case, 1000, "wall_ns", over_dense=1.0)]
    rows += [row("prefill", "hata", case, 1005, "wall_ns", over_dense=1.005)]
    (line,) = cells("prefill", run("decode", *rows), run("decode", *rows, device="cpu"))
    assert line == ["H100", "m, 8 layers", "1 x 32K", "1.00", "1.00", "+0.50%"]


def test_quality_by_depth_gap_and_share():
    needle = row("needle", "hata", {"S": 2048}, depths={"0%": 100.0, "100%": 50.0}, score=75.0)
    assert cells("needles", run("quality", needle)) == [["H100", "2K", "hata", "100", "50"]]
    assert not list(systems.quality([run("quality", needle)])), "no score of RULER"
    figures = {"rejected": 9, "mean": 0.25, "below": {"0.5": 0.75, "1.0": 0.25}}
    lost = row("rejected", "vegas-first", {"S": 4096}, **figures)
    expected = ["CPU", "4K", "vegas-first", "9", "0.25", "75%", "25%"]
    assert cells("rejected", run("quality", lost, device="cpu")) == [expected]
    gaps = {"selected": 5, "gap 1": 0.5, "gap 2": 0.25}
    near = row("overlap", "vegas-first", {"S": 2048, "gamma": 2}, **gaps, checked=None)
    assert cells("overlap", run("quality", near)) == [["H100", "2K", "5", "0.50", "0.25"]]

    def drafted(percent, sampling, accepted):
        case = {"S": 4096, "gamma": 2, "percent": percent, "sampling": sampling}
        return row("draft", "vegas-first", case, accepted_at=[accepted, 1], steps=[2, 2])

    rows = [drafted(7, "paper", 4), drafted(1, "paper", 2), drafted(3, "greedy", 4)]
    assert cells("budgets", run("quality", *rows)) == [["H100", "4K", "2", "0.75", "1.25"]]


def draft(name, gamma, percent, milliseconds, rate, **rest):
    case = {"model": "m", "B": 2, "S": 8192, "gamma": gamma, "percent": percent, "exact": "no"}
    return row("draft", name, case, 1000 * milliseconds, "step_ns", tokens_per_s=rate, **rest)


def test_iterations_by_gamma_share_and_batch():
    rows = [draft("plain", 5, 7, 2, 1000), draft("vegas-first", 5, 7, 8, 1500, vs_plain=1.5)]
    rows += [draft("vegas-first", 9, 7, 9, 2000), draft("vegas-first", 9, 15, 10, 1800)]
    rows += [draft("vegas-first", 9, 3, 8, 1900)]
    measured = run("decode", *rows)
    assert cells("gammas", measured) == [
        ["H100", "m, B=2, S=8K", "3 %", "", "1,900 tok/s (8.00 ms)"],
        ["", "", "7 %", "1,500 tok/s (8.00 ms)", "2,000 tok/s (9.00 ms)"],
        ["", "", "15 %", "", "1,800 tok/s (10.00 ms)"],
    ]
    assert cells("batches", measured) == [["H100", "m", "8K", "5", "1.50x"]]
    assert papers.tables([run("decode", rows[1])])["gammas"] == "Not measured.\n"
    assert cells("gammas", run("decode", *rows[1:3])) == [
        ["H100", "m, B=2, S=8K", "7 %", "1,500 tok/s (8.00 ms)", "2,000 tok/s (9.00 ms)"]
    ]


def test_pages_of_a_selection_and_scans_with_their_tails():
    case = {"B": 16, "S": 131072, "heads": "32/8", "H": 128}
    rows = [
        row("gathered_attention", "triton", case | {"indices": x}, us)
        for x, us in (("pages-16", 9), ("shared", 10), ("per-head", 1))
    ]
    rows.append(row("gathered_attention", "triton", case | {"indices": "shared", "B": 8}, 5))
    assert cells("pages", run("attention", *rows)) == [
        ["H100", "32/8, H=128", "triton", "10.0 us", "9.00 us"]
    ]
    case = {"B": 32, "gamma": 64, "alpha": 0.9}
    samples = {"device_ns": [2000] * 19 + [4000] * 2, "wall_ns": [50_000] * 21}
    rows = [row("acceptance_scan", x, case, **samples) for x in ("torch", "cuda_naive")]
    rows.append(row("acceptance_scan", "cuda", case, 1, wall_ns=[40_000] * 3))
    (line,) = cells("scans", run("verify", *rows))
    assert line[:4] == ["H100", "64", "0.9", "50.0 (50.0)"]
    assert line[5:] == ["40.0 (40.0)", "2.00 (4.00)", "2.00 (4.00)", "1.00 (1.00)", "2.00x"]


OPERATIONS = ("hata_layer", "read", "needle", "hata_parts", "prefill", "rejected", "overlap")
OPERATIONS += ("draft", "gathered_attention", "acceptance_scan")


def test_wrong_rows_and_rows_without_figures_are_left_out():
    case = {"B": 32, "S": 8, "gamma": 1}
    wrong = [
        row(operation, "vegas-first", case, checked=checked, reason="why")
        for operation in OPERATIONS
        for checked in (False, None)
    ]
    assert set(papers.tables([run("hata", *wrong)]).values()) == {"Not measured.\n"}


def test_the_committed_page_is_that_of_the_results():
    page = (report.DOCS / "papers.md").read_text()
    assert refreshed(page, papers.tables(read(report.RESULTS))) == page
    assert re.findall(r"<!-- table ([a-z ]+):", page) == list(papers.LINES)
