"""Building the kernels: a shared library for each subject and platform.

A subject is a folder of ``src/``. Its library consists of the files of that folder for a platform
and of ``src/common``. Its name has hashes of the sources with all headers that they include, of the
compiler, and of the compiled file, so a change rebuilds only the libraries that it affects.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from jspec.cuda_ffi import toolchain
from jspec.cuda_ffi.errors import BuildError

SRC = Path(__file__).parent / "src"
# Subjects, and the subjects whose kernels each calls: these are compiled into its library too.
SUBJECTS: dict[str, tuple[str, ...]] = {
    "verify": (),
    "pack": ("verify",),
    "sample": (),
    "linear": ("exchange",),
    "grouped": (),
    "select": (),
    "hashed": (),
    "codes": (),
    "attention": (),
    "gathered": (),
    "host": (),
    "exchange": (),
}
DURATION = {"cpu": "about 10 s", "CUDA": "a minute or two"}
_LOG = logging.getLogger("jspec")  # without a handler of the caller's, it writes to stderr
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Built:
    """A library: its path, and the seconds that compiling took, None if it was already built."""

    path: Path
    seconds: float | None


def cache_folder() -> Path:
    """``$JSPEC_CACHE``, or jspec in the user's cache folder; `BuildError` without a home folder."""
    if named := os.environ.get("JSPEC_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jspec"
    except RuntimeError as error:  # neither HOME nor an entry in the list of users
        raise BuildError(
            f"there is no home folder to keep compiled kernels in ({error}); set JSPEC_CACHE"
        ) from None


def build_all(platforms: Sequence[str]) -> Iterator[tuple[str, str, Built | BuildError]]:
    """Build the libraries of all subjects for each platform, in parallel.

    Args:
        platforms: "CUDA" or "cpu", or both.

    Yields:
        Platform, subject, and the library or the error that building it ended with. An error does
        not stop the others.
    """
    pairs = [(platform, subject) for platform in platforms for subject in SUBJECTS]

    def one(pair: tuple[str, str]) -> Built | BuildError:
        try:
            return build(pair[1], pair[0])
        except BuildError as error:
            return error

    with ThreadPoolExecutor(len(SUBJECTS)) as pool:
        for pair, outcome in zip(pairs, pool.map(one, pairs), strict=True):
            yield *pair, outcome


def build(subject: str, platform: str) -> Built:
    """The library of ``subject`` for a platform, compiled unless the cache folder has it.

    Without a compiler, a library that another compiler built from the same sources is used.

    Args:
        subject: a key of `SUBJECTS`.
        platform: "CUDA" or "cpu".

    Raises:
        BuildError: without a compiler, after a failed compilation, where the folder cannot be
            written, and where another user could have written its files.
    """
    folder = cache_folder() / "cuda_ffi"
    try:
        return _build(subject, platform, folder)
    except OSError as error:
        raise BuildError(
            f"cannot write the compiled kernels to {folder}: {error}; set JSPEC_CACHE to a folder "
            "that can be written"
        ) from error


def _build(subject: str, platform: str, folder: Path) -> Built:
    for place in filter(Path.exists, (folder.parent, folder)):
        _check_trust(place)
    name = f"{platform.lower()}-{subject}-{_hash(_content(subject, platform))}"
    try:
        tools = toolchain.find(platform)
    except BuildError:
        if ready := _intact(folder, f"{name}-*"):
            return Built(ready, None)
        raise
    name = f"{name}-{_hash([tools.version.encode()])}"
    if ready := _intact(folder, name):
        return Built(ready, None)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o755, exist_ok=True)
    with _locked(folder / f"{name}.lock"):
        # Another process may have built it while this one waited.
        if ready := _intact(folder, name):
            return Built(ready, None)
        return _compile(tools, subject, folder, name)


def _intact(folder: Path, pattern: str) -> Path | None:
    """A library NAME-DIGEST.so with NAME like ``pattern`` and the content of that digest, or None.

    A truncated file would end the process with SIGBUS when it is mapped. Raises `BuildError` where
    a user other than this one or root could have written it.
    """
    for path in sorted(folder.glob(f"{pattern}-{'[0-9a-f]' * 16}.so")):
        _check_trust(path)
        if _hash([path.read_bytes()]) == path.stem.rpartition("-")[2]:
            return path
    return None


def _check_trust(path: Path) -> None:
    """Raise `BuildError` where another user could have changed ``path``.

    In a folder with the sticky bit, such as /tmp, nobody can replace what belongs to another.
    """
    status = path.stat()
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    writable = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky
    if writable or status.st_uid not in (0, os.getuid()):
        raise BuildError(
            f"{path} (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o}) can be written "
            "by another user, so it is not loaded; chmod go-w it if it is yours, or set "
            "JSPEC_CACHE to a folder of your own"
        )


def sources(subject: str, platform: str) -> list[Path]:
    """The files that are compiled into a library: its kernels, those it calls, its handlers."""
    kernels = [(name, toolchain.KERNELS[platform]) for name in (subject, *SUBJECTS[subject])]
    patterns = [*kernels, (subject, "*_ffi.cc"), ("common", "*_ffi.cc")]
    return [file for name, pattern in patterns for file in sorted((SRC / name).glob(pattern))]


def _content(subject: str, platform: str) -> Iterator[bytes]:
    """Everything that determines a library, except for the compiler."""
    yield version("jaxlib").encode()
    yield " ".join(toolchain.flags(platform, subject)).encode()
    yield toolchain.EXPORTS.read_bytes()
    contents: dict[Path, bytes] = {}
    pending = sources(subject, platform)
    while pending:
        path = pending.pop()
        if path not in contents:
            contents[path] = path.read_bytes()
            included = _INCLUDE.findall(contents[path].decode())
            pending += [file for name in included if (file := SRC / name).is_file()]
    for path in sorted(contents):
        yield str(path.relative_to(SRC)).encode()
        yield contents[path]


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


def _compile(tools: toolchain.Toolchain, subject: str, folder: Path, name: str) -> Built:
    """Compile in a folder of its own, and rename into place as ``name`` and a digest."""
    _LOG.warning(
        "jspec: compiling the %s kernels of %s, once; this takes %s",
        *("C++" if tools.platform == "cpu" else "CUDA", subject, DURATION[tools.platform]),
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        output = Path(scratch, f"{name}.so")
        command = tools.command(subject, sources(subject, tools.platform), SRC, output)
        run = toolchain.run(command, cwd=scratch)
        if run.returncode:
            raise BuildError(
                f"compiling the {tools.platform} kernels of {subject} failed "
                f"({' '.join(command)}):\n"
                f"{(run.stderr or run.stdout).strip()}"
            )
        output.chmod(0o755)
        path = folder / f"{name}-{_hash([output.read_bytes()])}.so"
        for damaged in folder.glob(f"{name}-*.so"):
            damaged.unlink()
        output.replace(path)
    return Built(path, time.monotonic() - started)
