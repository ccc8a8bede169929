"""A run from texts to hashes: what it writes, that it goes on where it stopped, what it refuses."""

import dataclasses
import json

import numpy as np
import pytest

from jspec import CheckpointError, load_hashes
from jspec.train import job as jobs
from jspec.train.job import Job, Texts, run
from jspec.train.loss import HashTraining
from tests.conftest import TINY, make_decoder
from tests.parameters import default_run

SETTINGS = HashTraining(bits=32, epochs=2, iterations=3)


@pytest.fixture(scope="module")
def model():
    """Two layers, so that a run can stop between them."""
    return make_decoder(seed=3)


@pytest.fixture
def job(tmp_path, model) -> Job:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, TINY.vocab_size, size).tolist() for size in (90, 70, 80)]
    return Job(model, Texts(texts[:2], texts[2:]), tmp_path / "hashes", SETTINGS)


def test_a_run_writes_hashes_loss_and_report_and_nothing_else(job):
    report = run(job)
    assert sorted(path.name for path in job.out.iterdir()) == [
        *("arrays", "curve.json", "hashes.json", "report.json")
    ]
    assert [path.name for path in job.out.parent.iterdir()] == ["hashes"]
    hashes = load_hashes(job.out)
    assert [w.shape for w in hashes] == [(2, 16, 32)] * 2
    made = json.loads((job.out / "hashes.json").read_text())["made"]
    first = [int(places[0]) + 1 for places in job.positions()]
    assert made["pairs"] == report["pairs"] == sum(first)
    assert HashTraining(**made["settings"]) == SETTINGS
    methods = {row["name"]: row for row in report["methods"]}
    assert set(methods) == {"exact", "hata-paper", "random", "loki", "quest", "magicpig"}
    assert methods["exact"]["recall"] == [1, 1]
    assert all(0 <= x <= 1 for row in methods.values() for x in (*row["recall"], *row["mass"]))
    assert all(row["mass"][0] <= methods["exact"]["mass"][0] + 1e-6 for row in methods.values())
    loss = json.loads((job.out / "curve.json").read_text())["paper"]
    assert [len(layer["independence"]) for layer in loss] == [6, 6]


def test_a_run_goes_on_where_it_was_stopped(job, monkeypatch):
    """Stopped in the second text and again at the second layer; the rest is not done again."""
    whole = dataclasses.replace(job, out=job.out.with_name("whole"))
    run(whole)
    done = {"prefill": 0, "learn": 0}

    def counting(name, at, stop):
        function = getattr(jobs, name)

        def call(*arguments, **settings):
            if done[name] == at and stop:
                raise KeyboardInterrupt
            done[name] += 1
            return function(*arguments, **settings)

        return call

    for name in done:
        with monkeypatch.context() as patch:
            patch.setattr(jobs, name, counting(name, 1, True))
            with pytest.raises(KeyboardInterrupt):
                run(job)
    assert done == {"prefill": 1, "learn": 1}
    assert not job.out.exists()
    for name in done:
        monkeypatch.setattr(jobs, name, counting(name, 0, False))
    run(job)
    assert done == {"prefill": 1 + 1, "learn": 1 + 1}  # and one prefill of the held-out text
    for got, expected in zip(load_hashes(job.out), load_hashes(whole.out), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_checkpoint_of_another_run_is_refused(job, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jobs, "learn", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(job)
    changed = {
        "settings": dataclasses.replace(job, settings=dataclasses.replace(SETTINGS, bits=64)),
        "model": dataclasses.replace(job, model=make_decoder(seed=4)),
        "texts": dataclasses.replace(job, texts=Texts(job.texts.learned[:1], job.texts.held_out)),
    }
    for name, other in changed.items():
        with pytest.raises(CheckpointError, match=f"a run with other {name} has done; run with"):
            run(other)


@pytest.mark.parametrize("variant", default_run(["authors", "attention"], "attention"))
def test_variants_are_compared_and_the_one_asked_for_is_written(job, tmp_path, variant):
    asked = dataclasses.replace(SETTINGS, variant=variant)
    every = dataclasses.replace(job, settings=asked, compares=True)
    report = run(every)
    names = [row["name"] for row in report["methods"]]
    assert {"hata-paper", "hata-authors", "hata-attention"} <= set(names)
    alone = dataclasses.replace(job, settings=asked, out=tmp_path / "alone")
    run(alone)
    for got, expected in zip(load_hashes(every.out), load_hashes(alone.out), strict=True):
        np.testing.assert_array_equal(got, expected)
    made = json.loads((alone.out / "hashes.json").read_text())["made"]
    assert HashTraining(**made["settings"]) == asked
    asked_once = sum(int(places[0]) + 1 for places in job.positions())
    assert (made["pairs"] == asked_once) == (variant == "authors")


def test_a_layer_with_a_window_has_no_hashes(job):
    layers = (dataclasses.replace(TINY.layers[0], window=8), TINY.layers[1])
    model = make_decoder(dataclasses.replace(TINY, layers=layers))
    run(dataclasses.replace(job, model=model))
    first, second = load_hashes(job.out)
    assert first is None
    assert second is not None
    windowed = dataclasses.replace(TINY, layers=(layers[0],) * 2)
    other = dataclasses.replace(job, model=make_decoder(windowed), out=job.out.with_name("other"))
    with pytest.raises(ValueError, match="every layer of the model has a sliding window"):
        run(other)


def test_a_broken_model_and_an_existing_folder_are_refused(job):
    broken = make_decoder()
    broken.layers[0].attention.qkv.kernel[...] = np.nan
    with pytest.raises(ValueError, match="layer 0 are not finite"):
        run(dataclasses.replace(job, model=broken))
    job.out.mkdir()
    with pytest.raises(CheckpointError, match="exists; choose another folder"):
        run(job)
