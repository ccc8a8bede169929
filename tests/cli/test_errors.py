"""Bad input is one line and exit code 2, and so is a device without memory."""

import io
import os
import sys

import jax
import pytest

from jspec.cli import main
from jspec.cli.show import PlainConsole
from jspec.decode import generation


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt; pass --prompt TEXT, --prompt-file F, --requests FILE.jsonl, --demo, or -"),
        (["--prompt", "x", "--system", "y"], "--system goes with --chat; pass both"),
        (["--prompt", ""], "empty"),
        (["--prompt", "x", "--gamma", "-2"], "--gamma -2 must be at least 0"),
        (["--prompt", "x", "--gamma", "-3"], "--gamma -3"),
        (["--prompt", "x", "--gamma", "40000"], "less than the context of 32768"),
        (["--prompt", "x", "--draft", "none", "--gamma", "-1"], "must be at least 0"),
        (["--prompt", "x", "--draft", "oracle"], "draft 'oracle' is unknown; choose one of none"),
        (["--prompt", "x", "--draft", "ngram:colour=1"], "no setting 'colour=1'"),
        (
            ["--prompt", "x", "--policy", "oracle"],
            "policy 'oracle' is unknown; choose one of dense",
        ),
        (["--prompt", "x", "--policy", "hata:norms=1"], "norms='1' must be true or false"),
        (["--prompt", "x", "--policy", "loki:budget=x"], "budget='x' must be a number"),
        (
            ["--prompt", "x", "--policy", "quest", "--draft", "ngram"],
            "leave out --draft, --gamma and",
        ),
        (["--prompt", "x", "--policy", "quest", "--gamma", "2"], "leave out --draft, --gamma and"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--temperature", "nan"], "temperature=nan"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0.0"),
        (["--prompt", "x", "--top-k", "-2"], "top_k=-2"),
        (["--prompt", "x", "--min-p", "2"], "min_p=2.0"),
        (["--prompt", "x", "--seed", "-1"], "seed=-1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "x" * 100, "--context", "64", "--max-new-tokens", "8"], "context of 64"),
        (["--prompt", "x", "--context", "1"], "--context 1"),
        (["--prompt", "x", "--draft", "model"], "--draft-model"),
        (["--prompt", "x", "--backend", "sample=abacus"], "no implementation 'abacus'; choose"),
        (["--prompt", "x", "--backend", "abacus"], "no operation has a backend 'abacus' to prefer"),
        (["--prompt", "x", *["--backend", "xla"] * 2], "only one backend can be preferred"),
        (["--prompt", "x", "--backend", "add=xla"], "decoding calls no operation 'add'; it calls"),
        (["--prompt", "x", "--stop", ""], "stop text is empty"),
        (["--prompt", "x", "--temperature", "1" + "0" * 400], "temperature=inf must be"),
        (["--prompt", "x", "--top-k", "2147483648"], "top_k=2147483648 must be below"),
        (["--prompt", "x", "--batch", "0"], "--batch 0 must be at least 1"),
        (["--prompt", "x", "--output", "out"], "--output goes with --requests; for one prompt, re"),
        (
            ["--prompt-file", "no/su\nch\x1b[31m"],
            "no/su\\nch\\x1b[31m cannot be read: No such file",
        ),
        (["--prompt-file", "no/such/file"], "no/such/file cannot be read: No such file"),
        (["--prompt-file", "/"], "/ is no regular file"),
        (["--prompt-file", os.devnull], "is no regular file"),
        (["--requests", os.devnull], "is no regular file"),
        (["--prompt", "x", "--draft", "streaming:window=" + "9" * 18], "at most 2147483647"),
        (
            ["--prompt", "x", "--draft", "vegas:ahead=1000000000"],
            "ahead=1000000000 must be at most",
        ),
        (
            ["--prompt", "x", "--helix", "kvp=2", "--devices", "1000000"],
            "--devices 1000000 must be at most 256",
        ),
        (["--prompt", "x", "--devices", "2"], "--devices 2 needs --helix, which shares rows"),
        (["--requests", "no/such/file"], "no/such/file"),
        (["--prompt", "x", "--model", "no/such/model"], "no/such/model"),
        (["--prompt", "x", "--model", "no/such", "--chat"], "no/such does not exist; pass a local"),
        (["--prompt", "x", "--model", "/", "--chat"], "/ is no model: it has neither config.json"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("jspec: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_file_without_a_good_line_gives_its_errors_alone(run, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": 5}\n')
    code, out, err = run("--requests", str(file))
    assert (code, out) == (2, "")
    assert err == "jspec: error: line 1: 'prompt' must be a string that is not empty, got 5\n"


def test_requests_are_not_replaced_by_their_output(run, tmp_path):
    file, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    file.write_text('{"prompt": "x", "max_new_tokens": 1}\n')
    link.symlink_to(file)
    before = file.read_text()
    for output in (file, link):
        code, out, err = run("--requests", str(file), "--output", str(output))
        assert (code, out) == (2, "")
        assert (
            err == f"jspec: error: --output {output} would replace --requests; name another file\n"
        )
    assert file.read_text() == before


@pytest.mark.parametrize(
    "arguments",
    [["--gamma", "1.5"], ["--gamma", "9" * 5000], ["--colour", "a\nb\x1b[31m"], ["x", "--json"]],
    ids=["float", "digits", "unknown", "place"],
)
def test_an_argument_that_is_none_is_one_line_too(arguments, run, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert err.startswith("jspec: error: ")
    assert err.endswith(("; see jspec generate --help\n", "; see jspec --help\n"))
    assert err[:-1].isprintable()
    assert len(err) < 400


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--length-penalty", "1.1"], "unrecognized arguments: --length-penalty"),
        (["--prompt", "x", "--tempreature", "1"], "--tempreature (did you mean --temperature?)"),
        (
            ["--prompt", "x", "--max-tokens=8"],
            "--max-tokens=8 (did you mean --max-new-tokens?); see",
        ),
        (["-", "--prompt", "x"], "- reads the prompt from stdin; leave out --prompt"),
        (["-", "--requests", "f"], "- reads the prompt from stdin; leave out --requests"),
        (["--demo", "--prompt", "x"], "--prompt: not allowed with argument --demo"),
        (["--prompt", "x", "--devices", "9" * 20], "--devices: 99999999999999999999 must be at"),
        (["--prompt", "x", "--seed", "-1.5"], "--seed: '-1.5' must be a whole number"),
        (["--prompt", "x", "--gamma", "many"], "--gamma: 'many' must be a whole number, or auto"),
    ],
    ids=lambda value: value.split(":")[0][:20] if isinstance(value, str) else "",
)
def test_arguments_that_cannot_be_parsed(arguments, message, run, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_a_prompt_in_the_place_of_the_dash_says_the_way_out(run, capsys):
    with pytest.raises(SystemExit):
        run("def fib(n):")
    assert "a prompt needs --prompt TEXT, a file --prompt-file F" in capsys.readouterr().err


def test_closed_streams_are_empty(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", None)
        code, out, err = run("-")
        sys.stdin.close()
    assert (code, out) == (2, "")
    assert err == "jspec: error: the prompt is empty; give it at least one character\n"
    for name in ("stdout", "stderr"):
        with monkeypatch.context() as patch:
            patch.setattr(f"sys.{name}", None)
            assert run("--prompt", "x", "--max-new-tokens", "1", "--stop", "\n")[0] == 0
            getattr(sys, name).close()


def test_a_file_of_another_command_is_named_first(capsys):
    assert main(["simulate", "pareto", "--csv", "no/such.csv"]) == 2
    err = capsys.readouterr().err
    assert err == "jspec: error: no/such.csv: No such file or directory\n"


def test_a_device_without_memory_is_one_line(run, monkeypatch):
    """XLA's error, when the model is loaded and when the batch is."""

    def exhausted(*args, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    way_out = "; lower --batch or --max-new-tokens, shorten the prompt, or take a smaller model\n"
    with monkeypatch.context() as patch:
        patch.setattr(generation, "start_decoding", exhausted)
        code, out, err = run("--prompt", "hello", "--max-new-tokens", "7")
    assert (code, out) == (2, "")
    what = "with 1 prompts at a time, the longest of 13 tokens with max_new_tokens"
    assert err == f"jspec: error: the device is out of memory {what}{way_out}"
    with monkeypatch.context() as patch:
        patch.setattr("jspec.cli.generate.load_model", exhausted)
        code, out, err = run("--prompt", "hello")
    assert (code, out, err) == (2, "", f"jspec: error: out of memory{way_out}")

    def broken(*args, **settings):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr("jspec.cli.generate.load_model", broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        run("--prompt", "hello")


class Closed(io.StringIO):
    """A stream whose reader went away, as of ``jspec ... | head``."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_table_for_a_reader_that_went_away_ends_as_all_commands_do():
    with pytest.raises(BrokenPipeError):  # which `main` takes for the end
        PlainConsole(file=Closed()).print("x")


def test_a_full_disk_names_the_output(monkeypatch, capsys):
    def full(arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jspec.cli.simulate.run", full)
    assert main(["simulate", "paper"]) == 2
    assert capsys.readouterr().err == "jspec: error: the output: No space left on device\n"
