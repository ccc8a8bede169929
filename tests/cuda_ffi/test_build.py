"""Building the kernels: cache folder, lock, rename, and each way in which it can fail."""

import os
import shutil
import stat
import sys
import threading
from pathlib import Path

import pytest

from jspec.cuda_ffi import build as module
from jspec.cuda_ffi import toolchain
from jspec.cuda_ffi.__main__ import main
from jspec.cuda_ffi.build import SUBJECTS, Built, build, build_all, cache_folder
from jspec.cuda_ffi.errors import BuildError

# A compiler that writes its arguments into the library, and a line a run into $RUNS.
COMPILER = """#!{python}
import os, sys, time
if sys.argv[1:] == ["--version"]:
    sys.exit(print("toy 1.0"))
open(os.environ["RUNS"], "a").write("run\\n")
time.sleep(0.2)
open(sys.argv[sys.argv.index("-o") + 1], "w").write(" ".join(sys.argv))
"""


def script(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache folder of its own for every test, and compilers looked up again."""
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    toolchain.find.cache_clear()
    yield
    toolchain.find.cache_clear()


@pytest.fixture
def toy(tmp_path, monkeypatch) -> str:
    """A C++ compiler that is quick and always succeeds."""
    path = script(tmp_path / "toy++", COMPILER.format(python=sys.executable))
    monkeypatch.setenv("CXX", path)
    return path


def runs(tmp_path) -> int:
    return len((tmp_path / "runs").read_text().splitlines())


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A copy of the sources that a test may change."""
    copy = tmp_path / "src"
    shutil.copytree(module.SRC, copy)
    monkeypatch.setattr(module, "SRC", copy)
    return copy


def test_a_library_is_built_once_and_named_after_its_sources(tmp_path, toy, sources):
    first, second = build("verify", "cpu"), build("verify", "cpu")
    assert first.seconds is not None
    assert second.seconds is None
    assert first.path == second.path
    assert first.path.parent == tmp_path / "cache" / "cuda_ffi"
    with (sources / "verify" / "verify.h").open("a") as file:
        file.write("// changed")
    assert build("verify", "cpu").path != first.path
    assert runs(tmp_path) == 2


CHANGES = {
    "sample/sampling.h": {"sample"},
    "sample/stochastic_ffi.cc": {"sample"},
    "pack/pack_cpu.cc": {"pack"},
    "pack/kv_ffi.h": {"pack"},
    "verify/verify_ffi.cc": {"verify"},
    "verify/row.h": {"verify", "pack"},
    "select/keys.h": {"select", "hashed"},
    "common/host_device.h": {"verify", "pack", "select", "hashed", "exchange", "linear"},
    "exchange/bind.h": {"exchange", "linear"},
    "common/ffi.h": set(SUBJECTS),
    "common/launch.h": set(SUBJECTS),
    "common/version_ffi.cc": set(SUBJECTS),
    "verify/verify.cu": set(),
    "common/warp.cuh": set(),
}


def test_a_change_compiles_again_what_can_see_it_and_no_more(toy, sources):
    """Packing verifies, so it sees how; kernels for GPUs are no part of a library for CPUs."""
    assert all(built.seconds is not None for _, _, built in build_all(["cpu"]))
    for changed, again in CHANGES.items():
        with (sources / changed).open("a") as file:
            file.write("// changed")
        compiled = {name for _, name, built in build_all(["cpu"]) if built.seconds is not None}
        assert compiled == again, changed


def test_a_header_of_all_kernels_is_part_of_every_library_for_gpus(sources):
    before = {name: list(module._content(name, "CUDA")) for name in SUBJECTS}
    (sources / "common" / "warp.cuh").write_text("// changed")
    after = {name: list(module._content(name, "CUDA")) for name in SUBJECTS}
    assert all(before[name] != after[name] for name in SUBJECTS)


def test_libraries_are_compiled_at_the_same_time(toy):
    """A compiler that ends once all of them have begun."""
    waits = f"""begun = time.monotonic()
while len(open(os.environ["RUNS"]).readlines()) < {len(SUBJECTS)}:
    time.sleep(0.01)
    if time.monotonic() > begun + 20: sys.exit("the others never began")"""
    Path(toy).write_text(Path(toy).read_text().replace("time.sleep(0.2)", waits))
    assert all(isinstance(built, Built) for _, _, built in build_all(["cpu"]))


def test_jaxlib_the_compiler_and_the_exports_name_a_library(tmp_path, toy, monkeypatch):
    first = build("verify", "cpu").path
    Path(toy).write_text(Path(toy).read_text().replace("toy 1.0", "toy 2.0"))
    toolchain.find.cache_clear()
    second = build("verify", "cpu").path
    monkeypatch.setattr(module, "version", lambda name: "99.0")
    third = build("verify", "cpu").path
    monkeypatch.setattr(toolchain, "EXPORTS", tmp_path / "exports.map")
    (tmp_path / "exports.map").write_text("{ local: *; };")
    assert len({first, second, third, build("verify", "cpu").path}) == 4


def test_those_who_need_it_at_once_wait_for_one_build(tmp_path, toy):
    toolchain.find("cpu")
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(build("verify", "cpu"))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert runs(tmp_path) == 1
    assert sum(built.seconds is not None for built in results) == 1
    # Nothing half-written stays after.
    assert {f.suffix for f in results[0].path.parent.iterdir()} == {".so", ".lock"}


def no_compiler(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    toolchain.find.cache_clear()


def test_without_a_compiler_an_earlier_build_serves(toy, monkeypatch):
    path = build("verify", "cpu").path
    no_compiler(monkeypatch)
    assert build("verify", "cpu").path == path


@pytest.mark.parametrize("content", [b"", b"-std", b"a library of someone else"])
def test_a_damaged_or_foreign_library_is_built_again(content, tmp_path, toy, monkeypatch):
    """Mapping a file that was cut short would end the process."""
    path = build("verify", "cpu").path
    path.write_bytes(content)
    again = build("verify", "cpu")
    assert runs(tmp_path) == 2
    assert again.path.read_bytes() != content
    assert list(path.parent.glob("*.so")) == [again.path]
    assert build("verify", "cpu") == Built(again.path, None)
    again.path.write_bytes(again.path.read_bytes()[:-1])
    no_compiler(monkeypatch)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler found"):
        build("verify", "cpu")


def test_what_another_user_could_have_written_is_not_loaded(tmp_path, toy):
    path = build("verify", "cpu").path
    for place in (path, path.parent, path.parent.parent):
        mode = place.stat().st_mode
        for writable in (stat.S_IWGRP, stat.S_IWOTH):
            place.chmod(mode | writable)
            with pytest.raises(BuildError, match=rf"{place} \(owner .*; chmod go-w it if it is"):
                build("verify", "cpu")
            place.chmod(mode)
    # As in /tmp: nobody else can replace a folder there.
    path.parent.parent.chmod(0o1777)
    assert build("verify", "cpu").path == path


def test_a_library_of_another_user_is_not_loaded(toy, monkeypatch):
    path = build("verify", "cpu").path
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(BuildError, match=r"is not loaded; .* set JSPEC_CACHE to a folder of your"):
        build("verify", "cpu")


def test_what_is_built_under_a_shared_umask_is_loaded(toy):
    before = os.umask(0)
    try:
        module.cache_folder().mkdir(mode=0o755)
        path = build("verify", "cpu").path
    finally:
        os.umask(before)
    assert build("verify", "cpu") == Built(path, None)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("JSPEC_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(BuildError, match=r"there is no home folder .*; set JSPEC_CACHE"):
        build("verify", "cpu")


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0, "is no command that can be run; install g"),
        ("#!/bin/sh\n", 0o644, "is no command that can be run; install g"),
        ("\x00 no program", 0o755, "cannot run .*: .*Exec format error"),
        ("#!/no/such/shell\n", 0o755, "cannot run .*: .*No such file"),
        ("#!/bin/sh\necho broken >&2; exit 3\n", 0o755, "--version failed: broken"),
    ],
    ids=["missing", "no-permission", "no-program", "no-shell", "fails"],
)
def test_a_compiler_that_cannot_be_executed_is_a_reason(text, mode, message, tmp_path, monkeypatch):
    path = tmp_path / "c++"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(BuildError, match=message):
        build("verify", "cpu")


def test_a_compiler_may_come_with_arguments(toy, monkeypatch):
    monkeypatch.setenv("CXX", f"{toy} -m64")
    text = Path(toy).read_text().replace('["--version"]', '["-m64", "--version"]')
    Path(toy).write_text(text)
    assert b" -m64 -std=c++17 " in build("verify", "cpu").path.read_bytes()


@pytest.mark.parametrize(
    ("platform", "message"),
    [
        ("cpu", r"no C\+\+ compiler found; install g\+\+ or clang\+\+, or name one in CXX"),
        (
            "CUDA",
            r"no nvcc found; install a CUDA toolkit .* pip install .*(cuda-nvcc|cuda13)",
        ),
    ],
)
def test_a_missing_compiler_says_where_to_get_one(platform, message, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    with pytest.raises(BuildError, match=message):
        build("verify", platform)


def test_nvcc_comes_from_cuda_home_then_path_then_the_wheel(tmp_path, monkeypatch):
    nvcc = "#!/bin/sh\necho {}\n"
    for name in ("home/bin", "path", "wheel/cu13/bin"):
        (tmp_path / name).mkdir(parents=True)
        script(tmp_path / name / "nvcc", nvcc.format(name))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/bin")

    class Wheels:
        submodule_search_locations = (str(tmp_path / "wheel"),)

    monkeypatch.setattr(toolchain, "find_spec", lambda name: Wheels)
    for expected in ("home/bin", "path", "wheel/cu13/bin"):
        toolchain.find.cache_clear()
        assert toolchain.find("CUDA").version == expected
        (tmp_path / expected / "nvcc").unlink()


def test_a_failed_compile_shows_what_the_compiler_said(tmp_path, monkeypatch):
    text = '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.h:1: no such thing" >&2\nexit 1\n'
    monkeypatch.setenv("CXX", script(tmp_path / "bad++", text))
    with pytest.raises(
        BuildError, match=r"(?s)cpu kernels of verify failed \(.*\):\nx.h:1: no such thing"
    ):
        build("verify", "cpu")
    assert not list((tmp_path / "cache" / "cuda_ffi").glob("*.so"))


def test_a_folder_that_cannot_be_written_says_so(tmp_path, toy, monkeypatch):
    # A file where the folder should be refuses root as well.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(BuildError, match=r"cannot write the compiled kernels .* set JSPEC_CACHE"):
        build("verify", "cpu")


def test_the_cache_folder_follows_the_environment(monkeypatch):
    assert str(cache_folder()) == os.environ["JSPEC_CACHE"]
    monkeypatch.delenv("JSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/jspec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "jspec"


def test_the_command_builds_and_tells(toy, monkeypatch, capsys):
    """A numbered line a library, in the order of the subjects."""
    assert main(["build", "--cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    total = len(SUBJECTS)
    expected = [f"{number}/{total} cpu {name}" for number, name in enumerate(SUBJECTS, 1)]
    assert [line.split(":")[0] for line in lines] == expected
    assert all("built in" in line for line in lines)
    assert main(["build", "--cpu"]) == 0
    assert capsys.readouterr().out.count("was there") == len(SUBJECTS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    assert main(["build"]) == 1
    told = capsys.readouterr()
    assert f"1/{2 * total} cuda verify: no nvcc found" in told.err
    assert f"{1 + total}/{2 * total} cpu verify: was there" in told.out
