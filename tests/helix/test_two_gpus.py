"""On two GPUs, whose kernels and messages virtual CPU devices stand in for elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jspec
from jspec import helix
from jspec.config import ModelConfig
from jspec.cuda_ffi import all_to_all, linear
from jspec.helix.attention import all_to_all_merge
from jspec.models.decoder import Decoder
from jspec.ops.attention.merge import merge_attention
from tests.helix import test_attention, test_overlap
from tests.helix.test_decoding import DRAFTERS, GREEDY, NGRAM, alone, decoded, model

__all__ = ["alone", "model"]  # fixtures

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or jax.device_count() < 2, reason="needs two GPUs"
)


@pytest.mark.parametrize(
    ("kvp", "tpa", "heads", "tokens", "strategy"),
    [
        (2, 1, "gqa4", 4, "helix"),
        (2, 1, "mqa", 1, "tp"),
        (1, 2, "gqa", 9, "helix"),
        (2, 1, "gqa", 4, "gather"),
        (2, 1, "gqa", 4, "medha"),
    ],
    ids=str,
)
def test_attention_is_that_of_numpy(kvp, tpa, heads, tokens, strategy):
    test_attention.check(kvp, tpa, heads, tokens, strategy)


@pytest.mark.parametrize("by", ["xla", "pallas", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merge_has_the_bits_of_one(dtype, by):
    """``cuda`` has an exponential of its own."""
    mesh = helix.HelixConfig(kvp=2, exchange=by)
    outs = jnp.asarray(test_attention.random(2, 2, 3, 16, 64), dtype)
    lses = jnp.asarray(test_attention.random(2, 2, 3, 16, seed=1) * 20)
    run = jax.shard_map(
        lambda out, lse: all_to_all_merge(out[0], lse[0], "kvp", by),
        mesh=mesh.mesh,
        in_specs=P("kvp"),
        out_specs=P(None, None, mesh.axes),
    )
    result, alone = jax.jit(run)(outs, lses), jax.jit(merge_attention)(outs, lses)
    near = {"float32": 1e-6, "bfloat16": 2**-8}[dtype] if by == "cuda" else 0
    for x, y in zip(result, alone, strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=near, atol=near)


def chunks_and_one(*, latent: bool) -> tuple[np.ndarray, np.ndarray]:
    """Attention of which two chunks are exchanged, or all at once."""
    configs = (helix.HelixConfig(kvp=2, block=4, overlap=n) for n in (2, 1))
    two, one = (test_overlap.attended(config, 1, latent=latent) for config in configs)
    return two, one


def test_chunks_have_the_bits_of_one_message():
    np.testing.assert_array_equal(*chunks_and_one(latent=False))


def test_chunks_of_latents_are_near_one_message():
    """The product that makes values of them sums fewer rows in another order."""
    np.testing.assert_allclose(*chunks_and_one(latent=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kvp", "tpa"), [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("name", ["plain", "hata", "vegas"])
def test_greedy_tokens_are_those_of_one(name, kvp, tpa, model, alone):
    sharded = helix.shard(model, helix.HelixConfig(kvp=kvp, tpa=tpa, block=4))
    assert decoded(sharded, DRAFTERS[name], GREEDY)[0] == alone


@pytest.mark.parametrize(
    ("mesh", "by"), [({"kvp": 2}, "pallas"), ({"kvp": 2}, "cuda"), ({"tpa": 2}, "cuda")], ids=str
)
@pytest.mark.parametrize("name", ["plain", "hata"])
def test_one_sided_messages_have_the_tokens_of_one(name, mesh, by, model, alone):
    sharded = helix.shard(model, helix.HelixConfig(block=4, exchange=by, **mesh))
    assert decoded(sharded, DRAFTERS[name], GREEDY)[0] == alone


@pytest.fixture(scope="module")
def wide() -> Decoder:
    """In bfloat16, whose logits have near-ties, and of sizes that the exact kernels take."""
    config = ModelConfig.uniform(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1024,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_size=64,
    )
    return Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("limit", [2**20, 2**13], ids=["one message", "several"])
@pytest.mark.parametrize(("kvp", "tpa"), [(2, 1), (1, 2)], ids=str)
def test_exact_drafts_have_the_tokens_of_plain_decoding(kvp, tpa, limit, wide, monkeypatch):
    """Also where those of plain decoding are one message, and those of verification several."""
    for module in (all_to_all, linear):
        monkeypatch.setattr(module, "MAX_BYTES", limit)
    jax.clear_caches()  # programs with the other limit
    on_mesh = helix.HelixConfig(kvp=kvp, tpa=tpa, exchange="cuda")
    sharded, params = helix.shard(wide, on_mesh), jspec.SamplingParams(max_new_tokens=200)
    texts = [np.arange(n, 3 * n).tolist() for n in (300, 40, 170, 5)]

    def tokens(draft, gamma: int) -> list[list[int]]:
        settings = {"draft": draft, "gamma": gamma, "exact": "tokens"}
        return jspec.generate(sharded, texts, params, **settings).tokens

    plain = tokens(jspec.NoDraft(), 0)
    for draft in (NGRAM, DRAFTERS["vegas"]):
        for gamma in (1, 5):
            assert tokens(draft, gamma) == plain


def test_chunks_have_the_tokens_of_one_message(model, alone):
    sharded = helix.shard(model, helix.HelixConfig(kvp=2, block=4, overlap=2))
    assert decoded(sharded, NGRAM, GREEDY)[0] == alone
