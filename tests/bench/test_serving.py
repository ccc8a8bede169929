"""The suite `serving`: loads, what is read of them, checks, tables and the section."""

import dataclasses
import json
import time

import numpy as np
import pytest

from bench import load, profiles, serving
from bench.__main__ import main
from bench.settings import Settings
from jspec.config import SamplingParams
from jspec.decode.draft import NoDraft
from jspec.decode.engine import Engine
from jspec.decode.settings import StepConfig
from tests.bench.test_report import MACHINE
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts


def test_arrivals_are_a_poisson_process():
    at = load.arrivals(20_000, rate=50.0, seed=0)
    gaps = np.diff(at, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


def test_tokens_are_timed_from_the_first_chunk_to_the_last():
    watch = load.Watch(1.0)
    assert not watch.times
    for count, now in ((3, 2.0), (4, 3.0), (2, 5.0)):
        watch.record((0,) * count, now)
    assert watch.per_token(9) == pytest.approx(3.0 / 6)
    one = load.Watch(0.0)
    one.record((1, 2), 1.0)
    assert one.per_token(2) is None


def test_a_speed_while_all_slots_are_taken():
    """Two slots, four requests: from when two have begun to before the last one has."""
    samples = [(1.0, 5, 1), (2.0, 15, 2), (3.0, 40, 3), (6.0, 75, 3), (7.0, 80, 4)]
    assert load._while_full(samples, slots=2, count=4) == pytest.approx((75 - 15) / 4)
    assert load._while_full(samples, slots=2, count=3) is None


def test_requests_wait_for_their_time(tiny):
    engine = Engine(tiny, slots=2, capacity=32, draft=None)
    requests = [(text, SamplingParams(max_new_tokens=6)) for text in prompts((5, 3, 7))]
    load.serve(engine, requests, np.zeros(3))
    begin = time.perf_counter()
    found = load.serve(engine, requests, np.array([0.0, 0.0, 0.3]))
    assert time.perf_counter() - begin > 0.3
    assert found.figures["compilations"] == 0
    assert [len(tokens) for tokens in found.tokens] == [6] * 3
    assert found.figures["tokens_per_s"] == pytest.approx(18 / found.figures["seconds"])
    assert found.figures["mean_accepted_length"] == 1
    assert max(found.figures["first_token_s"]) < 0.3


def test_the_chunks_of_a_sample_follow_each_other(tiny, monkeypatch):
    """By a clock that only a wait for the device moves on, by a second."""
    right, waits = load.jax.block_until_ready, []

    def block_until_ready(tree):
        waits.append(None)
        return right(tree)

    monkeypatch.setattr(load.jax, "block_until_ready", block_until_ready)
    monkeypatch.setattr(load.time, "perf_counter", lambda: float(len(waits)))
    config = StepConfig(0, NoDraft())
    found = load.step_seconds(tiny, prompts((5, 3)), 100, config, steps=2)
    assert found == pytest.approx(1 / (load.CHUNKS_PER_SAMPLE * 2))
    assert len(waits) == 1 + 5  # the first chunk compiles


def test_cases_take_what_their_mix_has():
    found = serving.case("model=qwen3-8b,mix=long-context,B=8,S=32K")
    assert (found["S"], found["new"], found["requests"]) == (32768, 16, 24)
    assert [case["mix"] for case in serving.grid(Settings())] == ["reasoning", "long-context"]
    for text in ("mix=poems", "model=gpt-2", "C=3"):
        with pytest.raises(ValueError, match="must be one of"):
            serving.case(text)


def test_requests_are_ragged_around_the_case():
    case = serving.case("model=qwen3-4b,S=100,new=50,requests=200")
    sizes = [(len(text), params.max_new_tokens) for text, params in serving.requests_of(case)]
    lengths, news = np.array(sizes).T
    assert lengths.min() >= 50
    assert lengths.max() < 150
    assert lengths.mean() == pytest.approx(100, rel=0.05)
    assert news.mean() == pytest.approx(50, rel=0.05)
    assert sizes == [(len(x), p.max_new_tokens) for x, p in serving.requests_of(case)]


def row(name: str, load: str, speed: float, **rest) -> dict:
    case = serving.case("B=2,S=16,new=8") | {"load": load}
    own = {"token_s": [0.01, 0.02], "first_token_s": [0.5], "mean_accepted_length": 2.0}
    return {"case": case, "name": name, "checked": True, "tokens_per_s": speed} | own | rest


def result() -> dict:
    rows = [
        row("none", "full", 100.0, full_tokens_per_s=95.0, step_s=0.04),
        row("vegas", "full", 250.0),
        {"case": row("chain", "full", 0)["case"], "name": "chain", "checked": False}
        | {"operation": "serving"}
        | {"reason": "its tokens are wrong"},
    ]
    return {"suite": "serving", "machine": MACHINE, "rows": rows}


def test_the_table_and_the_comparison(capsys):
    serving.show(result())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "chain: its tokens are wrong" in out
    # Two rows of two tokens in 40 ms are 100 a second by the steps alone.
    assert serving.of_step(result()["rows"][0]) == pytest.approx(0.95)
    rows = serving.timed(result()["rows"])
    cells = {row["name"]: serving.cells(row, rows) for row in rows}
    assert cells["vegas"] == ("full", "vegas", "250", "2.50x", "15.0 / 19.0", "500.0", "2.00", "")
    assert "0.95" in out
    earlier = result()
    earlier["rows"][1]["tokens_per_s"] = 125.0
    now = result()
    assert serving.compare(now, earlier) == 2
    assert now["rows"][1]["ratio"] == 2


CASE = ("serving", "--quick", "--case", "B=2,S=12,new=6,requests=5")


@pytest.mark.slow
def test_a_quick_run(small_bundled, tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main([*CASE, "--backend", "ngram", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(x["name"], x["case"]["load"]) for x in rows] == [
        *(("none", "full"), ("none", "50%")),
        *(("ngram", "full"), ("ngram", "50%")),
    ]
    assert all(x["checked"] and x["compilations"] == 0 and x["tokens_per_s"] > 0 for x in rows)
    assert rows[0]["mean_accepted_length"] == 1
    assert "of step" in capsys.readouterr().out


@pytest.mark.slow
def test_true_shapes_have_the_papers_acceptance(monkeypatch, tmp_path):
    """Here of a small model; what is checked are its own tokens."""
    model = make_decoder(dataclasses.replace(TINY, vocab_size=32000), seed=3)
    monkeypatch.setattr(serving.decode, "drawn", lambda *_: model)
    right, checked = serving.decoding.check_tokens, []

    def check_tokens(*args):
        checked.append(args[0])
        return right(*args)

    monkeypatch.setattr(serving.decoding, "check_tokens", check_tokens)
    path, named = tmp_path / "out.json", ("--backend", "stream", "--backend", "ngram")
    case = "model=qwen3-8b,B=2,S=12,new=80,requests=5"
    assert main(["serving", "--quick", "--case", case, *named, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    lengths = {row["name"]: row.get("mean_accepted_length") for row in rows}
    rate = profiles.rate_of("qwen3-8b")
    assert {row["rate"] for row in rows} == {rate}
    assert lengths["none"] == 1
    assert lengths["stream"] == pytest.approx(profiles.committed(rate, 4), rel=0.1)
    assert lengths["ngram"] is None
    assert checked == [model] * 2


@pytest.mark.slow
def test_wrong_tokens_fail_the_run_and_have_no_speed(small_bundled, monkeypatch, tmp_path):
    monkeypatch.setattr(serving.decoding, "check_tokens", lambda *_: {"checked": False})
    path = tmp_path / "out.json"
    assert main([*CASE, "--backend", "none", "--json", str(path)]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["reason"] == "its tokens are wrong"
    assert "tokens_per_s" not in row
