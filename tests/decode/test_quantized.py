"""Drafts with weights of 8 and 4 bits: the output stays the target's own."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import Chain, GuidedDraft, ModelDraft, SelfDraft, SuffixDraft, named_draft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.models.quantized import quantized_copy
from jspec.ops.quantized import MXFP4, Quantized
from jspec.policies import Dense, Vegas
from tests.conftest import ONE_LAYER, TINY, make_decoder
from tests.decode.common import full_logits, prompts, requests
from tests.policies.common import MATRIX

# All of whose inputs are blocks of MXFP4.
WHOLE = dataclasses.replace(TINY, intermediate_size=64)
GUIDED = GuidedDraft(Vegas(budget=6, least=0), quantized="int8")


@pytest.mark.parametrize(
    "draft",
    [
        pytest.param(SelfDraft(MATRIX["quest"], quantized="fp8"), marks=pytest.mark.exhaustive),
        GUIDED,
        pytest.param(dataclasses.replace(GUIDED, quantized="mxfp4"), marks=pytest.mark.slow),
        pytest.param(Chain(SuffixDraft(), GUIDED, inner=2, rounds=2), marks=pytest.mark.slow),
        pytest.param(
            Chain(SuffixDraft(), SelfDraft(MATRIX["quest"], quantized="mxfp4"), inner=2, rounds=2),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["fp8-quest", "int8-vegas", "mxfp4-vegas", "int8-chain", "mxfp4-chain"],
)
def test_greedy_tokens_are_those_of_plain_decoding(draft):
    model = make_decoder(WHOLE, seed=1, embedding=400.0, head=4.0)
    plain = generate(model, prompts(), requests(), draft=None)
    got = generate(model, prompts(), requests(), draft=draft, gamma=3)
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


def test_verification_reads_the_weights_of_the_target(tiny):
    """A copy of another model drafts what is rejected, and nothing else changes."""
    other = quantized_copy(make_decoder(ONE_LAYER, seed=9), "int8")
    params = SamplingParams(max_new_tokens=12)
    draft = SelfDraft(Dense(), quantized="int8")
    plain = generate(tiny, prompts((9, 20)), params, draft=None)
    got = generate(tiny, prompts((9, 20)), params, draft=draft, draft_model=other)
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate < 0.9


def test_a_copy_is_near_and_shares_all_else(tiny):
    copy = quantized_copy(tiny, "int8")
    mine, whole = (jax.tree.leaves(model) for model in (copy, tiny))
    shared = {id(leaf) for leaf in whole}
    fresh = [leaf for leaf in mine if id(leaf) not in shared]
    # A kernel and its scales, of four matrices in each layer and of the head.
    assert sorted({leaf.dtype.name for leaf in fresh}) == ["float32", "int8"]
    assert len(fresh) == 2 * (4 * len(tiny.config.layers) + 1)
    weights = sum(leaf.size for leaf in whole) - sum(
        leaf.size for leaf in mine if id(leaf) in shared
    )
    assert sum(leaf.nbytes for leaf in fresh if leaf.dtype.name == "int8") == weights
    assert isinstance(copy.layers[0].mlp.down.kernel.get_value(), Quantized)
    tokens = np.array(prompts((24,)), np.int32)
    got, want = (np.float64(full_logits(model, tokens)) for model in (copy, tiny))
    assert 0 < np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_a_copy_in_mxfp4_reads_4_bits_a_weight():
    model = make_decoder(WHOLE)
    copy = quantized_copy(model, "mxfp4")
    kernel = copy.layers[0].mlp.down.kernel.get_value()
    assert isinstance(kernel, MXFP4)
    shared = {id(leaf) for leaf in jax.tree.leaves(model)}
    fresh = [leaf for leaf in jax.tree.leaves(copy) if id(leaf) not in shared]
    copied = {id(leaf) for leaf in jax.tree.leaves(copy)}
    weights = sum(leaf.size for leaf in jax.tree.leaves(model) if id(leaf) not in copied)
    assert sum(leaf.nbytes for leaf in fresh) == weights * 17 / 32
    tokens = np.array(prompts((24,)), np.int32)
    got, want = (full_logits(each, tokens).ravel() for each in (copy, model))
    assert 0.9 < np.corrcoef(got, want)[0, 1] < 0.999


def test_inputs_that_are_no_blocks_have_no_mxfp4(tiny):
    with pytest.raises(ValueError, match=r"48 inputs has no MXFP4: .* multiple of 32; take int8"):
        quantized_copy(tiny, "mxfp4")


def test_settings_are_named_and_checked(tiny):
    assert named_draft("quest:page=4,quantized=int8") == SelfDraft(
        named_draft("quest:page=4").cache_policy, quantized="int8"
    )
    assert named_draft("vegas:budget=6,quantized=int8,least=0") == GUIDED
    narrow = dataclasses.replace(GUIDED, quantized="mxfp4")
    assert named_draft("vegas:budget=6,quantized=mxfp4,least=0") == narrow
    assert not SelfDraft().traits.makes_model
    assert ModelDraft().traits.needs_model
    for name in ("dense", "vegas"):
        with pytest.raises(
            ValueError, match=f"draft {name}: quantized='int4' must be one of int8, fp8, mx"
        ):
            named_draft(f"{name}:quantized=int4")
    config = StepConfig(2, SelfDraft(quantized="int8"))
    with pytest.raises(ValueError, match=r"pass draft\.prepare\(jspec\.Models\(target\)\)"):
        start_decoding(tiny, prompts((9,)), config=config)
    start_decoding(config.draft.prepare(Models(tiny)), prompts((9,)), config=config)
    with pytest.raises(ValueError, match="which is one model; pass second without quantized"):
        Chain(ModelDraft(), SelfDraft(quantized="int8"))
    with pytest.raises(TypeError, match=r"type object is no jspec\.Decoder"):
        quantized_copy(object(), "int8")  # pyright: ignore[reportArgumentType]
