"""Wrong kernels that the checks of `tests.ops.test_verify` must tell from the right one.

Each mutant is the CPU handler with one piece of its source replaced, compiled and called in its
place.
"""

import ctypes
import dataclasses
import subprocess
from functools import partial
from pathlib import Path

import jax
import pytest

from jspec.cuda_ffi import library
from jspec.cuda_ffi.build import SRC
from jspec.cuda_ffi.toolchain import FLAGS, find
from tests.ops.laws import check_block_law, fresh_verify
from tests.ops.test_mutants import CAUGHT
from tests.ops.test_verify import LAWS

HANDLER, SOURCE = "stochastic_ffi.cc", "stochastic_cpu.cc"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """``old`` is replaced by ``new``, and the law of the toy ``toy`` must show it."""

    old: str
    new: str
    toy: str


MUTANTS = {
    "none": Mutant("", "", "gamma-2"),
    "accept shares with draft": Mutant("first + at, kAccept", "first + at, kDraft", "gamma-1"),
    "residual shares with accept": Mutant(
        "first + at, kResidual", "first + at, kAccept", "gamma-2"
    ),
    "residual is the target": Mutant("draw(total(rest) ? rest : p,", "draw(p,", "gamma-2"),
    "stale q": Mutant(
        "sampling.draft, row, at)", "sampling.draft, row, at ? at - 1 : 0)", "gamma-3"
    ),
    "accepted by p alone": Mutant("one_hot ? kOne : q.probability(token)", "kOne", "gamma-1"),
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
    if reason := library.refusal():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("mutants")
    _compile("-c", SRC / HANDLER, "-o", folder / "handler.o")
    return folder


def _compile(*arguments) -> None:
    flags = (*FLAGS["cpu"], f"-I{SRC}", f"-I{jax.ffi.include_dir()}")
    subprocess.run([find("cpu").compiler, *flags, *arguments], check=True)


@pytest.mark.parametrize(("name", "mutant"), MUTANTS.items(), ids=MUTANTS)
def test_a_mutant_is_caught(name, mutant, folder, monkeypatch):
    text = (SRC / SOURCE).read_text()
    assert not mutant.old or text.count(mutant.old) == 1
    stem = name.replace(" ", "_")
    source, built = folder / f"{stem}.cc", folder / f"{stem}.so"
    source.write_text(text.replace(mutant.old, mutant.new) if mutant.old else text)
    _compile(source, folder / "handler.o", "-o", built)
    capsule = jax.ffi.pycapsule(ctypes.CDLL(str(built)).jspec_verify_stochastic)
    jax.ffi.register_ffi_target(f"mutant_{stem}", capsule, platform="cpu")

    call, called = jax.ffi.ffi_call, []

    def instead(target, *arguments, **keywords):
        if target == "jspec_verify_stochastic":
            target = f"mutant_{stem}"
            called.append(target)
        return call(target, *arguments, **keywords)

    monkeypatch.setattr(jax.ffi, "ffi_call", instead)
    toy, groups = next((t, g) for t, g in LAWS if t.name == mutant.toy)
    check = partial(check_block_law, toy, groups, verify=fresh_verify("cuda"))
    if mutant.old:
        with pytest.raises(AssertionError, match=CAUGHT):
            check()
    else:
        check()
    assert called
