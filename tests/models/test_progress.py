"""The bar of loading is for terminals, and for what takes time."""

import io
import sys

import pytest

from jspec.models import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "patience", "shown"),
    [(Terminal, -1, True), (Terminal, 60, False), (io.StringIO, -1, False)],
)
def test_where_a_bar_is_shown(monkeypatch, stderr, patience, shown):
    monkeypatch.setattr(sys, "stderr", stderr())
    monkeypatch.setattr(progress, "PATIENCE", patience)
    monkeypatch.setenv("TERM", "xterm")
    with progress.loading("model[b].gguf", 30) as advance:
        advance(10)
        advance(20)
    text = sys.stderr.getvalue()
    assert ("loading model[b].gguf" in text) == shown
    assert bool(text) == shown
