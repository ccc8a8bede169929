"""Rivals of whole decoding give jspec's tokens on CPUs, and a reason where they cannot run."""

import os
import sys
import types

import jax
import numpy as np
import pytest

import jspec
from bench.program import Absent
from bench.rivals import decoding, torch_step

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


def flash_attn_with_kvcache(q, keys, values, *, k, v, cache_seqlens, num_splits, pack_gqa):
    """What FlashAttention-3's function of this name does: append at ``cache_seqlens``, attend."""
    torch = sys.modules["torch"]
    assert (num_splits, pack_gqa, q.shape[1]) == (0, True, 1)
    for row, length in enumerate(cache_seqlens.tolist()):
        keys[row, length], values[row, length] = k[row, 0], v[row, 0]
    mask = (torch.arange(keys.shape[1]) <= cache_seqlens[:, None])[:, None, None]
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
        step = torch_step.Step(theirs, model.config, state, NEW_TOKENS, fused=False)
        torch_step.seconds(step, step, NEW_TOKENS)
    assert step.tokens.T.tolist() == expected
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.cache))
    rival = decoding.decode_torch_graph(path, model, state, 2)
    assert rival == Absent("torch_graph", "CUDA graphs need a GPU")


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
