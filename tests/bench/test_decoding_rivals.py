"""Rivals of whole decoding give jspec's tokens on CPUs, and a reason where they cannot run."""

import dataclasses
import os
import sys
import types

import jax
import numpy as np
import pytest

import jspec
from bench.decode import shapes
from bench.decode.catalogue import MODELS
from bench.program import Absent
from bench.rivals import decoding, torch_pass, torch_step
from jspec.config import ModelConfig

NEW_TOKENS = 24
VOCABULARY = 112
LENGTHS = (2, 40, 13, 3)
ROPES = {
    "llama": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "qwen2": {"rope_type": "yarn", "factor": 4.0},
}


@pytest.fixture(scope="module", params=ROPES)
def checkpoint(request, tmp_path_factory):
    """A float32 checkpoint of a family as transformers writes it, all of it random."""
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("transformers")
    kind = {"llama": library.LlamaForCausalLM, "qwen2": library.Qwen2ForCausalLM}[request.param]
    rope = {"rope_theta": 500.0, "original_max_position_embeddings": 16} | ROPES[request.param]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = kind.config_class(
        **sizes, head_dim=8, max_position_embeddings=128, rope_parameters=rope
    )
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), 0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path, jspec.load_model(path, dtype="float32")


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCABULARY, size).tolist() for size in LENGTHS]


def started(model: jspec.Decoder) -> jspec.DecodeState:
    params = jspec.SamplingParams(max_new_tokens=NEW_TOKENS)
    return jspec.start_decoding(model, prompts(), params)


def plain(model: jspec.Decoder) -> list[list[int]]:
    params = jspec.SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    rows = [list(row) for row in jspec.generate(model, prompts(), params, draft=None).tokens]
    assert len({token for row in rows for token in row}) > 20  # rows do not repeat one token
    return rows


def flash_attn_with_kvcache(
    q, keys, values, *, k, v, cache_seqlens, num_splits, pack_gqa, causal=False
):
    """What FlashAttention-3's function of this name does: append at ``cache_seqlens``, attend."""
    torch = sys.modules["torch"]
    tokens = q.shape[1]
    assert (num_splits, pack_gqa, causal) == (0, True, tokens > 1)
    for row, length in enumerate(cache_seqlens.tolist()):
        keys[row, length : length + tokens], values[row, length : length + tokens] = k[row], v[row]
    ends = cache_seqlens[:, None] + torch.arange(tokens)
    mask = (torch.arange(keys.shape[1]) <= ends[..., None])[:, None]
    heads = (x.transpose(1, 2) for x in (q, keys, values))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_rivals_give_jspecs_tokens(checkpoint, monkeypatch):
    path, model = checkpoint
    expected = plain(model)
    decoded = decoding.decode_transformers(path, model, prompts(), NEW_TOKENS)
    assert decoded.tokens == expected
    assert len(decoded.decode_s_samples) == decoding.REPEATS
    assert decoded.prefill_s > 0
    library = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", library)
    state = started(model)
    before = jax.device_get(state.cache)
    theirs = decoding.load(path, model)
    with sys.modules["torch"].no_grad():
        start = torch_step.Start.of(state, model.config.num_layers, theirs.device)
        tensors = dict(theirs.named_parameters())
        step = torch_step.Step(tensors, model.config, start, NEW_TOKENS, fused=False)
        torch_step.seconds(step, step, NEW_TOKENS)
    assert step.tokens[..., 0].T.tolist() == expected
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.cache))
    rival = decoding.decode_torch_graph(path, model, state, 2)
    assert rival == Absent("torch_graph", "CUDA graphs need a GPU")


@pytest.mark.parity
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_pass_has_jspecs_logits(tokens, monkeypatch):
    """With QK norms, as Qwen3's; without that of queries they differ."""
    pytest.importorskip("torch")
    library = types.SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", library)
    monkeypatch.setattr(torch_pass, "CONTEXT", 40)
    config = ModelConfig.uniform(
        vocab_size=112,
        hidden_size=48,
        intermediate_size=40,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_size=16,
        qk_norm=True,
        family="qwen3",
    )
    model = shapes.random_model(config)
    torch = sys.modules["torch"]
    with torch.no_grad():
        assert torch_pass.compared(model, 2, tokens, fused=False) < 0.02
        start = torch_pass.noise(model, 2, 40, tokens, torch.device("cpu"))
    assert start.token.shape == (2, tokens)
    assert start.keys[0].shape[1] >= 40 + torch_pass.STEPS + tokens - 1
    unread = torch_pass.LAYER | {"attention.q_norm.scale": "unread"}
    monkeypatch.setattr(torch_pass, "LAYER", unread)
    with torch.no_grad():
        assert torch_pass.compared(model, 2, tokens, fused=False) > 0.05


def test_a_pass_that_torch_does_not_compute_is_a_reason():
    model = shapes.random_model(dataclasses.replace(MODELS["tiny"], sinks=True))
    reason = "it computes llama, qwen2, qwen3 without windows and experts, not llama"
    assert torch_pass.measured(model, 1, 40, 1) == Absent("torch_graph", reason)


@pytest.fixture
def fake_torch(monkeypatch):
    """Errors as torch's, without torch."""

    def replace(error):
        def call(*args, **settings):
            raise error

        monkeypatch.setattr(decoding, "module", call)

    return replace


def test_what_rivals_cannot_do_is_a_reason(fake_torch, tmp_path):
    model, _ = jspec.load_bundled()
    for error, expected in (
        (ModuleNotFoundError(name="torch"), Absent("transformers", "torch is not installed")),
        (
            RuntimeError("no kernel"),
            Absent("transformers", "failed: RuntimeError: no kernel", failed=True),
        ),
        (
            RuntimeError("CUDA out of memory."),
            Absent("transformers", "failed: RuntimeError: CUDA out of memory."),
        ),
    ):
        fake_torch(error)
        assert decoding.decode_transformers(tmp_path, model, [[1]], 2) == expected


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
