"""Progress on a terminal: what is compiled, read and decoded, and nothing left after."""

import contextlib
import io

import pytest
from rich.console import Console

from jspec.cli import show
from jspec.cli.show import Progress


@pytest.fixture
def terminal(monkeypatch):
    """A terminal of 100 columns; what was written to it."""
    screen = io.StringIO()
    kind = {"TERM": "xterm"}
    made = Console(file=screen, force_terminal=True, width=100, highlight=False, _environ=kind)
    monkeypatch.setattr(show, "console", lambda: made)
    return screen


def on_terminal() -> Progress:
    """Progress that takes stderr for a terminal."""
    progress = Progress()
    progress.shown = True
    return progress


def screen(terminal, progress: Progress) -> str:
    """What came onto the screen since the last look."""
    if progress._bars is not None:
        progress._bars.refresh()
    text = terminal.getvalue()
    terminal.seek(0)
    terminal.truncate()
    return text


def test_compiling_reading_and_decoding_have_a_line_each(terminal):
    progress = on_terminal()
    with progress.batch(40, "decode plainly", streams=False):
        progress.compiling(True)
        assert "compiling..." in screen(terminal, progress)
        progress.compiling(False)
        progress.prefilled(16, 64)
        text = screen(terminal, progress)
        assert "16/64" in text
        assert "compiling" not in text
        progress.prefilled(64, 64)
        progress.decoded(3)
        progress.decoded(4)
        assert "7/40" in screen(terminal, progress)
    assert progress._bars is None


def test_the_bars_leave_the_screen_to_the_text(terminal):
    progress = on_terminal()
    with progress.batch(40, "decode", streams=True):
        progress.prefilled(64, 64)
        progress.compiling(True)  # of the steps, after the prefill
        assert "compiling..." in screen(terminal, progress)
        progress.compiling(False)
        progress.decoded(3)
        screen(terminal, progress)
        progress.decoded(4)
        progress.compiling(True)
        assert screen(terminal, progress) == ""


def test_an_exception_ends_the_bars(terminal):
    progress = on_terminal()
    with contextlib.suppress(KeyError), progress.batch(40, "decode", streams=False):
        raise KeyError
    progress.decoded(1)
    progress.prefilled(1, 2)
    progress.compiling(True)
    assert progress._bars is None


def test_where_no_terminal_is_nothing_is_shown(capsys):
    progress = Progress()
    with progress.batch(40, "decode", streams=False):
        progress.compiling(True)
        progress.prefilled(1, 2)
        progress.decoded(3)
    assert capsys.readouterr().err == ""
