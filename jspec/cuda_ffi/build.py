"""Building the kernels: one shared library a platform, in a cache folder, named after a hash."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from jspec.cuda_ffi import toolchain
from jspec.cuda_ffi.errors import BuildError

SRC = Path(__file__).parent / "src"


@dataclasses.dataclass(frozen=True)
class Built:
    """A library: its file, and the seconds that compiling took, None if it was there already."""

    path: Path
    seconds: float | None


def cache_folder() -> Path:
    """``$JSPEC_CACHE``, or jspec in the user's cache folder."""
    if named := os.environ.get("JSPEC_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec"


def build(platform: str) -> Built:
    """The library for ``platform``, "CUDA" or "cpu", compiled unless it is in the cache folder.

    Raises `BuildError` without a compiler, after a failed compile, and where the folder cannot be
    written. Without a compiler, a library that another one built from the same sources serves.
    """
    folder = cache_folder() / "cuda_ffi"
    sources = f"{platform.lower()}-{_hash(_sources(platform))}"
    try:
        tools = toolchain.find(platform)
    except BuildError:
        if ready := sorted(folder.glob(f"{sources}-*.so")):
            return Built(ready[-1], None)
        raise
    path = folder / f"{sources}-{_hash([tools.version.encode()])}.so"
    if path.exists():
        return Built(path, None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            # Another process may have built it while this one waited.
            return Built(path, None if path.exists() else _compile(tools, path))
    except OSError as error:
        raise BuildError(
            f"cannot write the compiled kernels to {folder}: {error}; set JSPEC_CACHE to a folder "
            "that can be written"
        ) from error


def _sources(platform: str) -> Iterator[bytes]:
    """All that decides what a library holds, but the compiler."""
    yield version("jaxlib").encode()
    yield " ".join(toolchain.FLAGS[platform]).encode()
    for path in sorted(SRC.iterdir()):
        if path.is_file():
            yield path.name.encode()
            yield path.read_bytes()


def _hash(parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the file lock ``path``, which the system frees also when a process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(tools: toolchain.Toolchain, path: Path) -> float:
    """Compile in a folder of its own and rename into place; returns the seconds it took."""
    started = time.monotonic()
    sources = sorted(f for pattern in toolchain.SOURCES[tools.platform] for f in SRC.glob(pattern))
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        output = Path(scratch, path.name)
        command = tools.command(sources, output)
        run = subprocess.run(command, capture_output=True, text=True, cwd=scratch)
        if run.returncode:
            raise BuildError(
                f"compiling the {tools.platform} kernels failed ({' '.join(command)}):\n"
                f"{(run.stderr or run.stdout).strip()}"
            )
        output.replace(path)
    return time.monotonic() - started
