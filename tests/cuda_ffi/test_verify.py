"""Greedy verification in CUDA: the kernels on a GPU or emulated, their counterparts on a CPU."""

import jax
import numpy as np
import pytest

from jspec import tuned
from jspec.cuda_ffi import library
from jspec.ops.acceptance_scan import ACCEPTANCE_SCAN
from jspec.ops.commit import VERIFY_AND_COMMIT
from jspec.ops.tree import VERIFY_TREE
from jspec.ops.verify import VERIFY_GREEDY
from tests.cuda_ffi.emulated import emulated
from tests.ops.backends import every_case


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU runs the kernel itself")
    return emulated("verify", tmp_path_factory.mktemp("emulated") / "verify.so")


@pytest.fixture(params=["library", pytest.param("emulated", marks=pytest.mark.slow)])
def kernel(request, monkeypatch):
    """What the backends call: their library, or the CUDA source on a CPU."""
    if request.param == "emulated":
        monkeypatch.setattr(library, "call", request.getfixturevalue("emulator"))


def assert_equal(operation, backend: str, case) -> None:
    """What a backend gives is the reference's, bit for bit."""
    arguments, run = case.arguments, operation.backend(backend)
    if reason := run.supports(*arguments):
        pytest.skip(reason)
    want = jax.jit(operation.backend("xla").run)(*arguments)
    got = jax.jit(lambda *x: run.run(*x))(*arguments)  # traced for what is called now
    jax.tree.map(np.testing.assert_array_equal, tuple(got), tuple(want))


@every_case(VERIFY_GREEDY)
def test_verification_equals_the_reference(case, kernel):
    assert_equal(VERIFY_GREEDY, "cuda", case)


@every_case(VERIFY_TREE)
def test_trees_equal_the_reference(case, kernel):
    with jax.enable_x64(case.build()[0].dtype == np.int64):
        assert_equal(VERIFY_TREE, "cuda", case)


@every_case(ACCEPTANCE_SCAN)
@pytest.mark.parametrize("backend", ["cuda", "cuda_naive"])
def test_scans_equal_the_reference(case, backend, kernel):
    assert_equal(ACCEPTANCE_SCAN, backend, case)


class Blocks:
    """Logits of a row read as a whole, or in parts that do not divide the vocabulary."""

    def __init__(self, whole: int):
        self.whole = whole

    def block(self, *_):
        return {"whole": self.whole, "part": 24, "warps": 2}


@every_case(VERIFY_AND_COMMIT, lambda case: case.name not in ("many-rows", "over-a-warp"))
@pytest.mark.parametrize("whole", [2**30, 0], ids=["whole", "parts"])
def test_commits_equal_the_reference(case, whole, kernel):
    with tuned.use_blocks(Blocks(whole)):
        assert_equal(VERIFY_AND_COMMIT, "cuda", case)
