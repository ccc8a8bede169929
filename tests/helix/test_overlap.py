"""HOP-B: rows that are exchanged in chunks have the bits of rows that are exchanged at once."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jspec
from jspec import helix
from jspec.cache import Cache
from jspec.config import LayerSpec
from jspec.helix import HelixConfig, cache_specs, layouts_on, part_of
from jspec.helix.attention import OVERLAPPED, Exchange
from jspec.models.decoder import Decoder
from jspec.policies.attend import SelectedAttend
from tests.helix.test_attention import random
from tests.helix.test_decoding import CONFIG, DRAFTERS, GREEDY, SPARSE, decoded

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
BATCH, HEADS, SIZE, CAPACITY = 5, 8, 16, 64
LENGTHS = (0, 1, 17, 40, 60)
MESH = functools.partial(HelixConfig, kvp=4, block=4)


def attended(config: HelixConfig, tokens: int, *, latent: bool = False, top: int = 0) -> np.ndarray:
    """Attention of ``tokens`` after each of `LENGTHS`, to the ``top`` positions if not to all."""
    spec = LayerSpec(1 if latent else 2, SIZE, SIZE - 4 * latent, values_in_keys=latent)
    cache = Cache.create(
        (spec,), layouts_on(config, (spec,), CAPACITY, gamma=3), BATCH, jnp.float32
    )
    columns = {name: jnp.asarray(random(*x.shape)) for name, x in cache.columns[0].items()}
    cache = cache.replaced(0, **columns).with_lengths(jnp.asarray(LENGTHS, jnp.int32))
    q = random(BATCH, tokens, HEADS, SIZE, seed=1)
    k, v = (random(BATCH, tokens, spec.kv_heads, SIZE, seed=seed) for seed in (2, 3))
    up, sinks = random(HEADS, SIZE - 4, 3, seed=4), random(HEADS, seed=5)

    def body(q, k, v, cache):
        cache = part_of(config, cache)
        positions = cache.lengths[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        attend: Any = jspec.policies.DenseAttend(positions)
        if top:
            policy = jspec.policies.ExactTopK(**SPARSE | {"budget": top})
            attend = SelectedAttend(positions, cache.lengths, tokens, policy=policy)
        more = {"up": jnp.asarray(up)} if latent else {}
        return attend(0, q, k, None if latent else v, cache, sinks=jnp.asarray(sinks), **more)[0]

    run = jax.shard_map(
        body,
        mesh=config.mesh,
        in_specs=(P(), P(), P(), cache_specs(config, cache)),
        out_specs=P(None, None, config.axes),
        check_vma=False,
    )
    return np.asarray(jax.jit(run, compiler_options=config.compiler_options)(q, k, v, cache))


@pytest.mark.parametrize(
    ("tokens", "overlap", "settings"),
    [
        pytest.param(1, 9, {}, id="dense", marks=pytest.mark.exhaustive),
        pytest.param(4, 2, {"latent": True}, id="latent"),
        pytest.param(4, 3, {"top": 8}, id="selected", marks=pytest.mark.slow),
    ],
)
def test_chunks_have_the_bits_of_one(tokens, overlap, settings):
    """Five rows in 2, 3 and, as there are no more, 5 chunks."""
    right = attended(MESH(), tokens, **settings)
    assert np.abs(right).max() > 0.1
    np.testing.assert_array_equal(attended(MESH(overlap=overlap), tokens, **settings), right)


@pytest.mark.parametrize("overlap", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_values_are_projected_before_or_after_the_exchange(overlap):
    before, after = (
        attended(MESH(overlap=overlap, up_projection=where), 4, latent=True)
        for where in ("before", "after")
    )
    np.testing.assert_allclose(before, after, rtol=1e-5, atol=1e-5)
    assert (before != after).any()  # sums in another order


def messages(config: HelixConfig, tokens: int, up: tuple[int, ...] | None) -> list[list[int]]:
    """Rows, tokens and channels of each all-to-all of an attention of `BATCH` rows."""

    def body(q, out, lse, positions, up=None):
        return Exchange(config).attended(lambda q, positions: (out, lse), q, positions, up)

    shapes = [(BATCH, tokens, HEADS, SIZE)] * 2 + [(BATCH, tokens, HEADS), (BATCH, tokens)]
    operands = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes[:3]]
    operands.append(jax.ShapeDtypeStruct(shapes[3], jnp.int32))
    operands += [jax.ShapeDtypeStruct(up, jnp.float32)] if up else []
    heads = P(None, None, config.axes)
    run = jax.shard_map(
        body, mesh=config.mesh, in_specs=P(), out_specs=(heads, heads), check_vma=False
    )
    text = str(jax.make_jaxpr(run)(*operands))
    sizes = [[int(n) for n in x.split(",")] for x in re.findall(r"u32\[(\S+)\] = all_to_all", text)]
    return [[size[1], size[2], size[-1]] for size in sizes]


@pytest.mark.parametrize(
    ("settings", "tokens", "up", "shapes"),
    [
        ({}, 2, None, [[5, 2, 17]]),
        ({"overlap": 2}, 2, None, [[2, 2, 17], [3, 2, 17]]),
        ({"overlap": 2}, OVERLAPPED + 1, None, [[5, 65, 17]]),
        ({}, 2, (8, 16, 4), [[5, 2, 5]]),
        ({}, 2, (8, 16, 40), [[5, 2, 17]]),
        ({"up_projection": "after"}, 2, (8, 16, 4), [[5, 2, 17]]),
        ({"up_projection": "before"}, 2, (8, 16, 40), [[5, 2, 41]]),
    ],
    ids=["one", "chunks", "prompt", "smaller", "larger", "after", "before"],
)
def test_messages_are_as_many_and_as_large_as_asked_for(settings, tokens, up, shapes):
    assert messages(MESH(**settings), tokens, up) == shapes


PLAIN = jspec.StepConfig(0, jspec.NoDraft())


def test_steps_are_compiled_with_the_options_of_their_mesh(monkeypatch, tiny):
    """What XLA does not know it refuses, called and lowered; so it was given the options."""
    monkeypatch.setattr(HelixConfig, "compiler_options", {"xla_gpu_no_such_option": True})
    sharded = helix.shard(tiny, HelixConfig(kvp=2))
    state = jspec.start_decoding(sharded, [[1], [2]], config=PLAIN, capacity=320)
    for run in (jspec.decode_chunk, lambda *args: jspec.decode_chunk.lower(*args).compile()):
        with pytest.raises(RuntimeError, match="xla_gpu_no_such_option"):
            run(sharded, state, PLAIN, 3)
    # JAX refuses options inside another program, whose own author gives them.
    jax.jit(lambda state: jspec.speculative_step(sharded, state, PLAIN)).lower(state)


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["plain", pytest.param("hata", marks=pytest.mark.slow), "vegas"])
def test_tokens_are_those_of_one_message(draft):
    model = Decoder(CONFIG, rngs=nnx.Rngs(0))
    meshes = [helix.shard(model, HelixConfig(kvp=2, tpa=2, overlap=n)) for n in (1, 3)]
    first, second = (decoded(sharded, DRAFTERS[draft], GREEDY)[0] for sharded in meshes)
    assert first == second
