"""Latent attention and mixtures of experts on a mesh: the tokens and logits of one device."""

import functools

import jax
import pytest

import jspec
from jspec import helix
from tests.decode.common import NGRAM, prompts
from tests.models.goldens import GOLDEN

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
SPARSE = jspec.SelfDraft(jspec.ExactTopK(budget=8, sinks=1, recent=2, dense_layers=0))
TEXTS = prompts((40, 1, 17), vocabulary=112)
CONFIG = functools.partial(helix.HelixConfig, block=4)


def generated(model, draft) -> tuple[tuple[int, ...], ...]:
    params = jspec.SamplingParams(max_new_tokens=16, ignore_eos=True)
    gamma = 0 if draft is None else 3
    return jspec.generate(model, TEXTS, params, draft=draft, gamma=gamma).tokens


@functools.cache
def alone() -> tuple[tuple[int, ...], ...]:
    return generated(jspec.load_model(GOLDEN / "deepseek_v3"), None)


@pytest.mark.parametrize(
    ("kvp", "ep", "draft"),
    [
        (4, 1, NGRAM),
        (4, 4, SPARSE),
        pytest.param(2, 1, None, marks=pytest.mark.slow),
        pytest.param(2, 2, jspec.GuidedDraft(jspec.Vegas(budget=8)), marks=pytest.mark.slow),
    ],
    ids=["channels", "experts", "plain", "vegas"],
)
def test_tokens_are_those_of_one_device(kvp, ep, draft):
    model = helix.load_model(GOLDEN / "deepseek_v3", CONFIG(kvp=kvp, ep=ep))
    gate_up = model.model.layers[1].mlp.experts.gate_up.kernel.get_value()
    held = {shard.data.shape for shard in gate_up.addressable_shards}
    assert held == {(8, 32, 2, 12 // kvp) if ep == 1 else (8 // kvp, 32, 2, 12)}
    assert generated(model, draft) == alone()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gather", "medha"])
def test_what_helix_is_compared_with_has_the_same_tokens(strategy):
    model = helix.load_model(GOLDEN / "deepseek_v3", CONFIG(kvp=2, strategy=strategy))
    assert generated(model, None) == alone()


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="tpa=2 is more than the 1 key-value heads of layer 0"):
        helix.load_model(GOLDEN / "deepseek_v2", CONFIG(tpa=2))
    with pytest.raises(ValueError, match="moe_intermediate_size=12 does not divide into kvp=8"):
        helix.load_model(GOLDEN / "deepseek_v2", CONFIG(kvp=8))
    with pytest.raises(ValueError, match=r"ep=2 shares out experts, and .* qwen3 has none"):
        helix.load_model(GOLDEN / "qwen3", CONFIG(kvp=2, ep=2))
