"""Compiled programs on disk, so that the second run of a command need not compile them again."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from jspec.cuda_ffi.build import cache_folder

LIMIT = 2**30  # bytes; the oldest files go first
_SETTINGS = ("compilation_cache_dir", "enable_compilation_cache")  # of JAX


def keep_programs() -> Path | None:
    """Have JAX keep compiled programs in jspec's cache folder; returns where, or None.

    JAX's own settings come first: nothing changes where they name a folder
    (``JAX_COMPILATION_CACHE_DIR``) or switch keeping off (``JAX_ENABLE_COMPILATION_CACHE=0``), nor
    where the folder cannot be made or another user could write to it.
    """
    import jax

    named, enabled = (getattr(jax.config, f"jax_{name}") for name in _SETTINGS)
    if named or not enabled:
        return None
    try:
        folder = cache_folder() / "programs" / _machine()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(folder):
            return None
        _prune(folder, LIMIT)
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Many programs compile in less than the second that JAX finds worth keeping.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


def _machine() -> str:
    """A name of what this CPU can do: a program for another one may end in an illegal instruction,
    and home folders are shared."""
    lines = [platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        lines += [line for line in text.splitlines() if line.startswith(("flags", "Features"))][:1]
    except OSError:
        lines.append(platform.processor())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _is_private(folder: Path) -> bool:
    """Whether nobody but this user can put a program there."""
    if os.name != "posix":
        return True
    stat = folder.stat()
    return stat.st_uid == os.getuid() and not stat.st_mode & 0o022


def _prune(folder: Path, limit: int) -> None:
    """Delete the oldest files until those that are left have at most ``limit`` bytes."""
    files = [(path, path.stat()) for path in folder.iterdir() if path.is_file()]
    left = sum(stat.st_size for _, stat in files)
    for path, stat in sorted(files, key=lambda pair: pair[1].st_mtime):
        if left <= limit:
            return
        path.unlink(missing_ok=True)
        left -= stat.st_size
