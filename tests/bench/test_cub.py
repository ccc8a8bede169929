"""CUB's top-k as a rival: why it is absent, what is asked of its slots, and that it compiles."""

import re
import subprocess

import jax
import numpy as np
import pytest

from bench.program import Absent, Program
from bench.rivals import common, cub, select
from bench.settings import Settings
from jspec.cuda_ffi import toolchain
from jspec.cuda_ffi.errors import BuildError

HOPPER = ("NVIDIA H200", (9, 0))


def make(scores, k):
    """CUB's rivals by name."""
    slots = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :k], axis=1)
    makers = select.select(scores, slots.astype(np.int32))
    result = common.each(makers, Settings(only=cub.NAMES))
    assert [rival.name for rival in result] == list(cub.NAMES)
    return {rival.name: rival for rival in result}


@pytest.fixture
def gpu(monkeypatch):
    """A function that says which GPU there is."""

    def use(processes):
        for module in ("bench.rivals.cub", "jspec.gpu"):
            monkeypatch.setattr(f"{module}.gpu_in_use", lambda: processes)

    use(HOPPER)
    return use


@pytest.fixture
def headers(tmp_path, monkeypatch):
    """A function that installs the package `cuda-cccl` with headers of a version."""

    def install(number):
        folder = tmp_path / "cuda" / "cccl" / "headers" / "include" / "cub"
        folder.mkdir(parents=True)
        folder.joinpath("version.cuh").write_text(f"// 1\n#define CUB_VERSION {number} // 2\n")
        package = type("Spec", (), {"submodule_search_locations": [str(folder.parents[2])]})
        monkeypatch.setattr(cub, "find_spec", lambda name: package)

    monkeypatch.setattr(cub, "find_spec", lambda name: None)
    return install


def test_a_rival_that_cannot_be_compiled_says_why(gpu, headers, monkeypatch):
    monkeypatch.setattr(toolchain, "find", lambda platform: None)
    scores = np.zeros((1, 8), np.float32)

    def reason():
        result = make(scores, 2).values()
        assert all(isinstance(rival, Absent) and not rival.failed for rival in result)
        (said,) = {rival.reason for rival in result}
        return said

    assert reason() == "cuda-cccl is not installed"
    headers(300_500)
    assert reason() == "its top-k needs CCCL 3.6 or newer, not 3.5"
    gpu(("NVIDIA A100", (8, 0)))
    assert reason().endswith("needs compute capability 9.0 and NVIDIA A100 has 8.0")
    gpu(HOPPER)

    def missing(platform):
        raise BuildError("no nvcc found")

    monkeypatch.setattr(toolchain, "find", missing)
    assert reason() == "no nvcc found"


def test_a_failed_compile_is_a_failure(gpu, headers, monkeypatch):
    headers(300_600)
    tool = toolchain.Toolchain("CUDA", toolchain.Path("nvcc"), "13.0")
    monkeypatch.setattr(toolchain, "find", lambda platform: tool)
    commands = []

    def run(command):
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "cub.cu(1): error")

    monkeypatch.setattr(toolchain, "run", run)
    result = make(np.zeros((1, 8), np.float32), 2)
    assert {rival.reason for rival in result.values()} == {"failed: BuildError: cub.cu(1): error"}
    assert all(rival.failed for rival in result.values())
    for command, define in zip(sorted(commands), ("BATCHED", "STABLE"), strict=True):
        assert command[0] == "nvcc"
        assert {"-arch=sm_90", "-DCUB_N=8", "-DCUB_K=2", f"-DCUB_{define}=1"} <= set(command)
        # The newer headers go before those that nvcc finds by itself.
        assert next(part for part in command if part.startswith("-I")).endswith("headers/include")


def first(scores, k):
    """The first of equal scores, in no order of slots."""
    return jax.lax.top_k(scores, k)[1]


def last(scores, k):
    return scores.shape[1] - 1 - first(scores[:, ::-1], k)


def twice(scores, k):
    """One slot a second time, in place of another of the same score."""
    return first(scores, k).at[:, 1].set(first(scores, k)[:, 0])


def worse(scores, k):
    """The slot after the k best in place of the last of them."""
    return first(scores, k + 1)[:, [*range(k - 1), k]]


@pytest.mark.parametrize(
    ("slots", "k", "right"),
    [(first, 4, cub.NAMES), (last, 4, ("cub",)), (twice, 4, ()), (worse, 5, ())],
    ids=["first", "last", "twice", "worse"],
)
def test_slots_have_the_best_scores_and_one_call_promises_which(slots, k, right, monkeypatch):
    scores = np.array([[3, 5, 5, 1, 4, 4, 4, 0], [7, 7, 2, 6, 6, 1, 6, 3]], np.int32)
    monkeypatch.setattr(cub, "refusal", lambda: None)
    monkeypatch.setattr(cub, "call", lambda name, dtype, rows, n, k: lambda x: slots(x, k))
    for name, rival in make(scores, k).items():
        assert isinstance(rival, Program)
        assert rival.check(rival.wait(rival.start())) == (name in right)


@pytest.mark.slow
def test_cub_compiles(tmp_path):
    try:
        toolchain.find("CUDA")
    except BuildError as error:
        pytest.skip(str(error))
    include = cub.headers()
    if include is None or cub.version(include) < cub.OLDEST:
        pytest.skip("cuda-cccl is not installed, or older")
    for name in cub.NAMES:
        path = tmp_path / f"{name}.so"
        run = toolchain.run(cub.command(name, "float32", 2**15, 512, HOPPER[1], include, path))
        assert run.returncode == 0, run.stderr
        kernels = re.findall(rb"device_batched_topk_kernel|DeviceTopK\w*Kernel", path.read_bytes())
        assert kernels, name
