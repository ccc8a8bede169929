"""Ctrl-C: what was decoded by then is kept and shown."""

import json
import subprocess
import sys

import pytest

from jspec.decode.chunks import Chunks
from jspec.models.text import RowText
from tests.decode.watching import host_takes

DROPPED = """
import gc, signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from jspec.cli.errors import redeliver_interrupts
redeliver_interrupts()
def callback(phase, info):
    gc.callbacks.remove(callback)
    raise KeyboardInterrupt
gc.callbacks.append(callback)
gc.collect()
time.sleep(60)
"""


def test_ctrl_c_in_a_callback_of_garbage_collection_is_raised_again():
    """Python drops the exception of such a callback, and JAX has one."""
    ended = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, timeout=30)
    assert ended.stderr.rstrip().endswith(b"KeyboardInterrupt")


def test_ctrl_c_keeps_what_was_generated(run, source, monkeypatch):
    feed, calls = RowText.feed, []

    def interrupt(self, tokens):
        calls.append(tokens)
        if len(calls) == 2:
            feed(self, tokens)
            raise KeyboardInterrupt
        return feed(self, tokens)

    monkeypatch.setattr(RowText, "feed", interrupt)
    code, out, _ = run("--prompt-file", source, "--draft", "none", "--json")
    result = json.loads(out)
    assert code == 130
    assert result["finished"] == "interrupted"
    assert result["tokens"] == list(calls[0])
    assert result["text"] == bytes(calls[0]).decode()
    assert result["stats"]["committed"] == len(calls[0])


# The chunk at which Ctrl-C comes, and how the lines that have tokens end.
CHUNKS = {
    "decode": (4, ["length", "interrupted"]),
    "between": (3, ["length"]),
    "compare": (7, ["length"] * 3),
}


@pytest.mark.parametrize("where", CHUNKS)
def test_ctrl_c_anywhere_keeps_what_was_served(where, run, tmp_path, monkeypatch):
    """Three requests, one at a time, two chunks each."""
    (chunk, ends), start, calls = CHUNKS[where], Chunks.start, []
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "import os\\n", "max_new_tokens": 8, "id": "a"}\n' * 3)

    def interrupted(self, state, left):
        calls.append(state)
        if len(calls) == chunk:
            raise KeyboardInterrupt
        return start(self, state, left)

    monkeypatch.setattr(Chunks, "start", interrupted)
    host_takes(monkeypatch, 0.0)  # each chunk is read before the next one starts
    asked = ("--requests", str(file), "--batch", "1", "--output", str(out), "--compare", "--json")
    code, printed, _ = run(*asked, "--draft", "none")
    assert code == 130
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["finished"] for line in lines] == ends
    assert [len(line["tokens"]) for line in lines] == [8 if x == "length" else 4 for x in ends]
    assert json.loads(printed)["results"] == lines
    assert json.loads(printed)["compare"] is None


def test_ctrl_c_while_a_chunk_is_at_work_loses_no_line_that_has_ended(run, tmp_path, monkeypatch):
    """The chunk that had not been read is lost, and nothing else."""
    start, looks, calls = Chunks.start, [], []
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "import os\\n", "max_new_tokens": 12}\n' * 2)

    def interrupted(self, state, left):
        calls.append(state)
        if len(calls) == 6:  # the third of the second line, ahead of the one that is read next
            raise KeyboardInterrupt
        return start(self, state, left)

    monkeypatch.setattr(Chunks, "start", interrupted)
    monkeypatch.setattr(Chunks, "looks_ahead", lambda *args, **more: looks.append(1) or True)
    asked = ("--requests", str(file), "--batch", "1", "--output", str(out), "--json")
    code, _, _ = run(*asked, "--draft", "none")
    assert code == 130
    assert looks
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["finished"] == "length"
    assert len(lines[0]["tokens"]) == 12
    assert all(len(line["tokens"]) % 4 == 0 for line in lines)


def test_ctrl_c_in_the_text_of_a_line_keeps_whole_chunks(run, tmp_path, monkeypatch):
    """The text that a row had begun to take up is that of its tokens again."""
    feed, calls = RowText.feed, []
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "import os\\n", "max_new_tokens": 8}\n' * 2)

    def interrupt(self, tokens):
        calls.append(tokens)
        feed(self, tokens)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(RowText, "feed", lambda self, tokens: interrupt(self, tokens) or "")
    code, out, _ = run("--requests", str(file), "--draft", "none", "--json")
    first, second = json.loads(out)["results"]
    assert code == 130
    assert first["tokens"] == second["tokens"] == list(calls[0])
    assert first["text"] == bytes(calls[0]).decode()
    assert first["finished"] == second["finished"] == "interrupted"


def test_ctrl_c_before_anything_was_served_is_an_interruption(run, tmp_path, monkeypatch):
    from jspec.cli import serving

    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "decode", interrupted)
    code, out, err = run("--prompt", "x", "--json")
    assert (code, out, err) == (130, "", "jspec: interrupted\n")


def test_ctrl_c_while_jaxlib_is_imported_is_one_line(run, monkeypatch):
    def importing(arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise ImportError("Encountered an error while initializing the extension.") from error

    def missing(arguments):
        raise ImportError("no such module")

    monkeypatch.setattr("jspec.cli.generate.run", importing)
    assert run("--demo") == (130, "", "jspec: interrupted\n")
    monkeypatch.setattr("jspec.cli.generate.run", missing)
    with pytest.raises(ImportError, match="no such module"):
        run("--demo")
