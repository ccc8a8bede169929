"""Rivals of whole decoding give jspec's tokens on CPUs, and a reason where they cannot run."""

import dataclasses
import os
import sys
import types

import jax
import numpy as np
import pytest
from flax import nnx

import jspec
from bench.program import Absent
from bench.rivals import decoding, torch_step, torch_weights
from jspec.config import RopeScaling
from jspec.models.decoder import Decoder

NEW_TOKENS = 24
SIZES = {"vocab_size": 112, "hidden_size": 48, "intermediate_size": 40, "num_layers": 3}
SIZES |= {"num_heads": 6, "num_kv_heads": 2, "head_size": 16, "max_context": 128}
LLAMA3 = RopeScaling("llama3", factor=8.0, original_context=16)
YARN = RopeScaling("yarn", factor=4.0, original_context=16)
CASES = {
    "llama": {"tie_embeddings": True},
    "llama-biased": {
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "rope_scaling": LLAMA3,
        "rope_theta": 500.0,
    },
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen2-yarn": {"qkv_bias": True, "rope_scaling": YARN},
}
LENGTHS = (1, 40, 13, 2)


def random_model(case: str = "qwen2", **settings) -> Decoder:
    """A float32 decoder whose weights, biases and norms are all random."""
    config = jspec.ModelConfig.uniform(
        family=case.split("-")[0], **{**SIZES, **CASES[case], **settings}
    )
    model, rng = Decoder(config, rngs=nnx.Rngs(0)), np.random.default_rng(len(case))

    def drawn(x: jax.Array) -> jax.Array:
        values = rng.normal(size=x.shape) * (0.3 if x.ndim > 1 else 0.5) + (x.ndim == 1)
        return jax.numpy.asarray(values, x.dtype)

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(drawn, state))


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, SIZES["vocab_size"], size).tolist() for size in lengths]


def started(model: Decoder, new_tokens: int = NEW_TOKENS) -> jspec.DecodeState:
    return jspec.start_decoding(model, prompts(), jspec.SamplingParams(max_new_tokens=new_tokens))


def plain(model: Decoder) -> list[list[int]]:
    params = jspec.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [list(row) for row in jspec.generate(model, prompts(), params, draft=None).tokens]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_rivals_give_jspecs_tokens(case, monkeypatch):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = random_model(case)
    expected = plain(model)
    assert (
        len({token for row in expected for token in row}) > 20
    )  # of 112: rows do not repeat one token
    monkeypatch.setattr(decoding, "PREFILL_TOKENS", 80)  # several groups, one of them of two rows
    theirs = decoding.decode_transformers(model, prompts(), NEW_TOKENS, 2)
    assert theirs.tokens == expected
    assert len(theirs.decode_s_samples) == 2
    assert theirs.prefill_s > 0
    state = started(model)
    before = jax.device_get(state.cache)
    step = decoding.step_decoded(model, state, NEW_TOKENS, 2)
    assert step.tokens == expected
    assert (len(step.decode_s_samples), step.prefill_s) == (2, None)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.cache))


def flash_attn_with_kvcache(q, keys, values, *, k, v, cache_seqlens, num_splits, pack_gqa):
    """What FlashAttention-3's function of this name does: append at ``cache_seqlens``, attend."""
    assert (num_splits, pack_gqa, q.shape[1]) == (0, True, 1)
    for row, length in enumerate(cache_seqlens.tolist()):
        keys[row, length], values[row, length] = k[row, 0], v[row, 0]
    return torch_step.attended_eagerly(q, keys, values, cache_seqlens + 1)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_the_kernel_may_append(monkeypatch):
    torch = pytest.importorskip("torch")
    library = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", library)
    model = random_model()
    step = torch_step.Step(model, started(model), NEW_TOKENS, fused=False)
    step.append_in_kernel = True
    with torch.no_grad():
        torch_step.seconds(step, step, NEW_TOKENS)
    assert step.tokens.T.tolist() == plain(model)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_bfloat16_weights_are_copied_as_they_are():
    torch = pytest.importorskip("torch")
    model = random_model()
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), state))
    tensors = torch_weights.weights(model)
    assert {x.dtype for x in tensors.values()} == {torch.bfloat16}
    embedding = tensors["model.embed_tokens.weight"].float().numpy()
    np.testing.assert_array_equal(embedding, np.asarray(model.embedding[...], np.float32))
    step = decoding.step_decoded(model, started(model), NEW_TOKENS, 1)
    assert np.shape(step.tokens) == (len(LENGTHS), NEW_TOKENS)


@pytest.mark.parametrize("name", decoding.NAMES)
def test_where_a_package_is_missing_the_rival_is_absent(name, monkeypatch):
    def missing(module):
        raise ModuleNotFoundError(name=module)

    model = random_model()
    state = started(model)
    monkeypatch.setattr("bench.rivals.common.importlib.import_module", missing)
    rival = (
        decoding.decode_transformers(model, prompts(), 2)
        if name == "transformers"
        else decoding.decode_torch_graph(model, state, 2)
    )
    assert rival == Absent(name, "torch is not installed")


def test_refusals_say_what_the_rivals_cannot_compute():
    model = random_model()
    assert torch_weights.refusal(model) is None
    other_family = dataclasses.replace(model.config, family="qwen3")
    for config, reason in (
        (other_family, "it computes llama and qwen2, not family='qwen3'"),
        (dataclasses.replace(model.config, qk_norm=True), "it computes no model with qk_norm"),
    ):
        other = Decoder(config, rngs=nnx.Rngs(0))
        assert torch_weights.refusal(other) == reason
    state = started(model)
    assert torch_step.refusal(state, NEW_TOKENS) is None
    assert "need 296 slots and the state has 256" in str(torch_step.refusal(state, 257))


def test_errors_are_reasons(monkeypatch):
    model = random_model()

    def raising(error):
        def call(*args, **settings):
            raise error

        return call

    monkeypatch.setattr(decoding, "module", raising(RuntimeError("CUDA out of memory.")))
    rival = decoding.decode_transformers(model, prompts(), 24)
    assert rival == Absent(
        "transformers", "out of memory with 4 rows of 64 slots, a cache of 0.0 GB"
    )
    monkeypatch.setattr(decoding, "module", raising(RuntimeError("no kernel")))
    rival = decoding.decode_transformers(model, prompts(), 24)
    assert rival == Absent("transformers", "failed: RuntimeError: no kernel", failed=True)
    with pytest.raises(ValueError, match="new_tokens=1 must be at least 2"):
        decoding.decode_transformers(model, prompts(), 1)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_a_graph_needs_a_gpu():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    model = random_model()
    rival = decoding.decode_torch_graph(model, started(model), 2)
    assert rival == Absent("torch_graph", "CUDA graphs need a GPU")


def test_the_first_way_that_runs_names_the_errors_before_it():
    def broken():
        raise RuntimeError("no compiler")

    ways = {"compiled": broken, "not compiled": lambda: 3}
    expected = "not compiled (failed: RuntimeError: no compiler)", 3
    assert decoding.first_that_runs(ways) == expected
    with pytest.raises(RuntimeError, match="no compiler"):
        decoding.first_that_runs({"compiled": broken})


@pytest.mark.parametrize("before", [None, ""])
def test_triton_has_a_cache_while_torch_compiles(monkeypatch, before):
    """As jax_triton leaves it, torch.compile fails for want of a folder."""
    if before is None:
        monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    else:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    with decoding.triton_cache():
        folder = os.environ["TRITON_CACHE_DIR"]
        assert os.path.isdir(folder)
    assert os.environ.get("TRITON_CACHE_DIR") == before
    assert not os.path.exists(folder)
