"""Random small checkpoints of every family have the log-probabilities of transformers.

A few with ``-m parity``, 200 with ``-m slow`` where transformers is installed.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jspec import load_model
from jspec.models.families import model_config
from jspec.models.files import read_json
from tests.models import goldens
from tests.models.helpers import logits_of, one_pass
from tests.models.random_checkpoints import NAMES, random_settings

TOLERANCE = 1e-4
SEEDS = [
    pytest.param(seed, marks=pytest.mark.parity if seed < len(NAMES) else pytest.mark.slow)
    for seed in range(200)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_log_probabilities(tmp_path, seed):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    name, settings = random_settings(seed)
    theirs = goldens.make_model(name, settings, seed)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    assert ours.config == model_config(read_json(tmp_path / "config.json"))
    tokens = np.random.default_rng(seed).integers(0, settings["vocab_size"], (2, 48), np.int32)
    expected = log_probabilities(goldens.logits_of(theirs, tokens))
    got = log_probabilities(logits_of(ours, tokens, one_pass(tokens)))
    difference = np.abs(got - expected).max()
    if difference > TOLERANCE:  # a model so sharp that transformers errs as much
        exact = log_probabilities(goldens.logits_of(theirs.double(), tokens))
        assert np.abs(got - exact).max() <= 4 * np.abs(expected - exact).max()


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(logits, axis=-1))
