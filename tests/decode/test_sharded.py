"""Decoding on meshes: rows by `jax.shard_map`, weights and cache by sharding; 8 virtual devices."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jspec
from jspec.ops.cases import ragged_tokens
from jspec.ops.verify import VERIFY_GREEDY, verify_greedy
from tests.decode.common import DRAFTERS, NGRAM, STREAMING, prompts
from tests.models.goldens import GOLDEN

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
LENGTHS = (9, 5, 7, 3, 6, 2, 8, 4)
MODES = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_p": 0.9},
]
both_kinds = pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)


def params(mode: dict, new: int = 10) -> list[jspec.SamplingParams]:
    return [jspec.SamplingParams(max_new_tokens=new, seed=i, **mode) for i in range(len(LENGTHS))]


def config_of(drafter) -> jspec.StepConfig:
    return jspec.StepConfig(0 if isinstance(drafter, jspec.NoDraft) else 3, drafter)


def rows_mesh(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("rows",), axis_types=(kind,))


@both_kinds
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_passes_the_check_of_shard_map(name, kind, tiny, other):
    """Traced alone, with log-probabilities: the check is one of types."""
    mesh, mode = rows_mesh(kind), MODES[list(DRAFTERS).index(name) % 3] | {"logprobs": 1}
    config = config_of(DRAFTERS[name])
    models = jspec.Models(tiny, other if name == "model" else None)
    texts = prompts(LENGTHS, vocabulary=41)
    # Prompts of one token need no prefill, which would compile.
    state = jspec.start_decoding(models, [text[:1] for text in texts], params(mode), config)
    models = jax.device_put(models, NamedSharding(mesh, P()))
    state = jax.device_put(state, NamedSharding(mesh, P("rows")))
    step = jax.shard_map(
        lambda models, state: jspec.decode_chunk(models, state, config, 2),
        mesh=mesh,
        in_specs=(P(), P("rows")),
        out_specs=(P("rows"), P(None, "rows")),
    )
    after, record = jax.eval_shape(step, models, state)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert record.packed.shape == (2, 8, config.gamma + 5)


def weight(mesh: jax.sharding.Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """KV heads, and the columns of the other matrices, over the axis "model"."""
    axis = len(shape) - (2 if "qkv" in name else 1)
    divides = len(shape) > 1 and shape[axis] % mesh.shape["model"] == 0
    return NamedSharding(mesh, P(*[None] * axis, "model") if divides else P())


def of_state(mesh: jax.sharding.Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Rows over "data", heads of the cache over "model"."""
    cache = name.startswith("cache.columns")
    return NamedSharding(mesh, P("data", None, "model") if cache else P("data"))


@pytest.mark.exhaustive
def test_a_model_that_was_loaded_onto_a_mesh_has_the_tokens_of_one_device():
    """On Auto axes; the example has Explicit ones."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    path, config = GOLDEN / "qwen3", config_of(STREAMING)
    alone = jspec.load_model(path)
    split = jspec.load_model(path, sharding=functools.partial(weight, mesh))
    texts, results = prompts(LENGTHS, alone.config.vocab_size), []
    for model, sharding in ((alone, None), (split, functools.partial(of_state, mesh))):
        state = jspec.start_decoding(model, texts, params(MODES[0]), config, sharding=sharding)
        while not bool(state.done.all()):
            state = jspec.speculative_step(model, state, config)
        results.append([row[row >= 0].tolist() for row in np.asarray(state.tokens)])
    assert results[0] == results[1]
    assert {x.data.shape[:3] for x in state.cache.keys(0).addressable_shards} == {(2, 256, 1)}


@both_kinds
def test_a_request_goes_into_a_slot_of_a_state_on_a_mesh(kind):
    """Prefill with sharded weights, and the row into a sharded cache."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    model = jspec.load_model(GOLDEN / "qwen3", sharding=functools.partial(weight, mesh))
    row_params, config = params(MODES[0]), config_of(NGRAM)
    state = jspec.start_decoding(
        model, [[1]] * 8, row_params, config, sharding=functools.partial(of_state, mesh)
    )
    before = jax.tree.map(lambda x: x.sharding, state)
    keys = np.asarray(state.cache.keys(0))
    state = jspec.fill_slot(model, state, 5, [1, 2, 3], row_params[5], config)
    assert state.tokens[:, :4].tolist() == [
        [1, 2, 3, -1] if i == 5 else [1, -1, -1, -1] for i in range(8)
    ]
    after = np.asarray(state.cache.keys(0))
    assert (after[5, :2] != 0).all()
    np.testing.assert_array_equal(np.delete(after, 5, axis=0), np.delete(keys, 5, axis=0))
    if kind == AxisType.Explicit:  # XLA may choose on Auto axes
        for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
            assert x.sharding.is_equivalent_to(sharding, x.ndim)
    step = jax.eval_shape(lambda *args: jspec.speculative_step(*args, config), model, state)
    assert jax.tree.map(jnp.shape, step) == jax.tree.map(jnp.shape, state)


def test_what_does_not_divide_names_the_array(tiny):
    rows = NamedSharding(rows_mesh(AxisType.Auto), P("rows"))
    with pytest.raises(ValueError, match=r"cache\.columns\.0\.keys \(7, .* cannot be placed by"):
        jspec.start_decoding(tiny, prompts(LENGTHS[:7]), sharding=rows)


@both_kinds
@pytest.mark.parametrize("backend", VERIFY_GREEDY.backends)
def test_kernels_take_what_varies_beside_what_does_not(backend, kind):
    """Draft tokens of each device's own, one set of stop tokens for all."""
    draft, target, lengths, _ = map(jnp.asarray, ragged_tokens(8, 5, 1))
    stops = jnp.zeros((1, 1), jnp.int32)
    arguments = (draft[:1], target[:1], lengths[:1], stops)
    if reason := VERIFY_GREEDY.backend(backend).supports(*arguments):
        pytest.skip(f"{backend}: {reason}")
    mesh = rows_mesh(kind)
    run = jax.shard_map(
        functools.partial(verify_greedy, implementation=backend),
        mesh=mesh,
        in_specs=(P("rows"), P("rows"), P("rows"), P()),
        out_specs=P("rows"),
    )
    placed = [jax.device_put(x, NamedSharding(mesh, P("rows"))) for x in (draft, target, lengths)]
    got = jax.jit(run)(*placed, jax.device_put(stops, NamedSharding(mesh, P())))
    expected = verify_greedy(draft, target, lengths, jnp.zeros((8, 1), jnp.int32))
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.exhaustive
def test_the_example_says_that_both_ways_are_identical(capsys, monkeypatch, tiny):
    """With a small model for the bundled one: rows by `shard_map`, and Explicit axes."""
    _, tokenizer = jspec.load_bundled()

    class Bytes:
        def encode(self, text):
            return [id % 41 for id in tokenizer.encode(text)]

    monkeypatch.setattr(jspec, "load_bundled", lambda: (tiny, Bytes()))
    path = Path(__file__).parents[2] / "examples" / "sharded_loop.py"
    runpy.run_path(str(path), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{way}: 8 devices, identical to one device: True" for way in ("by_rows", "by_sharding")
    ]
