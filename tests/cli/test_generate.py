"""`jspec generate` end to end on the bundled model, in process."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jspec.cli import main
from jspec.cli.requests import Request
from jspec.cli.show import print_table
from jspec.config import SamplingParams
from jspec.decode.stats import Stats

pytestmark = pytest.mark.usefixtures("quick_compiles")

SOURCE = Path(json.__file__).read_text()[:600]


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `jspec` with arguments; returns (exit code, stdout, stderr)."""

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


@pytest.mark.parametrize("draft", ["ngram", "streaming", "dense", "none"])
def test_compare_says_identical(run, source, draft):
    code, out, _ = run(
        "--prompt-file", source, "--draft", draft, "--max-new-tokens", "24", "--compare", "--json"
    )
    result = json.loads(out)
    assert code == 0
    assert result["compare"]["identical"] is True
    assert result["compare"]["speedup"] > 0
    assert len(result["tokens"]) == result["stats"]["committed"] == 24


def test_compare_expects_of_sampled_tokens_the_same_law_alone(run, source):
    asked = ("--prompt-file", source, "--max-new-tokens", "24", "--compare", "--temperature", "1")
    code, _, err = run(*asked)
    assert code == 0
    assert "other tokens of the same law" in err


def test_text_goes_to_stdout_and_the_table_to_stderr(run, source):
    code, out, err = run("--prompt-file", source, "--max-new-tokens", "24")
    assert code == 0
    assert out.endswith("\n")
    assert "tokens/s" in err
    assert "tokens/s" not in out
    assert max(map(len, err.splitlines())) <= 100


def test_json_names(run, source):
    _, out, err = run("--prompt-file", source, "--max-new-tokens", "16", "--json")
    result = json.loads(out)
    names = {"text", "tokens", "finished", "seed", "stats", "compare", "environment"}
    assert set(result) == names
    assert result["compare"] is None
    assert err == ""
    stats = result["stats"]
    assert stats["mean_accepted_length"] == stats["committed"] / stats["steps"]
    for position in stats["acceptance_by_position"]:
        assert set(position) == {"attempts", "accepted", "rate"}
    assert stats["decode_tokens_per_s"] > 0
    assert result["environment"]["platform"] == "cpu"


def test_text_is_the_tokens(run, source):
    _, out, _ = run("--prompt-file", source, "--max-new-tokens", "16", "--json")
    result = json.loads(out)
    assert result["text"] == bytes(t for t in result["tokens"] if t < 256).decode(errors="replace")


def test_stdin_and_bytes_that_are_no_utf8(run):
    code, out, _ = run("-", "--max-new-tokens", "8", "--json", stdin=b"\xff\xfe\x00 x = \x80")
    assert code == 0
    assert len(json.loads(out)["tokens"]) == 8


def test_same_seed_same_text(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--temperature", "1", "--json"]
    first, again, other = (
        json.loads(run(*arguments, "--seed", seed)[1])["tokens"] for seed in ("7", "7", "8")
    )
    assert first == again
    assert first != other


def test_a_fresh_seed_is_told_and_repeats_the_text(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--temperature", "0.8"]
    _, text, table = run(*arguments)
    (seed,) = re.findall(r"^ *seed +(\d+) *$", table, re.MULTILINE)
    assert run(*arguments, "--seed", seed)[1] == text
    first, second = (json.loads(run(*arguments, "--json")[1]) for _ in range(2))
    assert first["seed"] != second["seed"]
    repeated = json.loads(run(*arguments, "--seed", str(first["seed"]), "--json")[1])
    assert repeated["seed"] == first["seed"]
    assert repeated["tokens"] == first["tokens"]


def test_each_sampled_line_has_its_own_seed(run, tmp_path):
    file = tmp_path / "requests.jsonl"
    asked = {"prompt": "def f(x):\n", "max_new_tokens": 32, "temperature": 1.0}
    lines = [asked, asked | {"temperature": 0.0}, asked | {"seed": 7}, asked]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, _, third, fourth = json.loads(run("--requests", str(file), "--json")[1])["results"]
    assert third["seed"] == 7
    assert len({first["seed"], 7, fourth["seed"]}) == 3
    assert first["tokens"] != fourth["tokens"]
    file.write_text("\n".join(json.dumps(asked | {"seed": r["seed"]}) for r in (fourth, first)))
    again = json.loads(run("--requests", str(file), "--json")[1])["results"]
    assert [r["tokens"] for r in again] == [fourth["tokens"], first["tokens"]]
    _, _, table = run("--requests", str(file))
    assert f"{fourth['seed']} (line 1), {first['seed']} (line 2)" in table


def test_plain_decoding_may_be_shaped_like_verification(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--draft", "none", "--json"]
    plain, padded = (json.loads(run(*arguments, *more)[1]) for more in ([], ["--gamma", "4"]))
    assert padded["tokens"] == plain["tokens"]
    assert padded["stats"]["steps"] == 24


def test_a_draft_takes_settings(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--json"]
    eager, never = (
        json.loads(run(*arguments, "--draft", f"ngram:{settings}")[1])
        for settings in ("min_match=1", "min_match=100,max_match=100")
    )
    assert eager["stats"]["drafted"] > never["stats"]["drafted"] == 0
    assert eager["tokens"] == never["tokens"]


def test_a_backend_is_named_by_operation(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "12", "--json"]
    code, out, _ = run(*arguments, "--backend", "attention=xla", "--backend", "verify_greedy=xla")
    assert code == 0
    assert len(json.loads(out)["tokens"]) == 12


def test_stop_text_ends_before_it(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "48", "--json"]
    whole = json.loads(run(*arguments)[1])["text"]
    stop = whole[20:24]
    result = json.loads(run(*arguments, "--stop", stop)[1])
    assert result["text"] == whole[: whole.index(stop)]
    assert result["finished"] == "stop"


def test_stop_of_one_byte_ends_in_the_step(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "48", "--json"]
    whole = json.loads(run(*arguments)[1])["text"]
    stop = whole[20]
    result = json.loads(run(*arguments, "--stop", stop)[1])
    assert result["text"] == whole[: whole.index(stop)]
    assert result["stats"]["committed"] == whole.index(stop) + 1


def test_stop_text_leaves_nothing_behind_it_in_any_count(run, source):
    """A stop text of several tokens is found behind a chunk, which has decoded more."""
    arguments = ["--prompt-file", source, "--max-new-tokens", "48", "--json"]
    whole = json.loads(run(*arguments)[1])
    stop = whole["text"][9:13]
    result = json.loads(run(*arguments, "--stop", stop)[1])
    count = whole["text"].index(stop) + 4
    assert result["tokens"] == whole["tokens"][:count]
    stats = result["stats"]
    assert stats["committed"] == count
    assert stats["accepted"] <= count
    assert stats["steps"] <= whole["stats"]["steps"]
    assert stats["drafted"] <= whole["stats"]["drafted"]


def test_results_go_to_a_file_line_by_line(run, tmp_path):
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [
        {"prompt": "def f(x):\n", "max_new_tokens": 5, "seed": 1, "id": "seven"},
        {"prompt": "", "id": 8},
        {"prompt": "import os\n", "max_new_tokens": 9, "seed": 2},
        {"prompt": "x" * 40000, "id": "long"},
    ]
    file.write_text("\n".join(map(json.dumps, asked)))
    code, printed, err = run("--requests", str(file), "--output", str(out), "--batch", "1")
    assert code == 2
    assert printed == ""
    assert "tokens/s" in err
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(x["line"], x.get("id")) for x in lines] == [
        (1, "seven"),
        (2, 8),
        (3, None),
        (4, "long"),
    ]
    assert "id" not in lines[2]
    assert [len(x.get("tokens", [])) for x in lines] == [5, 0, 9, 0]
    assert set(lines[0]) == {"line", "id", "text", "tokens", "finished", "seed"}
    assert set(lines[1]) == {"line", "id", "error"}
    together = json.loads(run("--requests", str(file), "--json")[1])
    assert together["results"] == [lines[0], lines[2]]
    assert together["errors"] == [lines[1], lines[3]]
    _, printed, _ = run("--requests", str(file))
    assert printed.startswith(f'--- line 1 "seven"\n{lines[0]["text"]}\n--- line 3\n')


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_decoded(run, tmp_path):
    file, folder = tmp_path / "in.jsonl", tmp_path / "folder"
    file.write_text('{"prompt": "x"}')
    folder.mkdir()
    for out in (folder, tmp_path / "no" / "such", Path("/dev/null")):
        code, printed, err = run("--requests", str(file), "--output", str(out))
        assert (code, printed) == (2, "")
        assert f"{out}: cannot be written" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "in.jsonl"]
    assert Path("/dev/null").is_char_device()


def test_a_failed_run_leaves_the_file_as_it_was(run, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("before")
    code, _, _ = run("--requests", "/dev/null", "--output", str(out))
    assert code == 2
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_file_is_as_readable_as_any_that_the_user_makes(tmp_path):
    from jspec.cli.output import whole_file

    usual, own = tmp_path / "usual", tmp_path / "own"
    usual.write_text("")
    (tmp_path / "link").symlink_to(own)
    with whole_file(str(tmp_path / "link")) as file:
        file.write("é")
    assert own.stat().st_mode == usual.stat().st_mode
    assert (tmp_path / "link").is_symlink()
    assert own.read_text("utf-8") == "é"


def test_requests_file_serves_the_good_lines(run, tmp_path):
    file = tmp_path / "requests.jsonl"
    lines = [
        json.dumps({"prompt": "def f(x):\n", "max_new_tokens": 5}),
        "{broken",
        json.dumps({"prompt": "import os\n", "max_new_tokens": 9, "temperature": 0.5, "seed": 3}),
        json.dumps({"prompt": ""}),
        json.dumps({"prompt": "x", "temperature": -1}),
        json.dumps({"prompt": "x", "colour": 1}),
        json.dumps({"prompt": "x" * 40000}),
        json.dumps({"prompt": "x", "top_k": "3"}),
        json.dumps([1]),
    ]
    file.write_text("\n".join(lines) + "\n")
    code, out, err = run("--requests", str(file), "--json")
    result = json.loads(out)
    assert code == 2
    assert [(r["line"], len(r["tokens"])) for r in result["results"]] == [(1, 5), (3, 9)]
    assert sorted(e["line"] for e in result["errors"]) == [2, 4, 5, 6, 7, 8, 9]
    for number in (2, 4, 5, 6, 7, 8, 9):
        assert f"line {number}:" in err


def test_a_request_does_not_depend_on_its_neighbours(run, tmp_path):
    wanted = {"prompt": "class A:\n", "max_new_tokens": 16, "temperature": 0.9, "seed": 5}
    alone, among = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    alone.write_text(json.dumps(wanted))
    others = [{"prompt": "import re\n" * n, "max_new_tokens": 8 * n} for n in (1, 4)]
    among.write_text("\n".join(json.dumps(r) for r in (others[0], wanted, others[1])))
    first = json.loads(run("--requests", str(alone), "--json")[1])["results"][0]
    second = json.loads(run("--requests", str(among), "--json")[1])["results"][1]
    assert first["tokens"] == second["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--prompt", ""], "empty"),
        (["--prompt", "x", "--gamma", "0"], "--gamma 0 must be at least 1"),
        (["--prompt", "x", "--gamma", "-3"], "--gamma -3"),
        (["--prompt", "x", "--gamma", "40000"], "less than the context of 32768"),
        (["--prompt", "x", "--draft", "none", "--gamma", "-1"], "must be at least 0"),
        (["--prompt", "x", "--draft", "oracle"], "draft 'oracle' is unknown; choose one of none"),
        (["--prompt", "x", "--draft", "ngram:colour=1"], "no setting 'colour=1'"),
        (["--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--prompt", "x", "--temperature", "nan"], "temperature=nan"),
        (["--prompt", "x", "--top-p", "0"], "top_p=0.0"),
        (["--prompt", "x", "--top-k", "-1"], "top_k=-1"),
        (["--prompt", "x", "--min-p", "2"], "min_p=2.0"),
        (["--prompt", "x", "--seed", "-1"], "seed=-1"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt", "x" * 100, "--context", "64", "--max-new-tokens", "8"], "context of 64"),
        (["--prompt", "x", "--context", "1"], "--context 1"),
        (["--prompt", "x", "--draft", "model"], "--draft-model"),
        (["--prompt", "x", "--backend", "sample=abacus"], "no implementation 'abacus'; choose"),
        (["--prompt", "x", "--backend", "abacus"], "must be OPERATION=NAME, as in attention=xla"),
        (["--prompt", "x", "--backend", "add=xla"], "there is no operation 'add'; name one of"),
        (["--prompt", "x", "--stop", ""], "stop text is empty"),
        (["--prompt", "x", "--temperature", "1" + "0" * 400], "temperature=inf must be"),
        (["--prompt", "x", "--top-k", "2147483648"], "top_k=2147483648 must be below"),
        (["--prompt", "x", "--batch", "0"], "--batch 0 must be at least 1"),
        (["--prompt", "x", "--output", "out"], "--output goes with --requests; for one prompt, re"),
        (["--prompt-file", "no/su\nch\x1b[31m"], "no/su\\nch\\x1b[31m: cannot be read"),
        (["--prompt-file", "no/such/file"], "no/such/file: cannot be read"),
        (["--prompt-file", "/"], "cannot be read"),
        (["--requests", "no/such/file"], "no/such/file"),
        (["--prompt", "x", "--model", "no/such/model"], "no/such/model"),
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


def compared(rows: list[tuple[float, list[int], list[int]]]) -> dict:
    """What `--compare` says of rows of (temperature, tokens, tokens of plain decoding)."""
    from jspec.cli import generate

    def outcome(which: int) -> generate.Outcome:
        served = []
        for row in rows:
            params = SamplingParams(temperature=row[0])
            text = type("Row", (), {"tokens": row[which]})
            served.append(generate.Served(Request(b"x", params, ()), text, "stop"))
        return generate.Outcome(served, Stats.merged([]), False)

    return generate._compare(outcome(1), outcome(2))


@pytest.mark.parametrize(
    ("rows", "sampled", "said"),
    [
        ([(0, [1], [1]), (0, [2], [2])], False, "identical tokens"),
        ([(0, [1], [1]), (0, [2], [3])], False, "tokens differ"),
        ([(0, [1], [1]), (1, [2], [3])], True, "other tokens of the same law"),
        ([(1, [1], [1]), (0, [2], [3])], True, "tokens differ"),
        ([(1, [1], [1]), (0, [2], [2])], True, "identical tokens"),
        ([(1, [1], [2])], True, "other tokens of the same law"),
    ],
    ids=["same", "differ", "sampled-differs", "greedy-differs", "mixed-same", "sampled"],
)
def test_compare_tells_greedy_from_sampled_in_a_mixed_batch(rows, sampled, said, capsys):
    found = compared(rows)
    assert found["sampled"] == sampled
    assert found["identical"] == (said == "identical tokens")
    assert found["greedy_identical"] == (said != "tokens differ")
    print_table(Stats.merged([]), [], found)
    assert f"against plain decoding  {said}, " in capsys.readouterr().err


def test_help_does_not_import_jax():
    script = (
        "import sys\nfrom jspec.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_import_touches_no_device():
    script = (
        "import jspec, sys\nassert 'jax' not in sys.modules\n"
        "jspec.generate, jspec.speculative_step, jspec.Decoder\n"
        "from jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


def test_public_names_load():
    import jspec

    for name in jspec.__all__:
        assert getattr(jspec, name) is not None
    assert set(jspec.__all__) <= set(dir(jspec))
    assert Path(jspec.__file__).with_name("py.typed").is_file()  # or type checkers see none of it
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = jspec.no_such_name
