"""HATA-off gives what HATA gives, bit for bit, whatever was predicted."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import Cache, StripedLayout
from jspec.cache.layout import LinearLayout
from jspec.config import SamplingParams
from jspec.decode import generation, prefill, rows
from jspec.decode.draft import NoDraft, SelfDraft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk
from jspec.host import in_host, place_in_host
from jspec.policies import Hata, HataOff, HostStorage
from jspec.policies.attend import SelectedAttend
from jspec.policies.dense import DenseAttend
from jspec.policies.offload import with_room_for_device_rows
from jspec.policies.pass_state import PassState
from jspec.policies.policy import columns_of, create_cache
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts
from tests.parameters import default_run
from tests.policies.common import BATCH, CAPACITY, LENGTHS, SPEC, arrays_of, query, random

SOME: dict[str, Any] = {"budget": 8, "sinks": 1, "recent": 2, "bits": 32}
LAYERS = dataclasses.replace(TINY, layers=(TINY.layers[0],) * 3)


def cache_of(policy):
    """Two layers of random tokens, and NaN in all slots that hold none."""
    empty = create_cache(policy, [SPEC] * 2, [LinearLayout(CAPACITY)] * 2, BATCH, jnp.float32)
    is_written = np.arange(CAPACITY)[None, :, None, None] < LENGTHS[:, None, None, None]
    policy_params, columns = arrays_of(policy, (SPEC, SPEC)), []
    for layer, column in enumerate(empty.columns):
        made = {}
        for at, name in enumerate(("keys", "values")):
            tokens = np.asarray(random(*column[name].shape, seed=10 * layer + at))
            tokens = np.where(is_written, tokens, np.nan)
            is_host = in_host(column[name])
            made[name] = place_in_host(tokens, None) if is_host else jnp.asarray(tokens)
        keys = jnp.asarray(np.asarray(made["keys"]))
        has_columns = columns_of(policy, layer, SPEC)
        encoded = policy.encoder(policy_params, layer)(keys, None) if has_columns else {}
        columns.append(made | encoded)
    lengths = jnp.asarray(LENGTHS)
    return dataclasses.replace(empty, columns=tuple(columns), lengths=lengths)


def two_layers(policy):
    """A pass over two layers: their outputs, and their keys afterwards."""
    policy_params = arrays_of(policy, (SPEC, SPEC))
    positions = jnp.asarray(LENGTHS)[:, None]

    @jax.jit
    def run(cache, predicted):
        attend = SelectedAttend(
            positions, cache.lengths, 2, policy=policy, policy_params=policy_params
        )
        pass_state, outs = PassState(cache), []
        for layer in (0, 1):
            more: dict[str, Any] = (
                {} if layer or predicted is None else {"next_queries": lambda: predicted}
            )
            out, pass_state = attend(layer, *query(seed=20 * layer), pass_state, **more)
            outs.append(out)
        return outs, [pass_state.cache.keys(layer) for layer in (0, 1)]

    return lambda predicted: run(cache_of(policy), predicted)


@pytest.mark.parametrize(
    "more",
    [{"dense_layers": 1}, {"dense_layers": 0, "norms": True}, {"dense_layers": 0, "every": 2}],
    ids=["after-a-dense-layer", "norms", "one-selection"],
)
def test_a_layer_reads_what_hata_reads_whatever_was_predicted(more):
    """Ragged rows, one of them empty; the right queries, their opposites, and none."""
    settings = SOME | more
    expected, keys = two_layers(Hata(**settings))(None)
    run, right = two_layers(HataOff(**settings)), query(seed=20)[0]
    for predicted in (right, -right, None):
        got, after = run(predicted)
        for x, y in zip([*got, *after], [*expected, *keys], strict=True):
            np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_pass_that_reads_all_of_a_layer_finds_it_in_the_host():
    """Of a prefill's chunk, or of verification: outputs, keys, values and codes."""
    positions = jnp.asarray(LENGTHS)[:, None] + jnp.arange(2, dtype=jnp.int32)[None]
    q, k, v = (jnp.concatenate([x, -x], axis=1) for x in query())
    results = []
    for policy in (Hata(**SOME, dense_layers=1), HataOff(**SOME, dense_layers=1)):
        policy_params = arrays_of(policy, (SPEC, SPEC))
        attend = DenseAttend(positions, policy=policy, policy_params=policy_params)
        out, after = jax.jit(lambda cache, attend=attend: attend(1, q, k, v, cache))(
            cache_of(policy)
        )
        assert in_host(after.keys(1)) == isinstance(policy, HataOff)
        results.append([out, *after.columns[1].values()])
    for x, y in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_what_was_predicted_is_read_from_where_it_was_fetched_to(monkeypatch):
    """With a wrong row in it, the output is wrong: the second layer reads no row twice."""
    from jspec.cache import storage

    def spoiled(*arguments, **settings):
        prefetched, through = fetch_ahead(*arguments, **settings)
        return dataclasses.replace(prefetched, rows=tuple(2 * x for x in prefetched.rows)), through

    fetch_ahead = storage.fetch_ahead
    policy = HataOff(**SOME, dense_layers=1)
    right = query(seed=20)[0]
    expected, _ = two_layers(policy)(right)
    monkeypatch.setattr(storage, "fetch_ahead", spoiled)
    got, _ = two_layers(policy)(right)
    np.testing.assert_array_equal(got[0], expected[0])
    assert not np.array_equal(got[1][0], expected[1][0])
    unpredicted, _ = two_layers(dataclasses.replace(policy, predicted=0.0))(right)
    np.testing.assert_array_equal(unpredicted[1], expected[1])


def test_of_a_prediction_the_share_with_the_highest_scores_is_fetched_ahead(monkeypatch):
    """By the right queries: of 8 positions, 3 of them sinks or recent, the best 2 of the others."""
    from jspec.cache import storage

    fetched = []

    def watched(columns, slots, through, **settings):
        fetched.append((slots, settings["device_rows"]))
        return fetch_ahead(columns, slots, through, **settings)

    fetch_ahead = storage.fetch_ahead
    monkeypatch.setattr(storage, "fetch_ahead", watched)
    policy = HataOff(**SOME, dense_layers=1, predicted=0.6)
    policy_params = arrays_of(policy, (SPEC, SPEC))
    cache = with_room_for_device_rows(cache_of(policy), policy, policy_params)
    q, k, v = query(seed=20)

    @jax.jit
    def run(cache, q):
        settings = {"policy": policy, "policy_params": policy_params}
        attend = SelectedAttend(LENGTHS[:, None], cache.lengths, 2, **settings)
        attend(0, q, k, v, PassState(cache), next_queries=lambda: q)
        return fetched, policy.score(policy_params, 1, cache, q)

    ((slots, device_rows),), scores = jax.device_get(run(cache, q))
    assert slots.shape[-1] == 5
    assert device_rows.slots.shape[-1] == 8, "rows on the device are not fetched"
    for row, head in np.ndindex(slots.shape[:2]):
        length = int(LENGTHS[row])
        forced = {slot for slot in range(length) if slot < 1 or slot >= length - 2}
        others = sorted(set(range(length)) - forced, key=lambda s: (-scores[row, head, s], s))
        best = sorted([*forced, *others][:5])[:5] if length else []
        assert [slot for slot in slots[row, head] if slot >= 0] == best


@pytest.mark.parametrize("predicted", [1.5, -0.1])
def test_a_share_that_is_none_is_refused(predicted):
    with pytest.raises(ValueError, match=f"predicted={predicted} must be a share of the budget"):
        HataOff(predicted=predicted)


def test_layers_with_a_window_stay_on_the_device():
    specs = [SPEC, SPEC, dataclasses.replace(SPEC, window=4), SPEC]
    assert HostStorage(first_layer=1).layers(specs) == (1, 3)


@pytest.mark.parametrize("settings", [{"first_layer": -1}, {"prefetch_share": 1.5}], ids=str)
def test_bad_storage_settings_are_refused(settings):
    ((name, value),) = settings.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        HostStorage(**settings)


@pytest.fixture(scope="module")
def model():
    return make_decoder(LAYERS, seed=3, head=8.0)


PARAMS, TEXTS = SamplingParams(max_new_tokens=14), prompts((12, 7, 1), seed=5)


def decoded(model, policy, steps=2):
    policy_params = arrays_of(policy, LAYERS.layers)
    settings = {"draft": None, "target": policy, "steps_per_chunk": steps, "prefill_chunk": 4}
    return generate(model, TEXTS, PARAMS, policy_params=policy_params, **settings)


@pytest.fixture(scope="module")
def hata(model):
    return decoded(model, Hata(**SOME, dense_layers=1))


@pytest.mark.parametrize("reuse", default_run([True, False], "True"))
def test_a_step_reads_what_is_left_of_the_one_before(model, hata, monkeypatch, reuse):
    """With wrong rows left, other tokens come."""
    with_device_rows = Cache.with_device_rows

    def spoiled(cache, layer, device_rows):
        rows = tuple(jnp.flip(x, axis=-1) for x in device_rows.rows)
        return with_device_rows(cache, layer, dataclasses.replace(device_rows, rows=rows))

    monkeypatch.setattr(Cache, "with_device_rows", spoiled)
    # No other test decodes by chunks of three: compiled programs are kept.
    got = decoded(model, HataOff(**SOME, dense_layers=1, reuse=reuse), steps=3)
    assert (got.tokens == hata.tokens) != reuse


@pytest.mark.exhaustive
def test_nothing_is_left_for_the_next_chunk(model):
    """Another request may take over a row in between."""
    policy = HataOff(**SOME, dense_layers=1)
    models = Models(model, policy=arrays_of(policy, LAYERS.layers))
    config = StepConfig(0, NoDraft(), target=policy)
    state = start_decoding(models, TEXTS, PARAMS, config)
    bytes_before = state.cache.nbytes
    state, _ = decode_chunk(models, state, config, 2)
    assert state.cache.device_rows == ()
    assert state.cache.nbytes == bytes_before


@pytest.mark.exhaustive
def test_it_decodes_as_hata_does_in_a_cache_that_grows(model, hata, monkeypatch):
    in_host_before, longer = [], rows.longer

    def watched(x, size, **settings):
        in_host_before.append(in_host(x))
        return longer(x, size, **settings)

    monkeypatch.setattr(generation, "START", 12)
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 4)
    monkeypatch.setattr("jspec.cache.cache.longer", watched)
    got = decoded(model, HataOff(**SOME, dense_layers=1))
    assert got.tokens == hata.tokens
    assert sum(in_host_before) == 4, "the keys and values of two layers grow in the host's memory"


@pytest.mark.slow
def test_as_a_drafter_it_leaves_greedy_tokens_as_they_are(model):
    policy = HataOff(**SOME, dense_layers=1)
    plain = generate(model, TEXTS, PARAMS, draft=None)
    policy_params = arrays_of(policy, LAYERS.layers)
    got = generate(
        model, TEXTS, PARAMS, draft=SelfDraft(policy), gamma=3, policy_params=policy_params
    )
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


@pytest.mark.slow
def test_a_slot_takes_over_another_request(model):
    policy = HataOff(**SOME, dense_layers=1)
    models = Models(model, policy=arrays_of(policy, LAYERS.layers))
    config, (first, other, _) = StepConfig(0, NoDraft(), target=policy), TEXTS
    state = start_decoding(models, [first, first], PARAMS, config)
    keys = state.cache.keys(1)
    assert in_host(keys)
    assert keys.sharding.memory_kind == "pinned_host"
    state = prefill.fill_slot(models, state, 1, other, PARAMS, config)
    assert in_host(state.cache.keys(1))
    state, record = decode_chunk(models, state, config, 14)
    assert in_host(state.cache.keys(1))
    got = np.asarray(record.tokens)[..., 0]
    alone = decoded(model, policy).tokens
    assert [tuple(got[:, row].tolist()) for row in (0, 1)] == list(alone[:2])


def test_positions_out_of_order_are_refused():
    with pytest.raises(ValueError, match="HataOff keeps layer 0 in host memory, where positions"):
        create_cache(HataOff(dense_layers=0), [SPEC], [StripedLayout(24, 3, 2)], 1, jnp.float32)
