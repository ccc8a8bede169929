"""Exact decoding on a mesh: sums over devices in the order of the ranks, at any number of rows.

Where no GPU is, with the CPU's backends in place of the batch-invariant ones.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jspec
from jspec import BackendError, helix
from jspec.cuda_ffi import all_to_all as cuda
from jspec.decode.checks import check_exact
from jspec.dispatch import use_backends
from jspec.helix.attention import all_to_all_merge
from jspec.models.decoder import Decoder
from jspec.ops.all_to_all import all_reduce
from jspec.ops.exact import CHAIN_BACKEND
from jspec.ops.linear_chain import Sum
from jspec.policies import Dense
from tests.decode.test_exact import with_a_gpu
from tests.decode.test_exact_tokens import on_a_cpu
from tests.helix.test_decoding import CONFIG, DRAFTERS, TEXTS, model

__all__ = ["model", "on_a_cpu", "with_a_gpu"]  # fixtures

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
CUDA = {"block": 8, "exchange": "cuda"}
EXACT = {"linear": "exact_decode"}


def skip_without_messages(config: helix.HelixConfig) -> helix.HelixConfig:
    if reason := config.refuses_all_to_all():
        pytest.skip(reason)
    return config


@pytest.mark.parametrize(
    ("mesh", "exact", "reason"),
    [
        ({"kvp": 1}, "tokens", "mesh of one device; pass the model without a mesh"),
        ({}, "tokens", "exchange='xla' sums .* HelixConfig\\(exchange='cuda'\\) sums in that of"),
        ({"exchange": "cuda"}, "bits", 'XLA sums prompts over .*; pass exact="tokens"'),
        (
            {"exchange": "cuda", "block": 4},
            "tokens",
            "block=4 must be a multiple of 8 .*; leave it",
        ),
        (
            {"tpa": 2, "exchange": "cuda", "strategy": "tp"},
            "tokens",
            "strategy='tp' is to be compared with; take strategy='helix'",
        ),
    ],
    ids=["one", "exchange", "bits", "block", "strategy"],
)
def test_what_sums_in_another_order_is_refused(mesh, exact, reason, model, with_a_gpu):
    sharded = helix.shard(model, helix.HelixConfig(**{"kvp": 2} | mesh))
    with pytest.raises(BackendError, match=reason):
        check_exact(sharded, Dense(), exact)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, jnp.float16, "XLA sums float16 over devices; load the model in bfloat16"),
        ({"window": 8}, jnp.float32, "a layer with a sliding window has a ring on each device"),
    ],
    ids=["dtype", "window"],
)
def test_models_that_cannot_be_are_refused(changes, dtype, reason, with_a_gpu):
    layers = tuple(dataclasses.replace(spec, **changes) for spec in CONFIG.layers)
    config = dataclasses.replace(CONFIG, layers=layers)
    sharded = helix.shard(
        Decoder(config, dtype=dtype, rngs=nnx.Rngs(0)), helix.HelixConfig(kvp=2, **CUDA)
    )
    with pytest.raises(BackendError, match=reason):
        check_exact(sharded, Dense(), "tokens")


@pytest.mark.parametrize("name", ["ngram", "vegas"])
@pytest.mark.parametrize("mesh", [{"kvp": 2}, {"tpa": 2}], ids=str)
def test_drafts_on_a_mesh_have_the_tokens_of_plain_decoding(name, mesh, model, on_a_cpu):
    """That a mesh can be asked, and prefills each prompt alone; exact kernels: test_two_gpus.py."""
    sharded = helix.shard(model, skip_without_messages(helix.HelixConfig(**mesh, **CUDA)))
    generate = functools.partial(jspec.generate, sharded, TEXTS, exact="tokens")
    params = jspec.SamplingParams(max_new_tokens=12)
    plain = generate(params, draft=jspec.NoDraft())
    drafted = generate(params, draft=DRAFTERS[name], gamma=3)
    assert drafted.tokens == plain.tokens


def test_an_engine_on_a_mesh_has_them_too(model, on_a_cpu):
    """As above, of requests in slots."""
    sharded = helix.shard(model, skip_without_messages(helix.HelixConfig(kvp=2, **CUDA)))
    params, draft = jspec.SamplingParams(max_new_tokens=12), DRAFTERS["vegas"]
    plain = jspec.generate(sharded, TEXTS, params, draft=jspec.NoDraft(), exact="tokens")
    engine = jspec.Engine(sharded, slots=2, capacity=64, draft=draft, gamma=3, exact="tokens")
    requests = [engine.submit(text, params) for text in TEXTS]
    engine.run()
    assert tuple(request.tokens for request in requests) == tuple(plain.tokens)


def test_an_exact_chain_is_summed_by_cuda_alone():
    x, kernel = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)
    static = {"added": (None,), "gated": (False,)}
    xla, by_cuda = (
        CHAIN_BACKEND.supports(x, [(kernel, None, None, None)], **static, sums=(Sum("kvp", by),))
        for by in ("xla", "cuda")
    )
    assert xla == "an exact matmul is summed over devices by cuda alone, in the order of the ranks"
    assert by_cuda != xla


def messages(program: str, name: str) -> int:
    """How many messages a program sends by the target ``name``, in loops or not."""
    (length,) = re.findall(r"\blength=(\d+)", program) or ["1"]
    assert program.count(name) == 1
    return int(length)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
@pytest.mark.parametrize(("limit", "count"), [(2**20, 1), (16, 3), (8, 5)])
def test_a_sum_is_of_several_messages_where_one_is_too_large(limit, count, monkeypatch):
    """In the order of the ranks, as other orders have other bits; the last message is shorter."""
    monkeypatch.setattr(cuda, "MAX_BYTES", limit)
    config = skip_without_messages(helix.HelixConfig(kvp=4, **CUDA))
    rng = np.random.default_rng(0)
    x, add = (rng.normal(size=(4, 3, 3)).astype(np.float32) for _ in range(2))

    def reduce(x, add):
        return all_reduce(x[0], "kvp", by="cuda", add=add)

    run = jax.shard_map(
        reduce, mesh=config.mesh, in_specs=(P("kvp"), P()), out_specs=P(), check_vma=False
    )
    with use_backends(EXACT):
        total = jax.jit(run)(x, add[0])
        program = str(jax.make_jaxpr(run)(x, add[0]))
    want = add[0] + (((x[0] + x[1]) + x[2]) + x[3])
    assert (want != add[0] + (((x[3] + x[2]) + x[1]) + x[0])).any()
    np.testing.assert_array_equal(total, want)
    assert messages(program, "jspec_all_reduce") == count


def test_large_messages_are_one_after_the_other():
    """Calls at the same time would take each other's messages, or wait for ever."""
    config = skip_without_messages(helix.HelixConfig(kvp=2, **CUDA))
    x = np.random.default_rng(0).normal(size=(2, 256, 4096)).astype(np.float32)
    assert x[0].nbytes == 4 * cuda.MAX_BYTES
    run = jax.shard_map(
        lambda x: all_reduce(x[0], "kvp", by="cuda"),
        mesh=config.mesh,
        in_specs=P("kvp"),
        out_specs=P(),
        check_vma=False,
    )
    with use_backends(EXACT):
        run = jax.jit(run).lower(x).compile()
    for _ in range(10):
        np.testing.assert_array_equal(
            run(jax.device_put(x, run.input_shardings[0][0])), x[0] + x[1]
        )


@pytest.mark.parametrize(("limit", "count"), [(2**20, 1), (160, 3), (80, 5)])
def test_a_merge_is_of_several_messages_where_one_is_too_large(limit, count, monkeypatch):
    """A row sends two heads of 16 bytes in lines of 8, and a line more for each."""
    config = skip_without_messages(helix.HelixConfig(kvp=2, **CUDA))
    rng = np.random.default_rng(0)
    out, lse = rng.normal(size=(2, 1, 5, 4, 8)), rng.normal(size=(2, 1, 5, 4))
    arrays = [jnp.asarray(x, jnp.float32) for x in (out, lse)]

    def merge(out, lse):
        return all_to_all_merge(out[0], lse[0], "kvp", "cuda")

    run = jax.shard_map(
        merge, mesh=config.mesh, in_specs=P("kvp"), out_specs=P(None, None, "kvp"), check_vma=False
    )
    want = jax.jit(run)(*arrays)
    monkeypatch.setattr(cuda, "MAX_BYTES", limit)
    with use_backends(EXACT):
        # Another function, as JAX has traced the first.
        got = jax.jit(lambda *arrays: run(*arrays))(*arrays)
        program = str(jax.make_jaxpr(lambda *arrays: run(*arrays))(*arrays))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
    assert messages(program, "jspec_all_to_all_merge") == count
