"""Every family on a mesh has the tokens of one device: latents, experts, sinks, windows, norms."""

import functools

import jax
import pytest

import jspec
from jspec import helix
from tests.decode.common import NGRAM, prompts
from tests.models.goldens import GOLDEN

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
VEGAS = jspec.GuidedDraft(jspec.policies.Vegas(budget=8))
SPARSE = jspec.SelfDraft(jspec.policies.ExactTopK(budget=8, sinks=1, recent=2, dense_layers=0))
TEXTS = prompts((40, 1, 17), vocabulary=112)
CONFIG = functools.partial(helix.HelixConfig, block=4)


def generated(model, draft) -> tuple[tuple[int, ...], ...]:
    params = jspec.SamplingParams(max_new_tokens=16, ignore_eos=True)
    gamma = 0 if draft is None else 3
    return jspec.generate(model, TEXTS, params, draft=draft, gamma=gamma).tokens


@functools.cache
def alone(name: str = "deepseek_v3") -> tuple[tuple[int, ...], ...]:
    return generated(jspec.load_model(GOLDEN / name), None)


@pytest.mark.parametrize(
    ("kvp", "ep", "draft"),
    [
        (4, 2, NGRAM),
        pytest.param(4, 4, SPARSE, marks=pytest.mark.slow),
        pytest.param(2, 1, None, marks=pytest.mark.slow),
        pytest.param(
            2, 2, jspec.GuidedDraft(jspec.policies.Vegas(budget=8)), marks=pytest.mark.slow
        ),
    ],
    ids=["grid", "experts", "channels", "vegas"],
)
def test_tokens_are_those_of_one_device(kvp, ep, draft):
    model = helix.load_model(GOLDEN / "deepseek_v3", CONFIG(kvp=kvp, ep=ep))
    gate_up = model.model.layers[1].mlp.experts.gate_up.kernel.get_value()
    stored = {shard.data.shape for shard in gate_up.addressable_shards}
    assert stored == {(8 // ep, 32, 2, 12 // (kvp // ep))}
    assert generated(model, draft) == alone()


VEGAS = jspec.GuidedDraft(jspec.policies.Vegas(budget=8, least=0))


@pytest.mark.parametrize(
    ("name", "axes", "draft"),
    [
        pytest.param("gpt_oss", {"kvp": 2, "tpa": 2, "ep": 4}, None, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"kvp": 2, "tpa": 2}, VEGAS, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"kvp": 4}, NGRAM, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"kvp": 2, "strategy": "medha"}, None, marks=pytest.mark.slow),
        pytest.param("gemma2", {"kvp": 2, "tpa": 2}, NGRAM, marks=pytest.mark.slow),
        pytest.param("gemma3", {"kvp": 4}, VEGAS, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"kvp": 2, "tpa": 2}, SPARSE, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {"tpa": 2, "ep": 2}, NGRAM, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {"kvp": 2, "tpa": 2, "ep": 2}, NGRAM, marks=pytest.mark.slow),
        pytest.param("granite", {"kvp": 2, "tpa": 2}, SPARSE, marks=pytest.mark.slow),
        pytest.param("olmo3", {"kvp": 4}, NGRAM, marks=pytest.mark.slow),
        pytest.param("smollm3", {"kvp": 2, "tpa": 2}, None, marks=pytest.mark.slow),
        pytest.param("phi3", {"kvp": 4}, VEGAS, marks=pytest.mark.slow),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_tokens_of_other_families_are_those_of_one_device(name, axes, draft):
    model = helix.load_model(GOLDEN / name, CONFIG(**axes))
    assert generated(model, draft) == alone(name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["gather", "medha"])
def test_what_helix_is_compared_with_has_the_same_tokens(strategy):
    model = helix.load_model(GOLDEN / "deepseek_v3", CONFIG(kvp=2, strategy=strategy))
    assert generated(model, None) == alone()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="tpa=2 is more than the 1 key-value heads of layer 0"):
        helix.load_model(GOLDEN / "deepseek_v2", CONFIG(tpa=2))
    with pytest.raises(ValueError, match="moe_intermediate_size=12 does not divide into tpf=8"):
        helix.load_model(GOLDEN / "deepseek_v2", CONFIG(kvp=8))
    with pytest.raises(ValueError, match=r"ep=2 shares out experts, and .* qwen3 has none"):
        helix.load_model(GOLDEN / "qwen3", CONFIG(kvp=2, ep=2))
    with pytest.raises(ValueError, match=r"tpa=2 shares out heads, over all of which .* olmo3"):
        helix.load_model(GOLDEN / "olmo3", CONFIG(tpa=2))
