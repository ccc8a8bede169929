"""Latent attention and mixtures of experts: settings, experts by brute force, and generation."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jspec import (
    CheckpointError,
    Decoder,
    Experts,
    Latent,
    LayerSpec,
    NgramDraft,
    SamplingParams,
    SelfDraft,
    generate,
    load_model,
    save_model,
)
from jspec.models.experts import MixtureOfExperts
from jspec.models.families import model_config
from jspec.ops.norm import RMS
from jspec.policies import Dense, ExactTopK
from tests.models.goldens import GOLDEN
from tests.models.helpers import assert_equal, parameters
from tests.parameters import default_run

V2, V3 = (
    json.loads((GOLDEN / name / "config.json").read_text())
    for name in ("deepseek_v2", "deepseek_v3")
)


def test_settings_of_v2():
    config = model_config(
        {**V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    )
    assert config.latent == Latent(24, 8, 12, 16)
    assert config.layers == (LayerSpec(1, 32, 24, values_in_keys=True, scale=20**-0.5),) * 2
    expected = Experts(8, 3, 12, 12, dense_layers=(0,), groups=4, chosen_groups=2, factor=1.7)
    assert config.experts == expected
    one_group = model_config({**V2, "n_group": 4, "topk_group": 2})
    assert one_group.experts == dataclasses.replace(expected, groups=1, chosen_groups=1)


def test_settings_of_v3():
    config = model_config(V3)
    assert config.latent == Latent(24, 8, 12, 16, query_rank=20)
    temperature = 0.1 * V3["rope_parameters"]["mscale_all_dim"] * np.log(4.0) + 1
    np.testing.assert_allclose(config.layers[0].scale, 20**-0.5 * temperature**2)
    assert config.experts == Experts(
        *(8, 3, 12, 24),
        dense_layers=(0,),
        score="sigmoid",
        groups=4,
        chosen_groups=2,
        group_score="two_highest",
        corrected=True,
        normalized=True,
        factor=1.7,
    )
    # As the files of the hub have it.
    rope = {**V3["rope_parameters"], "type": "yarn"}
    old = {key: value for key, value in V3.items() if key != "rope_parameters"}
    old |= {"rope_theta": rope.pop("rope_theta"), "moe_layer_freq": 1, "ep_size": 1}
    old |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_scaling": rope}
    assert model_config(old) == config


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (
            V2,
            {"scoring_func": "sigmoid"},
            "scoring_func='sigmoid' is not supported; jspec has softmax",
        ),
        (
            V2,
            {"topk_method": "noaux_tc"},
            "topk_method='noaux_tc' is not supported; jspec has greedy",
        ),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob=true is not supported"),
        (V2, {"attention_bias": True}, "attention_bias=true is not supported"),
        (V2, {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; jspec has 1"),
        (
            V3,
            {"topk_method": "greedy"},
            "topk_method='greedy' is not supported; jspec has noaux_tc",
        ),
        (V3, {"rope_interleave": False}, "rope_interleave=False is not supported"),
        (V3, {"n_group": 3}, "routed=8 must be a multiple of groups=3"),
        (V3, {"topk_group": 5}, "chosen_groups=5 must be at most groups=4"),
        (V3, {"num_experts_per_tok": 5}, "chosen=5 must be at most 4, the experts of 2 groups"),
        (V3, {"n_group": 8, "topk_group": 4}, "'two_highest' needs groups of at least two experts"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be a whole number"),
        (V3, {"kv_lora_rank": None}, "kv_lora_rank is null; it must be a positive integer"),
        (V3, {"qk_rope_head_dim": 7}, "rope_size=7 must be even for RoPE"),
    ],
)
def test_refused(config, change, reason):
    with pytest.raises(CheckpointError, match=reason):
        model_config({**config, **change})


def test_layers_that_do_not_fit_the_latent_are_refused():
    config = model_config(V3)
    with pytest.raises(ValueError, match=r"layers\[0\]: kv_heads, key_size, value_size, .* latent"):
        dataclasses.replace(config, latent=dataclasses.replace(config.latent, rank=16))
    with pytest.raises(ValueError, match="experts=3 must be Experts or None"):
        dataclasses.replace(config, experts=3)


def swiglu(x, gate, up, down):
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def by_brute_force(x, mixture: MixtureOfExperts, settings: Experts):
    """One token and one expert at a time, in float64."""
    arrays = {name: np.asarray(value, np.float64) for name, value in parameters(mixture).items()}
    out = np.zeros_like(x)
    for m, token in enumerate(x):
        logits = token @ arrays["router.kernel"]
        scores = 1 / (1 + np.exp(-logits))
        if settings.score == "softmax":
            scores = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        ranked = scores + arrays.get("router.correction", 0)
        each = settings.routed // settings.groups
        best = {"highest": 1, "two_highest": 2}[settings.group_score]
        groups = [
            np.sort(ranked[g * each : (g + 1) * each])[-best:].sum() for g in range(settings.groups)
        ]
        open_groups = np.argsort(groups)[::-1][: settings.chosen_groups]
        allowed = [e for e in range(settings.routed) if e // each in open_groups]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[: settings.chosen]
        weights = scores[chosen]
        if settings.normalized:
            weights = weights / weights.sum()
        for expert, weight in zip(chosen, weights * settings.factor, strict=True):
            gate, up = np.moveaxis(arrays["experts.gate_up.kernel"][expert], 1, 0)
            out[m] += weight * swiglu(token, gate, up, arrays["experts.down.kernel"][expert])
        if settings.shared_size:
            gate, up = np.moveaxis(arrays["shared.gate_up.kernel"], 1, 0)
            out[m] += swiglu(token, gate, up, arrays["shared.down.kernel"])
    return out


@pytest.mark.parametrize(
    "settings",
    [
        Experts(6, 2, 10, factor=0.5),
        Experts(1, 1, 10, shared_size=7, normalized=True),
        Experts(12, 5, 4, 9, score="sigmoid", groups=4, chosen_groups=2, group_score="two_highest",
                corrected=True, normalized=True, factor=2.5),
    ],
    ids=["softmax", "one-expert", "groups"],
)  # fmt: skip
def test_a_mixture_equals_its_experts_one_by_one(settings):
    rng = np.random.default_rng(0)
    mixture = MixtureOfExperts(16, settings, dtype=jnp.float32, rngs=nnx.Rngs(0))
    if settings.corrected:
        mixture.router.correction = nnx.Param(jnp.asarray(rng.normal(0, 0.2, 12), jnp.float32))
    x = rng.standard_normal((2, 9, 16))
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    expected = x + by_brute_force(normed.reshape(-1, 16), mixture, settings).reshape(x.shape)
    run = jax.jit(lambda mixture, x: mixture(x, RMS(jnp.ones(16), 1e-6)))
    got = run(mixture, x.astype(np.float32))
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_layers_behind_the_last_are_left_out(tmp_path):
    """Files of DeepSeek-V3 have a layer that predicts one token further."""
    path = shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    further = {
        name.replace("layers.1.", "layers.2."): value
        for name, value in tensors.items()
        if "layers.1." in name
    }
    further["model.layers.2.eh_proj.weight"] = np.zeros((4, 4), np.float32)
    save_file({**tensors, **further}, path / "model.safetensors")
    assert_equal(load_model(path), parameters(load_model(GOLDEN / "deepseek_v3")))
    lacking = {name: value for name, value in tensors.items() if "experts.5.up" not in name}
    save_file(lacking, path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"lacks 'model.layers.1.mlp.experts.5.up_proj.weight'"
    ):
        load_model(path)


def test_a_saved_model_comes_back_with_its_corrections_in_float32(tmp_path):
    model = load_model(GOLDEN / "deepseek_v3", dtype=jnp.bfloat16)
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype=jnp.bfloat16)
    assert again.config == model.config
    assert_equal(again, parameters(model))
    (name,) = (name for name in parameters(again) if name.endswith("correction"))
    stored = load_file(GOLDEN / "deepseek_v3" / "model.safetensors")
    expected = stored["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(parameters(again)[name], expected)


@pytest.mark.parametrize(
    "draft",
    default_run(
        {
            "ngram": NgramDraft(),
            # An engine decodes this family by the same drafts.
            "top-k": SelfDraft(ExactTopK(budget=24, dense_layers=0)),
            "dense": SelfDraft(Dense()),
        },
        "dense",
        slow=["top-k"],
    ),
)
def test_drafts_change_no_token(draft):
    model: Decoder = load_model(GOLDEN / "deepseek_v3")
    prompts = [list(range(3, 60)), [9, 8, 7]]
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    plain = generate(model, prompts, params, draft=None, gamma=0)
    drafted = generate(model, prompts, params, draft=draft, gamma=3)
    assert drafted.tokens == plain.tokens
    assert drafted.stats.acceptance_rate > 0 or isinstance(draft, NgramDraft)


def test_the_cache_holds_one_latent_a_token():
    model = load_model(GOLDEN / "deepseek_v2")
    shapes = {name: value.shape for name, value in parameters(model).items()}
    assert shapes["layers.1.attention.kv_up.kernel"] == (24, 4 * (12 + 16))
    assert shapes["layers.1.mlp.experts.gate_up.kernel"] == (8, 32, 2, 12)
    # Whatever rms_norm_eps says of the other norms, here 1e-5.
    assert model.layers[1].attention.kv_norm.eps == 1e-6
    recorded = []

    def attend(layer, q, k, v, cache, *, up):
        recorded.append((q.shape, k.shape, v, up.shape))
        return jnp.zeros((*q.shape[:3], 16), q.dtype), cache

    jax.eval_shape(lambda: model(jnp.zeros((1, 5), int), jnp.zeros((1, 5), int), attend, None)[0])
    assert recorded == [((1, 5, 4, 32), (1, 5, 1, 32), None, (4, 24, 16))] * 2
