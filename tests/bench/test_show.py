"""`python -m bench show`: every committed result, and files that are none."""

import json

import pytest

from bench import report
from bench.__main__ import main

PATHS = sorted(report.RESULTS.glob("*/*.json"))


# Of each suite the first file; the others differ in numbers.
SUITES = {json.loads(path.read_text())["suite"]: path for path in reversed(PATHS)}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=f"{path.parent.name}/{path.stem}",
            marks=[pytest.mark.slow] * (path not in SUITES.values()),
        )
        for path in PATHS
    ],
)
def test_every_committed_result_is_shown(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", str(path)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 100
    assert "…" not in out  # neither a heading nor a number is cut


def test_several_results_are_shown_one_after_another(capsys):
    first, second = (path for path in PATHS if path.stem == "step" and "h" in path.parent.name)
    assert main(["show", str(first), str(second)]) == 0
    both = capsys.readouterr().out
    for path in (first, second):
        assert main(["show", str(path)]) == 0
        assert capsys.readouterr().out in both


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "is no result of a suite; write one with --json"),
        ('{"suite": 3, "rows": []}', "is no result of a suite"),
        ('{"suite": "verify"}', "has no rows"),
        ('{"suite": "verify", "rows": [3], "machine": {"device": "x"}}', "is no result of verify"),
        ('{"suite": "verify\\u001b[2J", "rows": []}', "has control characters"),
    ],
)
def test_a_file_that_is_no_result_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        main(["show", str(path)])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("files", "message"), [([], "show needs a result"), (["no"], "No such")])
def test_a_file_that_is_not_there_is_refused(files, message, capsys):
    with pytest.raises(SystemExit):
        main(["show", *files])
    assert message in capsys.readouterr().err
