"""Wrong kernels that the checks of `tests.ops.test_block_law` must tell from the right one.

Each mutant is the CPU handler with one piece of its source replaced, compiled and called in its
place.
"""

import ctypes
import dataclasses
import subprocess
from pathlib import Path

import jax
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.build import SRC
from jspec.cuda_ffi.toolchain import FLAGS, find
from tests.ops.test_mutants import CAUGHT, check_mutant
from tests.ops.toys import fresh_verify

HANDLER, SOURCE = "sample/stochastic_ffi.cc", "sample/stochastic_cpu.cc"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``old`` is replaced by ``new``, and the law of the toy ``toy`` must show it."""

    old: str
    new: str
    toy: str


MUTANTS = {
    "accept shares with draft": Mutant("first + at, kAccept", "first + at, kDraft", "gamma-1"),
    "residual shares with accept": Mutant(
        "first + at, kResidual);\n    return commit(stochastic, row, length, at, draw(rest",
        "first + at, kAccept);\n    return commit(stochastic, row, length, at, draw(rest",
        "gamma-2",
    ),
    "residual is the target": Mutant("draw(rest.total() ? rest : p,", "draw(p,", "gamma-2"),
    "stale q": Mutant(
        "sampling.draft, row, at)", "sampling.draft, row, at ? at - 1 : 0)", "gamma-3"
    ),
    "accepted by p alone": Mutant("one_hot ? kOne : q.probability(token)", "kOne", "gamma-1"),
    "empty rows without mass": Mutant(
        "weights[token] = kOne;", "if (scale.exponent) weights[token] = kOne;", "empty"
    ),
    "one-hot residual keeps the rejected": Mutant("rest.weights[draft[at]] = 0;", "", "one-hot"),
    "draft lengths forgotten": Mutant(
        "std::min(sampling.lengths[row], gamma)", "gamma", "bfloat16"
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the handler compiled, for every mutant to link."""
    if jax.default_backend() != "cpu":
        pytest.skip("the CPU's handler runs on CPUs")
    if reason := library.refusal("sample"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("mutants")
    _compile("-c", SRC / HANDLER, "-o", folder / "handler.o")
    return folder


def _compile(*arguments) -> None:
    flags = (*FLAGS["cpu"], "-O0", f"-I{SRC}", f"-I{jax.ffi.include_dir()}")
    subprocess.run([find("cpu").compiler, *flags, *arguments], check=True)


@pytest.fixture
def call_built_from(folder, monkeypatch):
    """Puts a handler compiled from the text given in the place of the library's; returns the list
    of its calls."""

    def instead(name: str, text: str) -> list[str]:
        stem = name.replace(" ", "_")
        source, built = folder / f"{stem}.cc", folder / f"{stem}.so"
        source.write_text(text)
        _compile(source, folder / "handler.o", "-o", built)
        capsule = jax.ffi.pycapsule(ctypes.CDLL(str(built)).jspec_verify_stochastic)
        jax.ffi.register_ffi_target(f"mutant_{stem}", capsule, platform="cpu")
        right, called = jax.ffi.ffi_call, []

        def call(target, *arguments, **keywords):
            if target == "jspec_verify_stochastic":
                target = f"mutant_{stem}"
                called.append(target)
            return right(target, *arguments, **keywords)

        monkeypatch.setattr(jax.ffi, "ffi_call", call)
        return called

    return instead


def check(name: str) -> None:
    """The chi-square check of one of the toys."""
    check_mutant(name, fresh_verify("cuda"))


@pytest.mark.exhaustive
def test_the_handler_as_it_is_passes(call_built_from):
    called = call_built_from("as it is", (SRC / SOURCE).read_text())
    check("gamma-2")
    assert called


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mutant"), MUTANTS.items(), ids=MUTANTS)
def test_a_mutant_is_caught(name, mutant, call_built_from):
    text = (SRC / SOURCE).read_text()
    assert text.count(mutant.old) == 1
    called = call_built_from(name, text.replace(mutant.old, mutant.new))
    with pytest.raises(AssertionError, match=CAUGHT):
        check(mutant.toy)
    assert called
