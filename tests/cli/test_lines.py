"""`--requests` and `--output`: lines in, lines out, whatever becomes of one of them."""

import json
from pathlib import Path

import pytest


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
    asked[3:] = [asked[3], {"prompt": ""}]  # the model refuses the first, nobody can read the other
    file.write_text("\n".join(map(json.dumps, asked)))
    _, printed, err = run("--requests", str(file))
    refused = [line for line in err.splitlines() if line.startswith("jspec: error: line ")]
    assert [line.split()[3] for line in refused] == ["2:", "4:", "5:"]
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

    usual, target = tmp_path / "usual", tmp_path / "target"
    usual.write_text("")
    (tmp_path / "link").symlink_to(target)
    with whole_file(str(tmp_path / "link")) as file:
        file.write("é")
    assert target.stat().st_mode == usual.stat().st_mode
    assert (tmp_path / "link").is_symlink()
    assert target.read_text("utf-8") == "é"


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


@pytest.mark.exhaustive
def test_a_request_does_not_depend_on_its_neighbours(run, tmp_path):
    expected = {"prompt": "class A:\n", "max_new_tokens": 16, "temperature": 0.9, "seed": 5}
    alone, among = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    alone.write_text(json.dumps(expected))
    others = [{"prompt": "import re\n" * n, "max_new_tokens": 8 * n} for n in (1, 4)]
    among.write_text("\n".join(json.dumps(r) for r in (others[0], expected, others[1])))
    first = json.loads(run("--requests", str(alone), "--json")[1])["results"][0]
    second = json.loads(run("--requests", str(among), "--json")[1])["results"][1]
    assert first["tokens"] == second["tokens"]
