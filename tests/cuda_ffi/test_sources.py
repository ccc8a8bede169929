"""The CUDA sources compile, and each belongs to a library."""

import re
import subprocess

import pytest

from jspec.cuda_ffi import build, library, toolchain
from jspec.cuda_ffi.build import Built
from jspec.cuda_ffi.errors import BuildError


@pytest.mark.slow
def test_the_cuda_sources_compile(tmp_path, monkeypatch):
    """For sm_80 and sm_90, with every target among the symbols of its library.

    What compiles for sm_80 does for sm_89: no source tells them apart. Without optimisations where
    nvcc can do without, which takes a fourth of the time; users' libraries have them.
    """
    try:
        nvcc = toolchain.find("CUDA").compiler
    except BuildError as error:
        pytest.skip(str(error))
    ampere, ada, hopper = (toolchain.GPUS[i : i + 2] for i in (0, 2, 4))
    for flags, arch in ((ampere, "sm_80"), (ada, "sm_89"), (hopper, "sm_90")):
        assert arch in flags[1]
    for file in build.SRC.rglob("*.*"):
        told_apart = re.findall("__CUDA_ARCH__( [<=>!]+ .*)", file.read_text())
        assert set(told_apart) <= {" >= 900"}, file
    quick = "--Ofast-compile"
    known = quick in subprocess.check_output([nvcc, "--help"], text=True)
    all_flags = (*toolchain.FLAGS["CUDA"], *[f"{quick}=max"] * known)
    monkeypatch.setitem(toolchain.FLAGS, "CUDA", all_flags)
    monkeypatch.setattr(toolchain, "GPUS", (*ampere, *hopper))
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    for _, subject, built in build.build_all(["CUDA"]):
        assert isinstance(built, Built), built
        symbols = built.path.read_bytes()
        for target in library.TARGETS[subject]:
            assert f"jspec_{target}".encode() in symbols


def test_every_source_belongs_to_a_library():
    """A file of src/ is a header, or is compiled for a platform; every folder is a subject's."""
    compiled = {
        file
        for platform in library.PLATFORMS.values()
        for subject in build.SUBJECTS
        for file in build.sources(subject, platform)
    }
    files = {file for file in build.SRC.rglob("*") if file.is_file()}
    assert {file for file in files if file.suffix not in (".h", ".cuh")} == compiled
    assert list(library.TARGETS) == list(build.SUBJECTS)
