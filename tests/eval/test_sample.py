"""What a policy is given: trained hashes of as many bits, else what a sample text gives."""

import numpy as np
import pytest

import jspec
from jspec.eval.sample import prepared
from jspec.models.bundled import bundled_path
from jspec.models.errors import CheckpointError
from jspec.models.hashes import load_hashes, save_hashes
from jspec.policies import ExactTopK, Hata, Loki
from tests.conftest import TINY, make_decoder


@pytest.fixture(scope="module")
def bundled():
    return jspec.load_bundled()


def test_the_bundled_model_has_hashes_of_its_own(bundled):
    wanted = load_hashes()
    for got, trained in zip(prepared(Hata(), *bundled, bundled_path()), wanted, strict=True):
        np.testing.assert_array_equal(got, trained)
    # Of another number of bits there are none, and none of a model without a directory.
    for policy, path in ((Hata(bits=64), bundled_path()), (Hata(), None)):
        made, own = prepared(policy, *bundled, path), policy.prepare(bundled[0].config.layers, None)
        np.testing.assert_array_equal(made[3], own[3])


def test_hashes_of_another_model_are_refused(bundled, tmp_path):
    save_hashes(load_hashes(), tmp_path / "hashes", {})
    with pytest.raises(ValueError, match="hashes of 8 layers do not fit a model of 2"):
        prepared(Hata(), make_decoder(TINY), bundled[1], tmp_path)
    (tmp_path / "hashes" / "hashes.json").write_text("{}")
    with pytest.raises(CheckpointError):
        prepared(Hata(), *bundled, tmp_path)


def test_a_policy_that_needs_nothing_gets_nothing(bundled):
    assert prepared(ExactTopK(), *bundled, bundled_path()) is None


def test_components_come_from_a_text_that_ships_with_jspec(bundled):
    model = make_decoder(TINY)
    components = prepared(Loki(channels=4), model, bundled[1])
    assert [x.shape for x in components] == [(2, 16, 4)] * 2
    for x in np.float64(components[0]):
        np.testing.assert_allclose(x.T @ x, np.eye(4), atol=1e-6)
