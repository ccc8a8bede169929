"""What the tests of `jspec generate` share: the command in process, and a file to continue."""

import json
import sys
from pathlib import Path

import pytest

from jspec.cli import main

SOURCE = Path(json.__file__).read_text()[:600]


@pytest.fixture
def run(capsys, monkeypatch, short_command):
    """Run `jspec generate` with arguments, by default on the first layers of the bundled model;
    returns (exit code, stdout, stderr)."""

    def call(*arguments: str, stdin: bytes | None = None):
        if stdin is not None:
            pipe = type("Stdin", (), {"buffer": type("B", (), {"read": lambda self: stdin})()})()
            monkeypatch.setattr(sys, "stdin", pipe)
        code = main(["generate", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def source(tmp_path) -> str:
    path = tmp_path / "source.py"
    path.write_text(SOURCE)
    return str(path)
