"""`jspec train-hash`: arguments, the table and the JSON, and bad input as one line."""

import functools
import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

import jspec
from jspec.cli import main, train_hash
from jspec.train.loss import HashTraining
from tests.cli.test_models import GOLDEN, character_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen3"
    shutil.copytree(GOLDEN / "qwen3", path)
    character_tokenizer(path, json.loads((path / "config.json").read_text())["vocab_size"])
    return path


@pytest.fixture
def texts(tmp_path) -> list[str]:
    """Three texts of 120 to 140 tokens."""
    paths = [tmp_path / f"{index}.txt" for index in range(3)]
    for index, path in enumerate(paths):
        letters = np.random.default_rng(index).choice(list("abcdef \n"), 120 + 10 * index)
        path.write_text("".join(letters))
    return list(map(str, paths))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Epochs of a few steps."""
    few = functools.partial(HashTraining, iterations=2)
    monkeypatch.setattr(train_hash, "HashTraining", few)


def run(model, texts, out, *more: str) -> int:
    path = ["--model", str(model), "--out", str(out), "--epochs", "1", "--no-compile-cache"]
    return main(["train-hash", *path, "--data", *texts, *more])


def test_json_says_what_was_saved_and_where(model, texts, tmp_path, capsys):
    out = tmp_path / "hashes"
    assert run(model, texts, out, "--bits", "64", "--compare", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bits"], printed["texts"], printed["held_out"]) == (64, 2, 1)
    assert printed["out"] == str(out)
    assert printed["environment"]["platform"] == "cpu"
    names = {row["name"] for row in printed["methods"]}
    hashes = {"hata-attention", "hata-paper", "hata-authors"}
    assert names == hashes | {"exact", "random", "loki", "quest", "magicpig"}
    hashes = jspec.load_hashes(out)
    specs = jspec.load_model(model).config.layers
    assert [w.shape for w in hashes] == [(s.kv_heads, s.key_size, 64) for s in specs]


def test_the_table_and_the_picture(model, texts, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "hashes"
    assert run(model, texts[:2], out, "--held-out", texts[2], "--variant", "authors") == 0
    captured = capsys.readouterr()
    assert not captured.out
    assert "hata-authors" in captured.err
    assert "recall" in captured.err
    assert "kept of attention in 1 held-out text:" in " ".join(captured.err.split())
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert run(model, texts, out) == 2
    assert "exists; choose another folder" in capsys.readouterr().err


def test_pieces_are_no_longer_than_asked_and_open_as_a_text_does(tmp_path):
    _, tokenizer = jspec.load_bundled()
    path = tmp_path / "long"
    path.write_bytes(bytes(range(97, 107)) * 15)
    pieces = train_hash._texts([str(path)], tokenizer, 64, "--data")
    assert [len(piece) for piece in pieces] == [64, 64, 25]
    assert all(piece[0] == 256 for piece in pieces)
    assert b"".join(bytes(piece[1:]) for piece in pieces) == path.read_bytes()


def test_a_folder_is_one_text_without_tests_and_what_is_no_text(tmp_path):
    _, tokenizer = jspec.load_bundled()
    for name in (
        "b.py",
        "a.txt",
        "c.bin",
        "tests/d.py",
        "site-packages/e.py",
        ".git/f.md",
        "g/h.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name * 10)
    (text,) = train_hash._texts([str(tmp_path)], tokenizer, 4096, "--data")
    assert tokenizer.decode(text[1:]) == "".join(10 * name for name in ("a.txt", "b.py", "g/h.md"))


def test_python_s_library_is_learned_from_where_no_text_is_named(monkeypatch, tmp_path, capsys):
    asked = []

    def texts_of(names, tokenizer, length, option):
        asked.append((names, option))
        return [list(range(20 + index)) for index in range(100)]

    def learn(job, on_progress):
        asked.append(job)
        raise ValueError("enough")

    monkeypatch.setattr(train_hash, "_texts", texts_of)
    monkeypatch.setattr(train_hash, "learn_hashes", learn)
    assert main(["train-hash", "--out", str(tmp_path / "out"), "--no-compile-cache"]) == 2
    assert main(["train-hash", "--out", "out", "--held-out", "x", "--no-compile-cache"]) == 2
    library = ([sysconfig.get_path("stdlib")], "--data")
    assert asked[:3:2] == [library] * 2
    assert asked[3] == (["x"], "--held-out")
    learned, held_out = asked[1].texts
    assert (len(learned), len(held_out)) == (90, 10)
    assert not {len(text) for text in learned} & {len(text) for text in held_out}
    assert len(asked[4].texts.held_out) == train_hash.REPORT_TEXTS


def test_a_run_stops_in_time_and_goes_on(model, texts, tmp_path, capsys, monkeypatch):
    out = tmp_path / "hashes"
    monkeypatch.setattr(train_hash, "LINE_SECONDS", 0)
    assert run(model, texts, out, "--minutes", "1e-9", "--json") == train_hash.STOPPED
    captured = capsys.readouterr()
    assert not captured.out
    assert "stopped after 1e-09 minutes; the same command goes on from there" in captured.err
    assert not out.exists()
    assert run(model, texts, out, "--minutes", "60", "--json") == 0
    lines = capsys.readouterr().err.splitlines()
    assert "learn layers: 1 of 2" in lines
    assert out.exists()
    # Else a line at the end of each stage, and no second one.
    monkeypatch.setattr(train_hash, "LINE_SECONDS", 1e9)
    assert run(model, texts, tmp_path / "other", "--json") == 0
    stages = [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()]
    assert [x for x in stages if x != "jspec"] == ["read texts", "learn layers", "compare"]


def test_texts_are_read_until_there_are_enough_pairs():
    texts = [[0] * 100 for _ in range(9)]
    assert len(train_hash._enough(texts, 300, 0)) == 4
    assert len(train_hash._enough(texts, 10**9, 0)) == 9


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bits", "100"], "bits=100 must be one of 32, 64, 128, 256"),
        (["--variant", "mine"], "variant='mine' must be one of attention, paper, authors"),
        (["--pairs", "0"], "--pairs 0 must be at least 1"),
        (["--step-pairs", "0"], "--step-pairs 0 must be at least 1"),
        (["--epochs", "0"], "epochs=0 must be a whole number of at least 1"),
        (["--minutes", "0"], "--minutes 0 must be above 0"),
        (["--seed", "-1"], "--seed -1 must be in [0, 2**32)"),
        (["--length", "5"], "--length 5 must be from 16 to the model's context of "),
        (["--length", "10000000"], "--length 10000000 must be from 16 to"),
        (["--held-out", "missing.txt"], "missing.txt cannot be read"),
    ],
)
def test_bad_input_is_one_line(model, texts, tmp_path, capsys, more, message):
    assert run(model, texts, tmp_path / "out", *more) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_too_little_text_is_refused(model, texts, tmp_path, capsys):
    assert run(model, texts[:1], tmp_path / "out") == 2
    assert "--data has one text, which is held out for the report" in capsys.readouterr().err
    Path(texts[0]).write_text("short")
    assert run(model, texts[:1], tmp_path / "out") == 2
    assert "none of 1 files has the 16 tokens" in capsys.readouterr().err
