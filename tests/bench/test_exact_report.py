"""The tables of docs/exact.md: a column for each way, by model and batch."""

from bench.report import exact
from bench.report.runs import Run


def run(device, *rows):
    return Run(device, "quality", "", {"machine": {"device": device}, "rows": list(rows)})


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
    assert exact.tables([run("cpu", *rows)]) == {"bits": "", "flips": ""}
