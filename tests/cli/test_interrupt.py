"""Ctrl-C: what was decoded by then is kept and shown."""

import json

import pytest


def test_ctrl_c_keeps_what_was_generated(run, source, monkeypatch):
    from jspec.cli import generate

    feed = generate.RowText.feed
    calls = []

    def interrupt(self, tokens):
        calls.append(tokens)
        if len(calls) == 2:
            feed(self, tokens)
            raise KeyboardInterrupt
        return feed(self, tokens)

    monkeypatch.setattr(generate.RowText, "feed", interrupt)
    code, out, _ = run("--prompt-file", source, "--draft", "none", "--json")
    result = json.loads(out)
    assert code == 130
    assert result["finished"] == "interrupted"
    assert result["tokens"] == list(calls[0])
    assert result["text"] == bytes(calls[0]).decode()
    assert result["stats"]["committed"] == len(calls[0])


@pytest.mark.parametrize("where", ["decode", "read", "compare"])
def test_ctrl_c_anywhere_keeps_what_was_served(where, run, tmp_path, monkeypatch):
    """Three requests, one at a time: Ctrl-C comes in the second's decoding, or between."""
    from jspec.cli import generate

    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text('{"prompt": "import os\\n", "max_new_tokens": 4, "id": "a"}\n' * 3)
    decode, calls = generate.decode, []

    def interrupted(*args, **settings):
        calls.append(0)
        if len(calls) == (4 if where == "compare" else 2):
            if where == "read":
                raise KeyboardInterrupt
            settings["on_prefill"] = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        return decode(*args, **settings)

    monkeypatch.setattr(generate, "decode", interrupted)
    asked = ("--requests", str(file), "--batch", "1", "--output", str(out), "--compare", "--json")
    code, printed, _ = run(*asked)
    assert code == 130
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ends = {"decode": ["length", "interrupted"], "read": ["length"], "compare": ["length"] * 3}
    assert [line["finished"] for line in lines] == ends[where]
    assert len(lines[0]["tokens"]) == 4
    assert json.loads(printed)["results"] == lines
    assert json.loads(printed)["compare"] is None


def test_ctrl_c_before_anything_was_served_is_an_interruption(run, tmp_path, monkeypatch):
    from jspec.cli import generate

    def interrupted(*args, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "decode", interrupted)
    code, out, err = run("--prompt", "x", "--json")
    assert (code, out, err) == (130, "", "jspec: interrupted\n")
