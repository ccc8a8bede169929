"""HATA with trained matrices: from a folder that is named, or from the model's own directory."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import jspec
from jspec import LayerSpec
from jspec.models.bundled import bundled_path
from jspec.models.hashes import save_hashes
from jspec.policies import ExactTopK, Hata
from jspec.policies.hata import with_hashes

SPECS = [LayerSpec(2, 8, 8), LayerSpec(2, 8, 8, window=4)]


def model_of(specs):
    return SimpleNamespace(config=SimpleNamespace(layers=specs))


@pytest.fixture
def model(tmp_path):
    """A directory of a model that has hashes."""
    w = np.random.default_rng(0).integers(-3, 4, (2, 8, 32)).astype(np.float32)
    save_hashes((w, None), tmp_path / "hashes", {})
    return tmp_path


def test_named_hashes_are_the_arrays_of_the_policy(model):
    first, second = Hata(bits=32, hashes=str(model / "hashes")).prepare(model_of(SPECS), None)
    assert np.array_equal(first, np.random.default_rng(0).integers(-3, 4, (2, 8, 32)))
    assert second is None


@pytest.mark.parametrize(
    ("bits", "specs", "message"),
    [
        (64, SPECS, "have 32 bits, but bits=64; pass bits=32, or train others by"),
        (32, SPECS[:1], "hashes of 2 layers do not fit a model of 1"),
    ],
)
def test_hashes_that_do_not_fit_are_refused(model, bits, specs, message):
    with pytest.raises(ValueError, match=message):
        Hata(bits=bits, hashes=str(model / "hashes")).prepare(model_of(specs), None)


def test_the_hashes_of_a_model_serve_where_none_are_named(model):
    named = Hata(bits=32, hashes=str(model / "hashes"))
    assert with_hashes(Hata(bits=32), model / "hashes") == named
    for policy in (Hata(bits=64), Hata(bits=32, hashes="other"), ExactTopK()):
        assert with_hashes(policy, model / "hashes") == policy
    shutil.rmtree(model / "hashes")
    assert with_hashes(Hata(bits=32), model / "hashes") == Hata(bits=32)


def test_the_bundled_model_drafts_by_the_hashes_of_its_folder():
    llm = jspec.LLM(draft=jspec.SelfDraft(Hata(budget=64)))
    result = llm._options["policy_params"]
    for w, expected in zip(result, jspec.load_hashes(bundled_path() / "hashes"), strict=True):
        assert np.array_equal(w, expected)
