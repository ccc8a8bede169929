"""The tables at the head of RESULTS.md: what they show, against what, and where links lead."""

import re
from typing import Any

import pytest

from bench.report import DOCS, glance
from bench.report.runs import Run


def timed(operation, case, name, microseconds, **rest):
    row = {"operation": operation, "case": case, "name": name, "checked": True, "bytes": None}
    return row | {"device_ns": [1000 * microseconds] * 3} | rest


def reading(seconds):
    case = {"work": "read", "bytes": 2**30, "l2": "warm"}
    return timed("ceilings", case, "xla", seconds * 1e6, bytes=2**30, backend=True)


def test_a_point_is_what_none_takes_beside_the_ceiling_and_the_fastest_rival():
    case = {"B": 4, "S": 131072, "T": 1, "heads": "32/8", "H": 128, "lengths": "full", "l2": "cold"}
    rows = [
        timed("attention", case, "pallas", 80, bytes=2**29),
        timed("attention", case, "triton", 100, bytes=2**29, chosen=True),
        timed("attention", case, "fa3", 150, bytes=2**29),
        timed("attention", case, "cudnn", 90, bytes=2**29),
        timed("attention", case | {"B": 8}, "triton", 1, bytes=2**29, chosen=True),
    ]
    # 2**29 bytes in 100 us, where 2**30 take 160: 0.8 of the ceiling.
    result = {"suite": "attention", "rows": rows, "ceilings": [reading(160e-6)]}
    (line,) = glance.lines_of("attention", result)
    compared = "80% of the read ceiling; 0.90x as fast as cuDNN, slower, 90.0 us"
    assert line == ("attention, B=4, S=128K, T=1, heads=32/8", "100 us", compared)
    assert not list(glance.lines_of("attention", result | {"rows": rows[:1]}))


def test_tokens_by_an_imposed_acceptance_stand_beside_plain_decoding_of_the_same_shape():
    def row(name, batch, rate, **rest):
        case = {"model": "m", "layers": 2, "B": batch, "S": 8192, "gamma": 9}
        row = {"operation": "draft", "case": case, "name": name, "checked": "2 layers"}
        row |= {"step_ns": [1000] * 3, "floors_ns": {"verification": 500.0}}
        return row | {"tokens_per_s": rate, "acceptance": "imposed"} | rest

    rows = [
        row("plain", 1, 10.0),
        row("plain", 4, 40.0),
        row("vegas", 4, 300.0, acceptance="measured"),
        row("vegas", 4, 100.0),
        row("quest", 4, 400.0, checked=False),
        row("vegas", 8, 100.0),
    ]
    (line,) = glance.lines_of(
        "decode", {"rows": rows, "suite": "decode", "machine": {"device": "x"}}
    )
    assert line[:2] == ("m, B=4, 8K tokens, vegas", "100 tokens/s")
    assert line[2] == "2.50x plain decoding; imposed acceptance (the paper's)"


def test_two_devices_stand_beside_one_of_the_same_shape():
    def row(kvp, microseconds, **case):
        fields = {"B": 1, "S": 2**20, "heads": "8/1", "H": 64, "T": 1, "latent": 0, "tpa": 1}
        fields |= {"kvp": kvp, "strategy": "helix", "part": "layer"} | case
        return {"operation": "attend", "case": fields, "step_ns": [1000 * microseconds] * 3}

    rows = [row(1, 100), row(2, 60), row(2, 50, part="read"), row(2, 70, S=2048)]
    (line,) = glance.lines_of("helix-attention", {"rows": rows})
    assert line[1:] == ("60.0 us", "0.60 of the time of one device, the exchange included")


def test_a_step_by_helix_stands_beside_tensor_parallelism():
    def row(kvp, tpa, milliseconds, **case):
        fields = {"shape": "m", "B": 1, "S": 2**20, "draft": "vegas", "gamma": 5}
        fields |= {"kvp": kvp, "tpa": tpa, "strategy": "helix", "overlap": 1} | case
        return {"operation": "step", "case": fields, "step_ns": [1_000_000 * milliseconds] * 3}

    rows = [row(2, 1, 59), row(1, 2, 47), row(2, 1, 70, strategy="medha"), row(2, 1, 9, S=1024)]
    (line,) = glance.lines_of("helix-step", {"rows": rows})
    assert line[0] == "m, B=1, 1024K tokens, vegas, gamma=5, KVP=2"
    assert line[1] == "59.00 ms a step"
    assert line[2] == "0.80x as fast as tensor parallelism, slower, 47.00 ms"


def test_an_engine_stands_beside_itself_without_drafts():
    def row(name, rate, load="full", **rest):
        case = {"model": "m", "mix": "short", "B": 2, "load": load}
        return {"case": case, "name": name, "tokens_per_s": rate, "checked": True} | rest

    busy: dict[str, Any] = {"full_tokens_per_s": 90.0, "mean_accepted_length": 5.0, "step_s": 0.1}
    rows = [row("none", 10.0), row("ngram", 40.0, **busy), row("ngram", 9.0, load="50%")]
    (drafted,) = glance.lines_of("serving", {"rows": rows})
    assert drafted[1] == "40 tokens/s"
    assert drafted[2] == "4.00x as fast as without drafts; 0.90 of the rate of the steps alone"


def run(device, name="", flips=0):
    row = {"mode": "exact", "flips": flips, "compared": 9}
    return Run(device, "parity", name, {"machine": {"device": device}, "rows": [row]})


def test_a_gpu_has_a_table_of_the_first_runs_and_a_cpu_a_line():
    runs = [run("NVIDIA A"), run("NVIDIA A", "other", flips=3), run("NVIDIA B"), run("cpu")]
    first, second, cpu = glance.tables_of(runs, {"verify": "V", "parity": "Exactness"})
    assert first.startswith("## At a glance: NVIDIA A\n")
    (line,) = first.splitlines()[4:]
    assert line.startswith("| [Exactness](#exactness) | exact=True, 1 settings")
    assert "| 0 flips |" in line
    assert second.startswith("## At a glance: NVIDIA B\n")
    assert cpu.startswith("## At a glance: CPU\n\nexact=True, 1 settings")


@pytest.mark.parametrize("collapse", [True, False], ids=["python-markdown", "github"])
def test_every_link_of_the_committed_tables_leads_to_a_heading(collapse):
    """By the rules of both: word characters, spaces and hyphens are kept."""
    text = (DOCS / "RESULTS.md").read_text()
    headings = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        headings.add(re.sub(r"[-\s]+" if collapse else r"\s", "-", anchor))
    links = re.findall(r"\]\(#(.*?)\)", text)
    assert links
    assert set(links) <= headings
