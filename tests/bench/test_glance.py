"""Rows of tables from known results, and the tables at the head of RESULTS.md."""

import re

import pytest

from bench import report
from bench.report import operations, steps, systems
from bench.report.questions import QUESTIONS
from bench.report.runs import Run
from jspec import tuned
from jspec.tuned import Rule, Table


def run(rows, suite="suite", name="", device="NVIDIA A", **rest):
    return Run(device, suite, name, {"machine": {"device": device}, "rows": rows} | rest)


def timed(operation, case, name, microseconds, **rest):
    row = {"operation": operation, "case": case, "name": name, "checked": True, "bytes": None}
    return row | {"backend": True, "device_ns": [1000 * microseconds] * 3} | rest


def test_an_old_run_is_read_by_todays_order(monkeypatch):
    """The run chose pallas; today's order has a backend that did not run first, then triton.
    Without sizes the choice of the run stands."""
    take = ["cuda", "triton", "pallas"]
    table = Table("a", "NVIDIA A", (9, 0), True, {"attention": [Rule({}, take)]}, {})
    monkeypatch.setattr(tuned, "tables", lambda: {"a": table})
    cases = operations.Cases("attention", [])
    for sizes, chosen in (({"sizes": {"batch": 1}}, "triton"), ({}, "pallas")):
        rows = [
            timed("attention", {"B": 1}, name, time, chosen=name == "pallas", **sizes)
            for name, time in (("triton", 1), ("pallas", 2))
        ]
        ((_, of_case),) = cases.points(run(rows))
        assert [row["name"] for row in of_case if row["chosen"]] == [chosen]


def test_an_operation_is_a_headline_where_none_takes_a_backend():
    case = {"B": 4, "S": 131072, "T": 1, "heads": "32/8", "H": 128, "lengths": "full"}
    case |= {"cache": "bfloat16", "l2": "cold"}
    rows = [
        timed("attention", case, "pallas", 80, bytes=2**29),
        timed("attention", case, "triton", 100, bytes=2**29, chosen=True),
        timed("attention", case, "fa3", 150, bytes=2**29),
        timed("attention", case, "cudnn", 90, bytes=2**29),
        timed("attention", case | {"B": 8}, "triton", 1, bytes=2**29, chosen=True),
    ]
    # 2**29 bytes in 100 us, where 2**30 take 160: 0.8 of the ceiling.
    at = {"work": "read", "bytes": 2**30, "l2": "warm"}
    ceilings = [timed("ceilings", at, "xla", 160.0, bytes=2**30)]
    (question,) = (x for x in QUESTIONS if x.lines is operations.attention_lines)
    (line,) = question.headlines([run(rows, "attention", ceilings=ceilings)])
    compared = "80% of read ceiling; 0.90x, slower (cudnn 90.0)"
    assert line == ("attention, B=4, S=128K, T=1, heads=32/8, H=128", "100 us", compared)
    assert not list(question.headlines([run(rows[:1], "attention", ceilings=ceilings)]))


def test_an_imposed_rate_is_over_plain_decoding_of_the_same_shape():
    def row(name, batch, rate, **rest):
        case = {"model": "m", "layers": 2, "B": batch, "S": 8192, "gamma": 9}
        row = {"operation": "draft", "case": case, "name": name, "checked": "2 layers"}
        row |= {"step_ns": [1000] * 3, "over_floor": 2.0, "tokens": 5.0}
        return row | {"tokens_per_s": rate} | rest

    rows = [
        row("plain", 1, 10.0),
        row("plain", 4, 40.0),
        row("vegas", 4, 100.0),
        row("vegas", 4, 300.0),  # the first of a case stands
        row("quest", 4, 400.0, checked=False),
        row("vegas", 8, 100.0),
    ]
    over_plain, alone = (line.cells for line in steps.imposed([run(rows)]))
    assert (over_plain["B"], over_plain["tok/s"], over_plain["vs plain"]) == ("4", "100", "2.50x")
    assert (alone["B"], alone["vs plain"]) == ("8", "")
    short = [row(name, 4, rate) for name, rate in (("plain", 30.0), ("vegas", 90.0))]
    for x in short:
        x["case"] = x["case"] | {"gamma": 5}
    again, _ = (line.cells for line in steps.imposed([run(short), run(rows), run(rows[3:4])]))
    assert (again["gamma"], again["tok/s"], again["vs plain"]) == ("9", "100", "2.50x")
    short[1]["tokens_per_s"] = 120.0
    faster, _ = (line.cells for line in steps.imposed([run(rows), run(short)]))
    assert (faster["gamma"], faster["tok/s"], faster["vs plain"]) == ("5", "120", "4.00x")


def test_attention_of_two_devices_is_over_one_of_the_same_shape():
    def row(kvp, microseconds, operation="attend", **case):
        fields = {"B": 1, "S": 2**20, "heads": "8/1", "H": 64, "T": 1, "latent": 0, "tpa": 1}
        fields |= {"kvp": kvp, "strategy": "helix", "up": "auto", "kernel": "default"} | case
        return {"operation": operation, "case": fields, "step_ns": [1000 * microseconds] * 3}

    rows = [row(1, 100), row(2, 60), row(2, 50, operation="read_alone"), row(2, 70, S=2048)]
    rows.insert(0, row(2, 9, kernel="xla"))
    long, short = systems.shared_attention([run(rows)])
    assert (long.cells["one device"], long.cells["Helix"]) == ("100 us", "60.0 us, 1.67x")
    assert (short.cells["Helix"], long.headline, short.headline) == ("70.0 us", True, False)


def test_a_step_by_helix_is_over_tensor_parallelism():
    def row(kvp, tpa, milliseconds, **case):
        fields = {"shape": "m", "B": 1, "S": 2**20, "draft": "vegas", "gamma": 5}
        fields |= {"kvp": kvp, "tpa": tpa, "strategy": "helix", "overlap": 1, "exchange": "xla"}
        case = fields | {"backends": "default"} | case
        return {"operation": "step", "case": case, "step_ns": [1_000_000 * milliseconds] * 3}

    rows = [row(2, 1, 59), row(1, 2, 47), row(2, 1, 9, overlap=2), row(2, 1, 9, draft="verify")]
    rows.insert(0, row(2, 1, 9, exact="tokens"))
    # The fastest of each mesh.
    rows = [row(2, 1, 60, backends="cuda"), *rows, row(1, 2, 48, exchange="cuda")]
    (line,) = systems.shared_steps([run(rows)])
    assert line.cells["Helix"] == "59.00 ms, 0.80x, slower"
    assert (line.cells["shape"], line.cells["by heads"]) == ("m, vegas", "47.00 ms")


def test_a_shape_has_the_fastest_mesh_of_each_strategy():
    def row(kvp, tpa, milliseconds, strategy="helix", **case):
        fields = {"shape": "m", "layers": 0, "B": 1, "S": 2**20, "draft": "plain", "ep": 1}
        case = fields | {"kvp": kvp, "tpa": tpa, "strategy": strategy} | case
        return {"operation": "step", "case": case, "step_ns": [1_000_000 * milliseconds] * 3}

    rows = [row(4, 1, 6, ep=4), row(2, 2, 8), row(4, 1, 12, "tp"), row(4, 1, 9, "medha")]
    rows += [row(1, 2, 5, layers=3), row(2, 1, 10, layers=3)]
    four, two = systems.steps_of_shapes([run(rows)])
    assert four.cells["Helix"] == "6.00 ms, KVP=4, TPA=1, EP=4, 2.00x"
    assert four.cells["tensor parallel"] == "12.00 ms, KVP=4, TPA=1"
    assert four.cells["Medha"] == "9.00 ms, KVP=4, TPA=1, 1.33x"
    assert (two.cells["shape"], two.cells["GPUs"]) == ("m, 3 layers", "2")
    assert two.cells["Helix"] == "10.00 ms, KVP=2, TPA=1, 0.50x, slower"
    assert two.cells["tensor parallel"] == "5.00 ms, KVP=1, TPA=2"


def test_an_engine_is_shown_where_all_requests_are_there_at_once():
    def row(name, rate, load="full", **rest):
        case = {"model": "m", "mix": "short", "B": 2, "load": load}
        served = {"token_s": [0.001] * 3, "first_token_s": [0.01] * 3}
        figures = {"tokens_per_s": rate, "length": 5.0, "served": served, "checked": True}
        return {"operation": "serving", "case": case, "name": name} | figures | rest

    rows = [row("none", 10.0, vs_plain=1.0), row("ngram", 40.0, vs_plain=4.0, of_steps=0.9)]
    (line,) = systems.served([run([*rows, row("ngram", 9.0, load="50%", vs_plain=1.1)])])
    cells = line.cells
    assert (cells["tok/s"], cells["vs no drafts"], cells["of steps"]) == ("40", "4.00x", "0.90")
    assert (cells["ms/token"], cells["first token, ms"]) == ("1.0 / 1.0", "10.0 / 10.0")


def of_exact(device, flips=0):
    case = {"model": "m", "exact": "bits"}
    row = {"operation": "draft", "case": case, "name": "vegas", "flips": flips, "compared": 9}
    return run([row], "parity", device=device)


def test_a_gpu_has_a_table_and_a_cpu_a_line():
    runs = [of_exact("NVIDIA A"), of_exact("NVIDIA A", flips=3), of_exact("B"), of_exact("cpu")]
    first, second, cpu = report._glances(runs)
    assert first.startswith("## At a glance: NVIDIA A\n")
    (line,) = first.splitlines()[4:]
    assert line.startswith("| [Exactness](#exactness) | m, exact=bits, 2 settings")
    assert "| 3 flips | in 18 greedy tokens" in line
    assert second.startswith("## At a glance: B\n")
    assert cpu.startswith("## At a glance: CPU\n\nm, exact=bits, 1 settings")


@pytest.mark.parametrize("collapse", [True, False], ids=["python-markdown", "github"])
def test_every_link_of_the_committed_tables_leads_to_a_heading(collapse):
    """By the rules of both: word characters, spaces and hyphens are kept."""
    text = (report.DOCS / "RESULTS.md").read_text()
    headings = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        anchor = re.sub(r"[^\w\s-]", "", heading).strip().lower()
        headings.add(re.sub(r"[-\s]+" if collapse else r"\s", "-", anchor))
    links = re.findall(r"\]\(#(.*?)\)", text)
    assert links
    assert set(links) <= headings
