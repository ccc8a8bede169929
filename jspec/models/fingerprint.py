"""Whether two hosts have the same model on their disks, without reading all of it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jspec.models.errors import CheckpointError
from jspec.models.files import directory_of

SAMPLES = 64  # of a file, evenly spaced
SAMPLE_BYTES = 4096
_EXTRA_SUFFIXES = (".json", ".jinja")  # of files stored next to the weights


def fingerprint(path: str | Path) -> str:
    """A short text that differs where the files of a model do.

    Of the names and sizes of its JSON, safetensors and Jinja files, and all files below for a model
    that `jspec.save_model` wrote; and of samples of each. Of a GGUF file those next to it that a
    model is read with count too. Raises `CheckpointError` where ``path`` is neither.
    """
    folder, digest = directory_of(path), hashlib.sha256()
    if not folder.is_dir():
        raise CheckpointError(f"{path} is no directory; pass a local model directory")
    for file in sorted(_files(Path(path), folder)):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder)}\n{size}\n".encode())
        with file.open("rb") as content:
            for sample in range(SAMPLES):
                content.seek(sample * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
                if size <= SAMPLE_BYTES:
                    break
    return digest.hexdigest()[:16]


def _files(path: Path, folder: Path) -> list[Path]:
    """The files that `load_model` may read for ``path``."""
    if folder != path:
        files = [path, *(file for file in folder.iterdir() if file.suffix in _EXTRA_SUFFIXES)]
    elif (folder / "config.json").is_file():
        files = [
            file for file in folder.iterdir() if file.suffix in (*_EXTRA_SUFFIXES, ".safetensors")
        ]
    else:
        files = list(folder.rglob("*"))
    return [file for file in files if file.is_file()]
