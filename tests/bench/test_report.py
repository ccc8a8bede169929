"""RESULTS.md from small stored results whose times are known, and from the committed ones."""

import itertools
import json
import re

import pytest

from bench import report
from bench.__main__ import SUITES
from bench.decode.kernels import PARTS
from bench.report import figures, steps
from bench.report.runs import Run

MACHINE = {
    "device": "NVIDIA Test",
    "cores": 2,
    "driver": "1.2",
    "date": "2026-01-01T00:00:00+00:00",
    "versions": {"jspec": "0"},
}


def row(operation, case, name, microseconds, **rest):
    samples = [round(1000 * microseconds)] * 5
    clocks = {"device_ns": samples, "wall_ns": [10 * ns for ns in samples], "kernels": 1}
    row = {"operation": operation, "case": case, "name": name, "checked": True}
    return row | {"backend": "torch" not in name, "chosen": False, "bytes": None} | clocks | rest


def case_of(suite, text):
    return SUITES[suite].case(text)[1]


def verify_rows():
    """Ballot 1 us, eager 9 us; naive 2 us, and at alpha .9 gamma / 32 more."""
    grid = itertools.product((1, 32), (8, 64, 128), (0.3, 0.6, 0.9))
    for batch, gamma, alpha in grid:
        case = {"B": batch, "gamma": gamma, "alpha": alpha, "l2": "warm"}
        yield row("verify_greedy", case, "cuda", 1.0, chosen=True, step_ns=[1500] * 3)
        yield row("verify_greedy", case, "cuda_naive", 2 + (alpha == 0.9) * gamma / 32)
        yield row("verify_greedy", case, "torch", 9.0)
    absent = {"operation": "verify_greedy", "case": {}, "name": "pallas", "checked": None}
    yield absent | {"reason": "needs sm_90"}


def ceilings():
    for work, microseconds in (("read", 50.0), ("copy", 100.0), ("launch", 1.0)):
        size = 8 if work == "launch" else 10**8
        case = {"work": work, "bytes": size, "l2": "warm"}
        yield row("ceilings", case, "xla", microseconds, bytes=size)


def pack_rows():
    for width, l2 in itertools.product((128, 2048), ("warm", "cold")):
        case = {"B": 32, "gamma": 128, "alpha": 0.9, "D": width, "l2": l2}
        yield row("pack", case, "cuda", 20.0, bytes=10**7, chosen=True)
        yield row("pack", case, "torch", 40.0, bytes=10**7)


def fused_rows():
    """Fused takes 4 us, the best two steps 6; at D=2048 fused 8 and the two steps 5."""
    grid = itertools.product((8, 128), (0.3, 0.9), (128, 2048), ("warm", "cold"))
    for gamma, alpha, width, l2 in grid:
        case = {"B": 32, "gamma": gamma, "alpha": alpha, "D": width, "l2": l2}
        is_large = width == 2048
        times = {
            "cuda": 8 if is_large else 4,
            "cuda+triton": 5 if is_large else 6,
            "cuda+torch": 12,
        }
        for name, microseconds in times.items():
            more = {"bytes": 10**6, "chosen": name == "cuda"}
            yield row("verify_and_pack", case, name, microseconds, **more)


def sampling_rows():
    for draft, batch, size in itertools.product(("one-hot", "logits"), (1, 32), (32000, 128256)):
        case = {"B": batch, "V": size, "draft": draft, "l2": "cold"}
        yield row("verify_stochastic", case, "cuda", 75.0, bytes=10**8, chosen=True)
        yield row("verify_stochastic", case, "xla", 500.0, bytes=10**8)


def decode_rows():
    """A pass takes 5 ms where the floor is 4; an iteration of vegas 40, of which selecting takes 2,
    and a step that reads by HATA a quarter of the dense one."""
    absent = {"operation": "pass", "case": {}, "name": "plain", "checked": None}
    yield absent | {"reason": "it needs 161.0 GB"}
    at = {"model": "b", "layers": 36, "B": 4, "S": 8192}

    def made(operation, name, ms, floors, **rest):
        row = {"operation": operation, "case": at | rest.pop("case", {}), "name": name}
        row |= {"checked": "2 layers", "step_ns": [round(ms * 1e6)] * 5}
        return row | {"over_floor": ms / sum(floors.values())} | rest

    for tokens in (1, 10):
        yield made("pass", "plain", 5, {"verification": 4}, case={"T": tokens})
    gamma = {"case": {"gamma": 9}}
    yield made("draft", "plain", 10, {"verification": 8}, tokens_per_s=400.0, **gamma)
    kinds = {"attention": 6e6, "matmuls": 4e6, "rest": 0}
    parts = dict.fromkeys(PARTS, dict.fromkeys(kinds, 0))
    alone = parts | {"verification": kinds}
    yield made("draft", "verification", 11, {"verification": 8}, parts_ns=alone, **gamma)
    parts |= {"draft passes": {"attention": 5e6, "matmuls": 20e6, "rest": 1e6}}
    parts |= {"verification": kinds | {"attention": 7e6}}
    parts |= {x: {"attention": 0, "matmuls": 0, "rest": 5e5} for x in ("collection", "selection")}
    floors = {"verification": 8, "draft passes": 13, "collection": 0.5}
    imposed = {"acceptance": "imposed", "tokens": 8.5, "tokens_per_s": 850.0}
    yield made("draft", "vegas", 40, floors, parts_ns=parts, **imposed, **gamma)
    yield made("read", "dense", 20, {"verification": 16})
    yield made("read", "hata", 5, {"verification": 4})


def attention_rows():
    """100 MB in 100 us at 32K, 125 with ten tokens at 128K, and 50 at 64K, where FlashInfer takes
    200; one row of 8K takes 100, and FlashAttention-3 40."""
    for slots, tokens in ((32768, 1), (131072, 10), (65536, 1)):
        case = case_of("attention", f"B=4,S={slots},T={tokens}") | {"l2": "cold"}
        ours = 125.0 if tokens == 10 else 50.0 if slots == 65536 else 100.0
        yield row("attention", case, "triton", ours, bytes=10**8, chosen=True)
        yield row("attention", case, "flashinfer", 200.0, bytes=10**8, backend=False)
    case = case_of("attention", "B=1,S=8K,T=1") | {"l2": "cold"}
    yield row("attention", case, "triton", 100.0, bytes=10**8, chosen=True)
    yield row("attention", case, "fa3", 40.0, bytes=10**8, backend=False)
    absent = {"operation": "attention", "case": case, "name": "cudnn", "checked": None}
    yield absent | {"reason": "cuDNN needs a GPU"}


def gather_rows():
    case = case_of("attention", "op=gathered_attention") | {"l2": "cold"}
    yield row("gathered_attention", case, "xla", 100.0, bytes=10**8, chosen=True)


def select_rows():
    case = {"rows": 8, "n": 2**20, "k": 8192, "scores": "float32", "l2": "cold"}
    for name, microseconds in (("cuda", 100.0), ("torch", 400.0)):
        yield row("select", case, name, microseconds, bytes=10**8, chosen=name == "cuda")


def layer_rows():
    """FlashAttention-3 takes 1 ms, HATA 50 us, Quest 100, Loki 150."""
    case = case_of("hata", "B=8,S=32K") | {"l2": "cold"}
    yield row("hata_layer", case, "fa3", 1000.0, bytes=4 * 10**9)
    for name, time in (("hata", 50.0), ("quest_32", 100.0), ("loki", 150.0)):
        yield row("hata_layer", case, name, time, bytes=10**8)


RESULTS = {
    "verify": verify_rows,
    "pack": pack_rows,
    "fused": fused_rows,
    "sampling": sampling_rows,
    "attention": attention_rows,
    "gather": gather_rows,
    "select": select_rows,
    "hata-layer": layer_rows,
    "decode": decode_rows,
}


def written(tmp_path, *suites: str) -> str:
    """The text of the report on these results, and every picture that it names is there."""
    folder, docs = tmp_path / "results" / "test", tmp_path / "docs"
    folder.mkdir(parents=True)
    for suite in suites:
        result = {"suite": suite, "machine": MACHINE, "rows": list(RESULTS[suite]())}
        result["ceilings"] = list(ceilings())
        (folder / f"{suite}.json").write_text(json.dumps(result))
    report.write(folder.parent, docs)
    text = (docs / "RESULTS.md").read_text()
    assert {path.name for path in docs.glob("*.png")} == set(re.findall(r"\]\((.*?\.png)\)", text))
    return text


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib")


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the first table under a heading."""
    part = text.split(f"## {title}\n")[1].split("\n## ")[0]
    table = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_kernels_are_compared_with_rivals_and_other_kernels_of_jspec(tmp_path):
    text = written(tmp_path, "verify", "pack", "fused", "sampling")
    rows = rows_of(text, "Verification and packing")
    # Ballot 1 us, PyTorch 9, naive 2.
    case = "B=32, alpha=0.9, gamma=128"
    assert rows[0] == [
        *("verify_greedy", "Test", "B=32, alpha=0.9, gamma=8", "1.00"),
        *("", "9.00x (torch 9.00)", "2.25x (cuda_naive 2.25)"),
    ]
    assert rows[1] == ["", "", case, "1.00", "", "9.00x (torch 9.00)", "6.00x (cuda_naive 6.00)"]
    # 10 MB in 20 us are 500 GB/s, half of 100 MB in 100 us.
    pack = f"{case}, D=2048, l2=cold"
    assert rows[2] == ["pack", "Test", pack, "20.0", "50% of copy", "2.00x (torch 40.0)", ""]
    # Fused takes 8 us where the two steps take 5.
    assert rows[3][2:] == [pack, "8.00", "12% of copy", "0.62x, slower (cuda+triton 5.00)", ""]
    assert rows[4][2:4] == ["worst of 16: B=32, gamma=8, alpha=0.3, D=2048, l2=warm", "8.00"]
    # 100 MB take 50 us at the read ceiling.
    assert rows[5][3:] == ["75.0", "67% of read", "", "6.67x (xla 500)"]
    files = "bench/results/test/{verify,pack,fused,sampling}.json"
    assert f"All rows: `python -m bench show {files}`." in text


def test_the_worst_case_is_shown_where_it_is_slower(tmp_path):
    rows = rows_of(written(tmp_path, "attention", "gather", "select"), TITLE)
    (worst,) = (row for row in rows if "worst" in row[2])
    assert worst[2:4] == ["worst of 4: B=1, S=8K, heads=32/8, H=128, T=1, l2=cold", "100"]
    assert worst[5:] == ["0.40x, slower (fa3 40.0)", ""]
    long = next(row for row in rows if row[2] == "B=4, S=128K, T=10, heads=32/8, H=128")
    assert long[3:] == ["125", "40% of read", "1.60x (flashinfer 200)", ""]


TITLE = "Attention over a cache, and selection"


def test_of_several_runs_the_one_with_the_fastest_rival_is_shown(tmp_path):
    written(tmp_path, "select")
    (path,) = tmp_path.rglob("select.json")
    result = json.loads(path.read_text())
    case = result["rows"][0]["case"]
    rows = [row("select", case, "cuda", 110.0, bytes=10**8, chosen=True)]
    rows += [row("select", case, "cub", 99.0, bytes=10**8)]
    path.with_name("select.cub.json").write_text(json.dumps(result | {"rows": rows}))
    report.write(path.parents[1], tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| 110 | 45% of read | 0.90x, slower (cub 99.0) |" in text
    assert "| 110 us | 45% of read ceiling; 0.90x, slower (cub 99.0) |" in text
    assert "bench/results/test/select.*json`" in text


def test_a_layer_is_shown_over_dense_attention(tmp_path):
    text = written(tmp_path, "hata-layer")
    (cells,) = rows_of(text, "A layer and a step of each policy")
    # FlashAttention-3 takes 1 ms, HATA 50 us, Quest 100, Loki 150.
    assert cells[:3] == ["Test", "layer, B=8, S=32K, n=512, heads=32/32", "1,000 us (fa3)"]
    assert cells[3:7] == ["50.0 us", "20.00x", "10.00x", "6.67x"]
    assert "| 20.00x over dense, 1,000 us (fa3) |" in text


def test_a_step_is_shown_over_its_floor(tmp_path):
    rows = rows_of(written(tmp_path, "decode"), "A decoding step at real models' shapes")
    # 5 ms where the floor is 4.
    assert rows == [["Test", "b", "4", "8K", "5.00 ms, 1.25", "5.00 ms, 1.25"]]


def test_iterations_are_shown_with_their_parts_and_imposed_tokens(tmp_path):
    text = written(tmp_path, "decode")
    # What attention takes above that of the pass alone, 1 ms, is collection.
    at = ["Test", "b", "4", "8K"]
    assert rows_of(text, "An iteration and its parts") == [
        [*at, "9", "10.00", "40.00", "1.86", "26.00", "10.00", "5.3%"]
    ]
    assert rows_of(text, "Throughput with imposed acceptance") == [
        [*at, "vegas", "9", "8.50", "40.00", "850", "2.12x"]
    ]
    (step,) = rows_of(text, "A layer and a step of each policy")
    assert step[:5] == ["Test", "step, b, B=4, S=8K", "20.00 ms", "5.00 ms", "4.00x"]
    assert "| 2.12x over plain decoding; imposed acceptance (the paper's) |" in text
    assert "| 5.00 ms | 4.00x over dense, 20.00 ms |" in text


def test_imposed_tokens_are_compared_with_plain_decoding_of_their_own_run():
    """Another run, which comes first, has a plain step that is twice as fast."""
    rows = list(decode_rows())
    (plain,) = (x for x in rows if (x["operation"], x["name"]) == ("draft", "plain"))
    faster = plain | {"tokens_per_s": 2 * plain["tokens_per_s"]}
    runs = [Run("test", "decode", "", {"machine": MACHINE, "rows": x}) for x in ([faster], rows)]
    (line,) = steps.imposed(runs)
    assert (line.cells["tok/s"], line.cells["vs plain"]) == ("850", "2.12x")


def test_quality_is_shown_as_scores_lengths_and_flips(tmp_path):
    def made(operation, name, case, **figures):
        return {"operation": operation, "name": name, "case": case, "checked": True} | figures

    rows = [made("read", "dense", {"S": 8192, "budget": None}, bytes=0.0, score=99.0)]
    for budget in (1 / 64, 1 / 32):
        case = {"S": 8192, "questions": 3, "budget": budget}
        rows.append(made("read", "hata", case, bytes=16.0, score=100 * budget))
    case = {"S": 512, "texts": 2, "new": 8, "gamma": 2, "percent": 7, "exact": "no"}
    case |= {"sampling": "greedy"}
    over = {"over vegas-first": 0.5, "standard error": 0.25}
    for name, length, more in (("vegas-first", 1.5, {}), ("hata", 2.0, over)):
        counts = {"length": length} | more
        flips = {"accepted_at": [3], "compared": 18, "flips": 1, "flip_margins": [0.25]}
        rows.append(made("draft", name, case, **counts, **flips))
    folder = tmp_path / "results" / "some"
    folder.mkdir(parents=True)
    result = {"suite": "quality", "machine": MACHINE, "rows": rows}
    (folder / "quality.json").write_text(json.dumps(result))
    # Another model of the same machine has lines of its own.
    of_model = [x | {"case": x["case"] | {"model": "m"}, "score": 50.0} for x in rows[:2]]
    (folder / "quality.m.json").write_text(json.dumps(result | {"rows": of_model}))
    report.write(folder.parent, tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    assert "| Test | bundled | 8K | bytes of a key | 0 | 16 |" in text
    # Of the shares that a policy was measured at, one is shown.
    assert "| bytes of a key | 0 | 16 |\n|  |  |  | 1.56% | 99.0 | 1.6 |\n" in text
    assert not any(f"| {share} |" in text for share in ("0.39%", "3.12%", "6.25%"))
    assert "|  | m | 8K | bytes of a key | 0 | 16 |" in text
    assert "|  |  |  | 1.56% | 50.0 | 50.0 |" in text
    texts = "2 texts of 512 tokens, 8 new ones each, gamma 2, 7 % of the context"
    assert f"| Test, {texts} | hata | 2.00 | +0.50 ± 0.25 |  |  |" in text
    assert "| Test | bundled | no | 2 | 36 | 2 | 55.556 | 0.250 | 0.250 |" in text
    assert (tmp_path / "some-ruler-budget.png").exists()


def test_the_figure_of_attention_has_shares_of_the_ceiling_against_context():
    from matplotlib.figure import Figure

    result = {"machine": MACHINE, "rows": list(attention_rows()), "ceilings": list(ceilings())}
    figure, run = Figure(), Run("test", "attention", "", result)
    assert figures.OF_CONTEXT.draw(figure, run)
    drawn = figure.axes[0].get_lines()
    assert {line.get_label(): list(map(tuple, line.get_xydata())) for line in drawn} == {
        "triton": [(32768, 0.5), (65536, 1)],
        "flashinfer": [(32768, 0.25), (65536, 0.25)],
    }
    result["rows"] = result["rows"][:1]
    assert not figures.OF_CONTEXT.draw(Figure(), run)


def test_every_table_has_a_command_and_another_run_writes_the_same(tmp_path):
    once = written(tmp_path / "a", *RESULTS)
    assert once == written(tmp_path / "b", *RESULTS)
    titles = re.findall(r"^## (.*)$", once, re.MULTILINE)
    assert once.count("All rows: `python -m bench show ") == len(titles) - 1  # but the glance
    assert "At a glance: NVIDIA Test" in titles


def test_the_committed_results_give_the_committed_report(tmp_path, monkeypatch):
    """The text alone: every figure is drawn, and none of them rendered."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **settings: None)
    report.write(docs=tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    assert text == (report.DOCS / "RESULTS.md").read_text()
    assert len(text.splitlines()) <= 350


def test_every_committed_picture_is_shown():
    pages = [report.README, *report.DOCS.glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"([\w-]+\.png)\)", page.read_text())}
    names = {path.name for path in report.DOCS.glob("*.png")}
    assert names <= shown
    assert len(names) <= 15


def test_no_speed_below_one_is_shown_without_being_called_slower():
    text = (report.DOCS / "RESULTS.md").read_text()
    speeds = re.findall(r"(?<![\d.])0\.\d+x([^|;]*)", text)
    assert speeds
    assert all("slower" in rest for rest in speeds)
