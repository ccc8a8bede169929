"""What policies take of a model: from the keys of a sample, in pieces, of every layer."""

import dataclasses

import numpy as np
import pytest

import jspec
import jspec.policies.prepare as prepare
from jspec.eval.sample import prepared
from jspec.policies import ExactTopK, Hata, Loki, MagicPIG, Policy
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts


@dataclasses.dataclass(frozen=True)
class ReadsSample(Policy):
    """Its arrays are the keys themselves."""

    def prepare(self, model, sample_keys):
        return sample_keys()


@pytest.fixture(scope="module")
def windowed():
    """A layer with a window shorter than the sample, after one without."""
    layers = tuple(dataclasses.replace(TINY.layers[0], window=window) for window in (None, 5))
    return make_decoder(dataclasses.replace(TINY, layers=layers))


def test_the_keys_are_those_of_decoding(windowed, monkeypatch):
    (text,) = prompts((43,))
    monkeypatch.setattr(prepare, "CHUNK", 16)
    keys = prepare.prepare_params(ReadsSample(), windowed, text)
    params = jspec.SamplingParams(max_new_tokens=1)
    state = jspec.start_decoding(windowed, [[*text, 0]], params, jspec.PLAIN, chunk=64)
    assert [k.shape for k in keys] == [(43, 2, 16)] * 2
    np.testing.assert_allclose(keys[0], state.cache.keys(0)[0, :43], atol=1e-5)


def test_a_sample_must_fit_the_context(windowed):
    for count in (0, 513):
        with pytest.raises(ValueError, match=f"a sample of {count} tokens must have at least 1"):
            jspec.policies.prepare_params(Loki(), windowed, [1] * count)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([1, 41], r"token 41, outside the vocabulary 0\.\.40; encode it"),
        ([-5], r"tokens=\[-5\] must be token ids"),
        ([1.7], r"tokens=\[1.7\] must be token ids"),
        ([[1, 2]], "must be token ids"),
        ("abc", "must be token ids"),
    ],
    ids=["large", "negative", "float", "nested", "text"],
)
def test_a_sample_holds_the_models_tokens(tiny, sample, message):
    with pytest.raises(ValueError, match=message):
        jspec.policies.prepare_params(Loki(channels=4), tiny, sample)


def test_the_text_that_ships_with_jspec_serves_any_model():
    tokenizer = jspec.load_bundled()[1]
    model = make_decoder(dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size))
    assert prepared(ExactTopK(), model, tokenizer) is None
    for components in prepared(Loki(channels=4), model, tokenizer):
        for x in np.float64(components):
            np.testing.assert_allclose(x.T @ x, np.eye(4), atol=1e-6)
    center = prepared(MagicPIG(), model, tokenizer)[0]["center"]
    assert np.abs(center).max() > 1e-3


def test_a_policy_that_takes_no_keys_costs_no_prefill(tiny, monkeypatch):
    monkeypatch.setattr(prepare, "_keys_of", None)
    assert [w.shape for w in prepared(Hata(bits=32), tiny, None)] == [(2, 16, 32)] * len(
        tiny.config.layers
    )
