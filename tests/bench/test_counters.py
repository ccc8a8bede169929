"""The suite `counters`: ncu's table is read, and its kernels are told apart by the marker."""

import contextlib
import shutil

import jax
import pytest

from bench import counters
from bench.settings import Settings

CASE = "op=pack,B=2,gamma=8,alpha=0.6,D=16"
HEAD = ["ID", "Kernel Name", *counters.METRICS.values()]


def table(*kernels):
    """ncu's raw page in CSV after its messages: all counters of a kernel are its number."""
    lines = [HEAD, ["", "", *["unit"] * len(counters.METRICS)]]
    for index, (name, number) in enumerate(kernels):
        lines.append([str(index), name, *[number] * len(counters.METRICS)])
    rows = "\n".join(",".join(f'"{cell}"' for cell in line) for line in lines)
    return f"==PROF== Connected to process 7\n==PROF== Disconnected\n{rows}\n"


def test_the_kernels_of_a_program_are_those_after_its_marker():
    mark = ("loop_tan_fusion", "1")
    text = table(mark, mark, ("ballot(Scan)", "1,024"), mark, ("a", "7"), ("b", "0.5"))
    benchmark, case = counters.parsed(CASE)
    rows = list(counters.rows_of(benchmark.name, case, ["", "cuda", "xla"], text))
    assert [(row["name"], row["kernel"]) for row in rows] == [
        ("cuda", "ballot"),
        ("xla", "a"),
        ("xla", "b"),
    ]
    assert rows[0]["registers"] == 1024
    assert rows[2]["occupancy_percent"] == 0.5
    assert {row["operation"] for row in rows} == {"pack"}


def test_a_counter_that_a_card_lacks_is_left_out():
    ((_, values),) = counters.table_of(table(("a", "n/a")))
    assert values == {}
    assert list(counters.table_of("==ERROR== No kernels were profiled\n")) == []


def test_the_process_under_ncu_runs_each_backend_that_is_right(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(
        counters, "profiled", lambda: contextlib.nullcontext(ran.append("profiled"))
    )
    counters.child(tmp_path / "names", CASE, ("xla",))
    assert (tmp_path / "names").read_text().split("\n") == ["", "xla"]
    assert ran == ["profiled"]


def test_without_a_gpu_it_says_what_it_needs():
    if jax.default_backend() == "gpu" and shutil.which("ncu"):
        pytest.skip("there is a GPU and ncu")
    (row,) = counters.run(Settings())["rows"]
    assert row["checked"] is None
    assert "needs an NVIDIA GPU and ncu" in row["reason"]


def test_every_default_case_is_one():
    assert len({str(counters.parsed(text)) for text in counters.GPU}) == len(counters.GPU)
    with pytest.raises(ValueError, match="must begin with op= and one of verify_greedy, "):
        counters.parsed("B=3")
