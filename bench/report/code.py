"""Lines of code of the kernels, without comments, docstrings and blank lines."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

JSPEC = Path(__file__).parents[2] / "jspec"
# Files by family and backend; what C++ runs on CPUs is left out.
FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "verification": {
        "pallas": ("pallas/verify.py", "pallas/commit.py", "pallas/tree.py"),
        "cuda": ("cuda_ffi/verify.py", "cuda_ffi/commit.py", "cuda_ffi/src/verify/*"),
        "triton": ("triton/verify*.py", "triton/commit*.py", "triton/tree*.py"),
    },
    "packing": {
        "pallas": ("pallas/pack.py", "pallas/fused.py", "pallas/path.py"),
        "cuda": (
            "cuda_ffi/pack.py",
            "cuda_ffi/fused.py",
            "cuda_ffi/path.py",
            "cuda_ffi/src/pack/*",
        ),
        "triton": ("triton/pack*.py", "triton/fused*.py", "triton/path*.py"),
    },
    "sampling": {
        "pallas": (
            "pallas/stochastic.py",
            "pallas/sample.py",
            "pallas/tile_sums.py",
            "pallas/distribution.py",
        ),
        "cuda": ("cuda_ffi/stochastic.py", "cuda_ffi/src/sample/*"),
        "triton": ("triton/stochastic*.py", "triton/sample*.py", "triton/distribution*.py"),
    },
    "hashes": {
        "pallas": (
            *("pallas/hash*.py", "pallas/codes.py", "pallas/encode.py", "pallas/append.py"),
            *("pallas/inline.py", "pallas/keys.py"),
        ),
        "cuda": (
            "cuda_ffi/hashed.py",
            "cuda_ffi/codes.py",
            "cuda_ffi/src/hashed/*",
            "cuda_ffi/src/codes/*",
        ),
        "triton": ("triton/hash*.py", "triton/append_encode*.py"),
    },
    "attention": {
        "pallas": ("pallas/attention*.py", "pallas/gathered*.py", "pallas/matmul.py"),
        "cuda": (
            *("cuda_ffi/attention.py", "cuda_ffi/gathered.py"),
            *("cuda_ffi/src/attention/*", "cuda_ffi/src/gathered/*"),
        ),
        "triton": ("triton/attention*.py", "triton/gathered*.py"),
    },
    "matmuls": {
        "cuda": ("cuda_ffi/linear.py", "cuda_ffi/src/linear/*"),
        "triton": ("triton/linear*.py",),
    },
}
_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def lines_of_code() -> dict[str, dict[str, int]]:
    """By family and backend; without the backends that have no file."""
    counts = {
        family: {backend: sum(map(_lines, _paths(globs))) for backend, globs in of_family.items()}
        for family, of_family in FILES.items()
    }
    return {family: {k: n for k, n in of.items() if n} for family, of in counts.items()}


def _paths(globs: tuple[str, ...]) -> Iterator[Path]:
    for glob in globs:
        for path in sorted(JSPEC.glob(glob)):
            if not path.stem.endswith("_cpu"):
                yield path


def _lines(path: Path) -> int:
    text = path.read_text()
    return python_lines(text) if path.suffix == ".py" else c_lines(text)


def c_lines(text: str) -> int:
    """Lines of C++ or CUDA with code."""
    return sum(bool(line.strip()) for line in _COMMENTS.sub("", text).splitlines())


def python_lines(text: str) -> int:
    """Lines of Python with code; a string that is a statement is a docstring."""
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and before in _NO_CODE
        if token.type not in _NO_CODE and token.type != tokenize.ENDMARKER and not is_docstring:
            lines |= set(range(token.start[0], token.end[0] + 1))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
    return len(lines)
