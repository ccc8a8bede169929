"""RESULTS.md from a small stored result whose times are known."""

import itertools
import json
import re

import pytest

from bench import attention, gather, layer, regret, report
from bench import hash as hashing
from bench.report import figures
from bench.report.text import header

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
    own = {"operation": operation, "case": case, "name": name, "checked": True}
    return own | {"backend": "torch" not in name, "chosen": False, "bytes": None} | clocks | rest


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
        wide = width == 2048
        times = {"cuda": 8 if wide else 4, "cuda+triton": 5 if wide else 6, "cuda+torch": 12}
        for name, microseconds in times.items():
            more = {"bytes": 10**6, "chosen": name == "cuda"}
            yield row("verify_and_pack", case, name, microseconds, **more)


def sampling_rows():
    for draft, batch, size in itertools.product(("one-hot", "logits"), (1, 32), (32000, 128256)):
        case = {"B": batch, "V": size, "draft": draft, "l2": "cold"}
        yield row("verify_stochastic", case, "cuda", 75.0, bytes=10**8, chosen=True)
        yield row("verify_stochastic", case, "xla", 500.0, bytes=10**8)


def decode_rows():
    """A step takes 5 ms where the floor is 4, in 3 ms of attention, 1 of products, 0.5 of rest."""
    parts = {"attention": 3 * 10**6, "products": 10**6, "rest": 500_000}
    for model, batch, tokens in (("a", 1, 1), ("a", 1, 10), ("b", 4, 1)):
        case = {"model": model, "layers": 36, "B": batch, "context": 8192, "T": tokens}
        own = {"operation": "decode_step", "case": case, "name": "pallas", "checked": "2 layers"}
        own |= {"floor_ns": 4e6, "weight_bytes": 900, "cache_bytes": 100, "temp_bytes": 2}
        own |= {"peak_bytes": 1010, "peak_measured": batch == 1, "kernels": 400.0, "idle": 0.1}
        yield own | {"step_ns": [5 * 10**6] * 5, "parts_ns": parts}
    absent = {"operation": "decode_step", "case": {}, "name": "xla", "checked": None}
    yield absent | {"reason": "it needs 161.0 GB"}
    case = {"model": "a", "layers": 36, "B": 1, "tokens": 16384}
    own = {"operation": "prefill", "case": case, "name": "jspec", "checked": "2 layers"}
    own |= {"flops": 10**14, "matrix_ceiling_flops_per_s": 8e14}
    yield own | {"wall_ns": [250 * 10**6] * 3}


def attention_rows():
    """100 MB in 100 us at 32K, 125 with ten tokens, and 50 at 64K; FlashInfer 200."""
    for slots, tokens in ((32768, 1), (32768, 10), (65536, 1)):
        case = attention.case(f"B=4,S={slots},T={tokens}") | {"l2": "cold"}
        ours = 125.0 if tokens == 10 else 50.0 if slots == 65536 else 100.0
        yield row("attention", case, "triton", ours, bytes=10**8, chosen=True)
        yield row("attention", case, "flashinfer", 200.0, bytes=10**8, backend=False)
    absent = {"operation": "attention", "case": case, "name": "cudnn", "checked": None}
    yield absent | {"reason": "cuDNN needs a GPU"}


def gather_rows():
    for part, microseconds in (("gather", 100.0), ("copy", 90.0), ("read", 80.0)):
        case = gather.DEFAULT | {"part": part, "l2": "cold"}
        yield row(gather.OPERATIONS[part], case, "xla", microseconds, bytes=10**8, chosen=True)


def hash_rows():
    parts = ("encode", "append", "score", "select", "collide")
    for part, operation in zip(parts, hashing.SUITE.operations, strict=True):
        case = hashing.DEFAULT | {"part": part, "l2": "cold"}
        yield row(operation.name, case, "xla", 50.0, bytes=10**8, chosen=True)


def select_rows():
    case = {"rows": 8, "n": 2**20, "k": 8192, "scores": "float32", "l2": "cold"}
    for name, microseconds in (("cuda", 100.0), ("torch", 400.0)):
        yield row("select", case, name, microseconds, bytes=10**8, chosen=name == "cuda")


def layer_rows():
    """FlashAttention-3 takes 1 ms, HATA 50 us, Quest 100, Loki 150."""
    case = layer.case("B=8,S=32K") | {"l2": "cold"}
    yield row("attention", case, "fa3", 1000.0, bytes=4 * 10**9)
    for name, time in (("hata", 50.0), ("quest_32", 100.0), ("loki", 150.0)):
        yield row("hata_layer", case, name, time, bytes=10**8)


def lossy_rows():
    """The dense step takes 20 ms, 16 at the floor; that of HATA 5 and 4."""
    for policy, ms in (("dense", 20), ("hata", 5)):
        case = {"model": "llama-3.1-8b", "layers": 32, "B": 4, "context": 131072, "T": 1}
        case |= {} if policy == "dense" else {"policy": policy}
        own = {"operation": "decode_step", "case": case, "name": "triton", "checked": "2 layers"}
        own |= {"floor_ns": 0.8e6 * ms, "cache_bytes": 100, "temp_bytes": 2, "kernels": 400.0}
        yield own | {"idle": 0.1, "step_ns": [ms * 10**6] * 5}


def ablation_rows():
    case = layer.case("B=1,S=128K") | {"l2": "cold"}
    for name, time in (("plain", 1000.0), ("score", 500.0), ("encode", 100.0)):
        yield row("hata_parts", case, name, time, bytes=10**8)
    for count, bits in ((512, 128), (2048, 256)):
        yield row("hata_budget", case | {"n": count}, "hata", 80.0, bytes=10**8)
        yield row("hata_bits", case | {"R": bits}, "hata", 90.0, bytes=10**8)


RESULTS = {
    "ceilings": ceilings,
    "verify": verify_rows,
    "pack": pack_rows,
    "fused": fused_rows,
    "sampling": sampling_rows,
    "decode": decode_rows,
    "attention": attention_rows,
    "gather": gather_rows,
    "hash": hash_rows,
    "select": select_rows,
    "hata-layer": layer_rows,
    "hata-ablation": ablation_rows,
    "hata-e2e": lossy_rows,
}


def written(tmp_path, *suites: str) -> str:
    """The text of the report on these results, and every picture that it names is there."""
    folder, docs = tmp_path / "results" / "test", tmp_path / "docs"
    folder.mkdir(parents=True)
    for suite in suites:
        result = {"suite": suite, "machine": MACHINE, "rows": list(RESULTS[suite]())}
        result["ceilings"] = list(ceilings())
        result |= {
            "read_ceiling_bytes_per_s": 4e12,
            "matrix_ceiling_flops_per_s": 8e14,
            "steps": 16,
        }
        (folder / f"{suite}.json").write_text(json.dumps(result))
    report.write(folder.parent, docs)
    text = (docs / "RESULTS.md").read_text()
    assert {path.name for path in docs.glob("*.png")} == set(re.findall(r"\]\((.*?\.png)\)", text))
    return text


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib")


def lines(text: str, start: str) -> list[list[str]]:
    """The cells of table lines that begin so."""
    found = [line for line in text.splitlines() if line.startswith(f"| {start} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in found]


def test_the_findings_of_verification_stand_beside_the_papers(tmp_path):
    text = written(tmp_path, "verify")
    assert "## Greedy verification: NVIDIA Test" in text
    # F1: wall 10 and 90; the paper's 12.80 and 84.38.
    assert lines(text, "cuda")[0][3:] == ["10.0", "9.00x", "12.8", "6.59x"]
    # F2: naive is 2 at the low end, 6 at the high; the paper's 14.69 and 23.84.
    slope = next(cells for cells in lines(text, "128") if "+4.00 (+200%)" in cells)
    assert slope[1:3] == ["+0.00 (+0%)", "+4.00 (+200%)"]
    assert slope[-2] == "+9.15 (+62%)"
    # F3: 6 over 1; the paper's 23.84 over 12.93.
    third = next(cells for cells in lines(text, "128") if cells[1] == "0.9")
    assert third[-2:] == ["6.00x", "1.84x"]
    assert "Inside a jitted loop" in text
    assert "fastest backend: mean 1.00x, worst 1.00x" in text
    assert "- pallas, verify_greedy: needs sm_90" in text
    assert text.count("![") == 4


def test_packing_is_measured_by_the_copy_ceiling(tmp_path):
    text = written(tmp_path, "pack")
    # 10 MB in 20 us is 500 GB/s, half of 100 MB in 100 us; the paper's kernel lost 2.75x.
    assert lines(text, "warm")[1][:4] == ["warm", "2048", "20.0 (50%)", "40.0 (25%)"]
    assert lines(text, "warm")[1][-1] == "2.75x"


def test_the_fused_section_names_the_best_pipeline_and_the_regret(tmp_path):
    text = written(tmp_path, "fused")
    at = next(cells for cells in lines(text, "32") if cells[:4] == ["32", "128", "2048", "0.9"])
    assert at[4:6] == ["8.00", "5.00"]
    assert at[8:10] == ["0.62x", "1.50x"]
    assert at[-1] == "0.28x"
    assert "pipeline: mean 1.06x, worst 0.62x (B=32, gamma=8, alpha=0.3, D=2048, l2=warm)" in text


def test_the_crossover_shows_the_gammas_that_ran_at_several_widths():
    from matplotlib.figure import Figure

    case = {"B": 32, "gamma": 16, "alpha": 0.9, "D": 128, "l2": "warm"}
    rows = [*fused_rows(), row("verify_and_pack", case, "cuda", 4.0)]
    draw, _ = figures.FIGURES["fused"]["fused-crossover"]
    figure = Figure()
    assert draw(figure, {"rows": rows})
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["B=32, gamma=8, alpha=0.9", "B=32, gamma=128, alpha=0.9"]


def test_sampling_is_measured_by_the_bytes_of_its_logits(tmp_path):
    text = written(tmp_path, "sampling")
    assert lines(text, "one-hot")[0][4:] == ["50.0", "75.0 (1.50x)", "500 (10.00x)"]


def test_a_step_is_measured_by_its_floor_and_divided_into_parts(tmp_path):
    text = written(tmp_path, "decode")
    first, part, prefill = lines(text, "a")[0], lines(text, "a")[2], lines(text, "a")[-1]
    assert first[5:] == [
        *("pallas", "5.00", "5.00-5.00", "4.00", "1.25", "400", "10.0%", "1.010", "2.0%"),
        "2 layers",
    ]
    assert lines(text, "b")[0][12] == "~1.010"
    assert part[5:] == ["3.00 (60%)", "1.00 (20%)", "0.500 (10%)", "0.500 (10%)"]
    # 1e14 in a quarter of a second are half of 8e14.
    assert prefill == ["a", "16,384", "65,536", "400", "50%"]
    assert "- xla, decode_step: it needs 161.0 GB" in text


def test_attention_is_measured_by_the_read_ceiling(tmp_path):
    text = written(tmp_path, "attention")
    # 100 MB take 50 us at the ceiling.
    columns = ["B", "S", "heads", "H", "T", "lengths", "MB"]
    assert lines(text, "B")[0] == [*columns, "triton", "flashinfer"]
    found = {(cells[1], cells[4]): cells[-2:] for cells in lines(text, "4")}
    assert found["32K", "10"] == ["125 (40%)", "200 (25%)"]
    assert found["64K", "1"] == ["50.0 (100%)", "200 (25%)"]
    assert "- cudnn, attention: cuDNN needs a GPU" in text
    assert text.count("![") == 2


def test_the_figures_of_attention_are_shares_against_context_and_tokens():
    from matplotlib.figure import Figure

    result = {"suite": "attention", "rows": list(attention_rows()), "ceilings": list(ceilings())}
    found = {}
    for name, (draw, _) in figures.FIGURES["attention"].items():
        figure = Figure()
        assert draw(figure, result)
        own = figure.axes[0].get_lines()
        found[name] = {line.get_label(): list(map(tuple, line.get_xydata())) for line in own}
    assert found == {
        "attention-context": {
            "triton": [(32, 0.5), (64, 1)],
            "flashinfer": [(32, 0.25), (64, 0.25)],
        },
        "attention-tokens": {
            "triton": [(1, 0.5), (10, 0.4)],
            "flashinfer": [(1, 0.25), (10, 0.25)],
        },
    }
    assert not any(
        draw(Figure(), result | {"rows": result["rows"][:1]})
        for draw, _ in figures.FIGURES["attention"].values()
    )


def test_a_selection_says_when_its_copy_wins(tmp_path):
    text = written(tmp_path, "gather")
    assert [cells[-1] for cells in lines(text, "8")] == ["100 (50%)", "90.0 (56%)", "80.0 (62%)"]
    assert "- B=8, n=8K of 128K, 32/8 heads, T=1, shared: gather 100 us; copy 90.0 us" in text
    assert "the copy wins from read 5 on" in text


def test_an_interrupted_run_says_so():
    assert "cases are missing" not in header("Attention", {"machine": MACHINE})
    found = header("Attention", {"machine": MACHINE, "interrupted": True})
    assert found.rstrip().endswith("The run was interrupted: cases are missing.")


def test_selection_is_measured_by_the_read_ceiling(tmp_path):
    text = written(tmp_path / "select", "select")
    assert lines(text, "8")[0][1:] == ["1024K", "8192", "float32", "100", "100 (50%)", "400 (12%)"]
    text = written(tmp_path / "hash", "hash")
    assert [cells[-1] for cells in lines(text, "8")] == ["50.0 (100%)"] * 5


def test_a_layer_stands_beside_the_papers(tmp_path):
    text = written(tmp_path, "hata-layer")
    # 100 MB take 50 us at the ceiling; the fastest dense attention 20 times as long as HATA.
    own = next(cells for cells in lines(text, "8") if cells[4] == "hata")
    assert own[5:] == ["50.0", "50.0-50.0", "1", "100", "100%", "20.00x", "1.33 of 15x"]
    found = lines(text, "the fastest dense attention"), lines(text, "Quest, pages of 32")
    assert [cells[-2:] for cells in found[0]] == [["20.00x", "7.20x"], ["", "6.51x"]]
    assert lines(text, "Loki")[0][-2:] == ["3.00x", "1.99x"]
    assert text.count("![") == 1


def test_a_step_of_each_policy_stands_beside_the_dense_one(tmp_path):
    text = written(tmp_path, "hata-e2e")
    dense, hata = lines(text, "llama-3.1-8b")
    assert dense[4:10] == ["dense", "20.00", "20.00-20.00", "200", "1.00x", "16.00"]
    assert hata[4:] == [
        *("hata", "5.00", "5.00-5.00", "800", "4.00x", "4.00", "80%", "400", "10.0%", "2.0%"),
        "2 layers",
    ]
    assert text.count("![") == 1


def test_the_parts_of_a_layer_stand_beside_the_papers(tmp_path):
    text = written(tmp_path, "hata-ablation")
    assert lines(text, "score")[0] == ["score", "500", "50.0%", "53.2%"]
    assert lines(text, "encode")[0] == ["encode", "100", "40.0%", "7.6%"]
    assert lines(text, "all of them")[0][1:] == ["100", "10.00x", "6.53x"]
    assert text.count("![") == 1


def test_every_suite_has_its_section_and_another_run_writes_the_same(tmp_path):
    once = written(tmp_path / "a", *RESULTS)
    assert once == written(tmp_path / "b", *RESULTS)
    assert once.count("\n## ") == len(RESULTS) + 1  # and the table at its head


def test_the_heading_of_a_further_run_has_its_name(tmp_path):
    written(tmp_path, "sampling")
    (found,) = tmp_path.rglob("sampling.json")
    found.with_name("sampling.wide.json").write_text(found.read_text())
    report.write(found.parents[1], tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    title = "## Stochastic verification: NVIDIA Test"
    assert re.findall(r"## Stochastic.*", text) == [title, f"{title}, wide"]


def test_the_committed_results_give_the_committed_report(tmp_path, monkeypatch):
    """The text alone: every figure is drawn, and none of them rendered."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **settings: None)
    report.write(docs=tmp_path)
    assert (tmp_path / "RESULTS.md").read_text() == (report.DOCS / "RESULTS.md").read_text()


def test_regret_is_over_points_that_have_both():
    found = regret.of_fusion(list(fused_rows()))
    assert found is not None
    assert (found.points, found.worst) == (16, 1 / 1.6)
    assert regret.of_choice([], "pack") is None
