"""Hardware counters of kernels, by Nsight Compute (`ncu`).

Each backend of an operation runs once, its output checked, in a process under ncu. Before each one
a marker kernel runs, by which its kernels are told apart. ncu repeats a kernel from the same memory
until it has all counters, so that its times are not those of other suites.
"""

from __future__ import annotations

import contextlib
import csv
import ctypes
import ctypes.util
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from bench import attention, hata, pack, point, select, verify
from bench.cases import Case
from bench.program import Program, compile_all
from bench.settings import Settings
from bench.suite import OperationBenchmark, Result, Suite, of_operation
from jspec.dispatch import Operation

# By the field of a row. 32 active threads: no lane of a warp waits for another one.
METRICS = {
    "registers": "launch__registers_per_thread",
    "shared_bytes": "launch__shared_mem_per_block",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "ncu_ns": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_written_bytes": "dram__bytes_write.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "active_threads": "smsp__thread_inst_executed_per_inst_executed.ratio",
}
FIRST = '"ID"'  # how the header of ncu's table begins
RUNTIMES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12")
SUITES = (verify.SUITE, pack.SUITE, attention.SUITE, select.SUITE, hata.SUITE)
VERIFY = "B=32,alpha=0.9"
GPU = (
    *(f"op=verify_greedy,{VERIFY},gamma={gamma}" for gamma in (8, 128)),
    *(f"op=acceptance_scan,{VERIFY},gamma={gamma}" for gamma in (8, 128)),
    *("op=verify_and_commit", f"op=pack,{VERIFY}", f"op=verify_and_pack,{VERIFY}"),
    *("op=verify_stochastic", "op=verify_stochastic,draft=one-hot", "op=sample"),
    *("op=hash_encode", "op=rotate_append_encode", "op=hamming_scores", "op=hash_select"),
    *("op=attention", "op=attention,B=4,S=32K,T=10", "op=scored_attention,T=10"),
    *("op=gathered_attention", "op=dot_scores", "op=page_scores"),
)


def parsed(text: str) -> tuple[OperationBenchmark, Case]:
    """The benchmark of an operation and the case; raises `ValueError` if there is none."""
    return of_operation(text, (x for suite in SUITES for x in suite.benchmarks))


def run(settings: Settings) -> Result:
    """A row for each kernel of each backend."""
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    texts = settings.cases or (GPU[:2] if settings.quick else GPU)
    ncu = shutil.which("ncu")
    if jax.default_backend() != "gpu" or ncu is None:
        reason = "it needs an NVIDIA GPU and ncu, of Nsight Compute, on the PATH"
        yield point.row("counters", {}, "ncu", checked=None, reason=reason)
        return
    for text in texts:
        benchmark, case = parsed(text)
        with tempfile.TemporaryDirectory() as folder:
            table, names = Path(folder) / "table.csv", Path(folder) / "names"
            command = [ncu, "--csv", "--page", "raw", "--print-units", "base"]
            command += ["--log-file", str(table), "--clock-control", "none"]
            command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
            command += [sys.executable, "-m", "bench.counters", str(names), text, *settings.only]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode or not names.exists():
                lines = (done.stderr or done.stdout or table.read_text()).strip().splitlines()
                reason = f"ncu ended with {done.returncode}: {lines[-1] if lines else ''}"
                yield point.row(benchmark.name, case, "ncu", checked=False, reason=reason)
                continue
            yield from rows_of(
                benchmark.name, case, names.read_text().split("\n"), table.read_text()
            )


def rows_of(operation: str, case: Case, names: Sequence[str], text: str) -> Iterator[point.Row]:
    """The rows of ncu's table, the kernels of each program after its marker."""
    kernels = list(table_of(text))
    marker = kernels[0][0] if kernels else ""
    index = -1
    for kernel, values in kernels:
        if kernel == marker:
            index += 1
        elif index < len(names):
            yield point.row(operation, case, names[index], checked=True, kernel=kernel, **values)


def table_of(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """The name and the counters of each kernel of ncu's raw table in CSV, in order."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith(FIRST)), len(lines))
    reader = csv.DictReader(io.StringIO("\n".join(lines[begin:])))
    for line in list(reader)[1:]:  # the first line has the units
        values = {name: _number(line.get(metric)) for name, metric in METRICS.items()}
        known = {name: value for name, value in values.items() if value is not None}
        yield line["Kernel Name"].partition("(")[0], known


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:  # ncu writes "n/a" where a card has no such counter
        return None
    return int(value) if value == int(value) else value


def child(names: Path, text: str, only: tuple[str, ...]) -> None:
    """Run each backend once, after a marker; write the names of those that are right."""
    benchmark, case = parsed(text)
    operation: Operation = benchmark.operation
    setup = benchmark.setup(case)
    by_backend = setup.programs(operation, Settings(only=only))
    bound = (
        setup.bound(name, compiled)
        for name, compiled in compile_all(operation.name, by_backend).items()
    )
    programs = [x for x in bound if isinstance(x, Program) and x.check(x.start())]
    marker = jax.jit(lambda x: jnp.tan(jnp.cosh(x))).lower(jnp.ones(7)).compile()
    ones = jnp.ones(7)
    with profiled():
        jax.block_until_ready(marker(ones))  # its name is that of the first row
        for program in programs:
            jax.block_until_ready(marker(ones))
            jax.block_until_ready(program.start())
    names.write_text("\n".join(["", *(program.name for program in programs)]))


@contextlib.contextmanager
def profiled() -> Iterator[None]:
    """While ncu looks: what runs before and after is not counted."""
    name = next(filter(None, map(_loadable, (ctypes.util.find_library("cudart"), *RUNTIMES))), None)
    if name is None:
        raise RuntimeError(f"none of {', '.join(RUNTIMES)} can be loaded; add one to the PATH")
    runtime = ctypes.CDLL(name)
    runtime.cudaProfilerStart()
    try:
        yield
    finally:
        runtime.cudaProfilerStop()


def _loadable(name: str | None) -> str | None:
    if name is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None


SUITE = Suite(
    "counters",
    "hardware counters, registers and shared memory of kernels, by Nsight Compute",
    run,
    operations=tuple(
        benchmark.operation
        for suite in SUITES
        for benchmark in suite.benchmarks
        if isinstance(benchmark, OperationBenchmark)
    ),
    custom_clocks=True,
    case=parsed,
)

if __name__ == "__main__":
    child(Path(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
