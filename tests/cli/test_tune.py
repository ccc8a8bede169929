"""`jspec tune`: its files, its table and JSON, and bad input as one line."""

import json
import re

import pytest

from jspec.cli import main, tune
from jspec.eval.tuning import RUNS, Setting, Trial


class Bench:
    """Acceptance that settles at 5 % and draft tokens that cost little, up to 7 of them."""

    speed, noise = 1.0, 0.01
    groups: list[tuple[float, ...]] | None = None

    def __init__(self, model, prompts, params, text, max_gamma, make_params, backends, report):
        self.report, self.rows = report, len(prompts)

    def same_programs(self, ratios):
        return self.groups or [(ratio,) for ratio in sorted(ratios)]

    def default(self, groups):
        return Setting(None, 4)

    def measure(self, settings, *, runs):
        return tuple(self.trial(*setting, runs) for setting in settings)

    def trial(self, ratio, gamma, runs):
        self.report()
        accepted = min(gamma, 5 if ratio and ratio >= 0.05 else 2)
        speed = (self.speed if gamma else 1) * 10 * (1 + accepted) / (1 + 0.1 * gamma)
        noise = [1 + self.noise * (run % 2) for run in range(runs)]
        return Trial(Setting(ratio, gamma), accepted, tuple(speed * x for x in noise))


@pytest.fixture
def requests(tmp_path) -> str:
    path = tmp_path / "requests.jsonl"
    lines = [{"prompt": text, "max_new_tokens": 4} for text in ("one", "two", "three")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.fixture
def run(short_command, monkeypatch, tmp_path, requests):
    monkeypatch.setattr(tune, "Bench", Bench)

    def call(*more: str, out: str = "tuned") -> int:
        paths = ["--requests", requests, "--out", str(tmp_path / out), "--no-compile-cache"]
        return main(["tune", *paths, *more])

    return call


def test_it_writes_settings_that_generate_takes(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run("--batch", "2") == 0
    captured = capsys.readouterr()
    assert not captured.out
    lines = captured.err.splitlines()
    assert max(map(len, lines[:-2])) <= 100
    speed = "--draft vegas:budget=0.05 --gamma 5: 4.00x of plain decoding on 2 requests"
    assert f"{speed}, faster than the default beyond the noise" in lines
    out = tmp_path / "tuned"
    assert json.loads((out / "settings.json").read_text()) == {
        "draft": "vegas:budget=0.05",
        "gamma": 5,
    }
    for name in ("acceptance.png", "throughput.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    made = ["generate", "--prompt", "def", "--max-new-tokens", "4", "--json", "--no-compile-cache"]
    assert main([*made, "--settings", str(out / "settings.json")]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["drafted"] > 0
    assert main([*made, "--settings", str(out / "settings.json"), "--gamma", "2"]) == 2
    assert "leave out --draft and --gamma" in capsys.readouterr().err


def test_json_has_every_trial(run, tmp_path, capsys):
    assert run("--json", "--ratio", "0.1", "--ratio", "0.02", "--gamma", "3", "--gamma", "4") == 0
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "tuned" / "tuning.json").read_text()) == printed
    assert [row["ratio"] for row in printed["acceptance"]] == [0.02, 0.1]
    assert [row["gamma"] for row in printed["gammas"]] == [3, 4]
    assert printed["requests"] == 3
    assert printed["settled"] == 0.1
    assert printed["speedup"] == printed["best"]["tokens_per_s"] / printed["plain"]["tokens_per_s"]
    assert (printed["beyond_noise"], printed["gains"]) == (True, True)
    assert len(printed["best"]["runs"]) == RUNS
    assert "runs" not in printed["acceptance"][0]


def test_where_plain_decoding_is_faster_the_settings_say_so(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Bench, "speed", 0.1)
    assert run() == 0
    assert "plain decoding is fastest: drafts have 0.40x" in capsys.readouterr().err
    settings = json.loads((tmp_path / "tuned" / "settings.json").read_text())
    assert settings == {"draft": "none", "gamma": 0}


def test_gains_within_the_noise_leave_the_default(run, tmp_path, capsys, monkeypatch):
    """The table says what is noise, and which ratios were one program."""
    monkeypatch.setattr(Bench, "noise", 9.0)
    monkeypatch.setattr(Bench, "groups", [(0.01, 0.02, 0.03), (0.05,)])
    assert run() == 0
    err = capsys.readouterr().err
    assert "no measurable gain: --draft vegas --gamma 4 has 2.14x of plain decoding on 3 req" in err
    assert "the same program on these requests, measured once: ratios 0.01, 0.02, 0.03" in err
    assert err.count("within noise") == 4 + 1 + 2  # of gammas; plain decoding, two ratios
    assert "faster\n" not in err
    settings = json.loads((tmp_path / "tuned" / "settings.json").read_text())
    assert settings == {"draft": "vegas", "gamma": 4}
    tuning = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert (tuning["beyond_noise"], tuning["gains"]) == (False, False)
    assert tuning["same_programs"] == [[0.01, 0.02, 0.03]]


@pytest.mark.parametrize(
    ("speed", "noise", "verdict"),
    [
        (1.0, 1.0, "no setting is faster than the default beyond the noise; --draft vegas --gam"),
        (0.26, 0.05, "no measurable gain: drafts have 1.04x of plain decoding on 3 requests"),
        (0.35, 0.6, "no measurable gain: --draft vegas:budget=0.05 --gamma 5 has 1.40x of plain"),
    ],
    ids=["default", "plain", "settings"],
)
def test_the_verdict_tells_a_gain_over_plain_decoding_from_noise(
    speed, noise, verdict, run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Bench, "speed", speed)
    monkeypatch.setattr(Bench, "noise", noise)
    assert run() == 0
    assert verdict in capsys.readouterr().err
    tuning = json.loads((tmp_path / "tuned" / "tuning.json").read_text())
    assert tuning["gains"] is not verdict.startswith("no measurable gain")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ratio", "0"], "--ratio 0.0 must be above 0 and at most 1"),
        (["--gamma", "0"], "--gamma 0 must be at least 1"),
        (["--batch", "0"], "--batch 0 must be at least 1"),
        (["--draft", "ngram"], "draft 'ngram' has no ratio to tune"),
        (["--draft", "vegas:budget=0.1"], "budget is what is tuned; leave it out"),
        (["--context", "3"], "--gamma 12 must be less than the context of 3"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(run, tmp_path, capsys, more, message):
    assert run(*more) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["requests.jsonl"]


def test_a_line_that_is_no_request_and_a_folder_that_exists(run, tmp_path, requests, capsys):
    (tmp_path / "tuned").mkdir()
    assert run() == 2
    assert "exists; choose another folder" in capsys.readouterr().err
    with open(requests, "a") as file:
        file.write("{}\n")
    assert run(out="other") == 2
    assert "--requests, line 4: 'prompt' must be a string" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"draft": "vegas"}', '{"draft": "vegas", "gamma": "3"}']
)
def test_a_file_of_other_settings_is_refused(text, tmp_path, capsys):
    path = tmp_path / "settings.json"
    path.write_text(text)
    assert main(["generate", "--prompt", "a", "--settings", str(path)]) == 2
    err = capsys.readouterr().err
    assert re.search("is not valid JSON|must hold a JSON object|must be {.draft.: .NAME", err)
