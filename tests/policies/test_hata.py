"""HATA's layer of one token as one operation: the parts' bits, and who keeps it to the parts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import LinearLayout, StripedLayout
from jspec.dispatch import Backends, named_backend, use_backends
from jspec.ops.append import QKRope, rotate_append_encode
from jspec.ops.attention.hashed import PARTS, hash_attention
from jspec.ops.norm import RMS
from jspec.policies import Hata, HataOff, append
from jspec.policies import hata as module
from jspec.policies.attend import SelectedAttend
from jspec.policies.pass_state import PassState
from jspec.policies.policy import columns_of, create_cache
from tests.parameters import default_run
from tests.policies.common import BATCH, CAPACITY, LENGTHS, SPEC, arrays_of, random

POLICY = Hata(budget=8, sinks=1, recent=2, dense_layers=0, bits=32)
SPECS = (SPEC, dataclasses.replace(SPEC, scale=0.7, softcap=2.0))


LINEAR = LinearLayout(CAPACITY)


def cache_of(policy, specs=SPECS, layout=LINEAR):
    """Random tokens below `LENGTHS`, then two of a draft, and NaN in all other slots."""
    empty = create_cache(policy, specs, [layout] * len(specs), BATCH, jnp.float32)
    filled = np.arange(CAPACITY)[None, :, None, None] < LENGTHS[:, None, None, None] + 2
    policy_params, columns = arrays_of(policy, specs), []
    for layer, column in enumerate(empty.columns):
        tokens = {n: random(*column[n].shape, seed=5 * layer + len(n)) for n in ("keys", "values")}
        codes = {}
        if columns_of(policy, layer, specs[layer]):
            codes = policy.encoder(policy_params, layer)(tokens["keys"], None)
        pairs = {name: jnp.where(filled, x, jnp.nan) for name, x in tokens.items()}
        columns.append(pairs | codes)
    return dataclasses.replace(empty, columns=tuple(columns), lengths=jnp.asarray(LENGTHS))


def token(layer: int, tokens: int = 1, *, joined: bool = True):
    """Queries, keys and values of a token, and what turns them."""
    whole = random(BATCH, tokens, 2, 2 * 8 + 8 + 4, seed=30 + layer)
    q, k, v = jnp.split(whole, [16, 24], axis=-1)
    angle = random(BATCH, tokens, 1, 4, seed=40 + layer)
    norms = RMS(random(8, seed=50)), RMS(random(8, seed=51))
    qk_rope = QKRope(jnp.cos(angle), jnp.sin(angle), *norms, whole if joined else None)
    return q.reshape(BATCH, tokens, 4, 8), k, v, qk_rope


def pass_of(
    policy,
    num_uncommitted=3,
    cache=None,
    backends=Backends(),
    start=PassState,
    attend_settings=None,
    policy_params=None,
    **token_settings,
):
    """A function of positions: outputs of a pass over all layers with the selection of each, and
    the columns afterwards. It compiles once."""
    cache = cache_of(policy) if cache is None else cache
    if policy_params is None:
        policy_params = arrays_of(policy, cache.specs)

    @jax.jit
    def run(cache, positions):
        with use_backends(backends):
            return all_layers(cache, positions)

    def all_layers(cache, positions):
        settings = {"policy": policy, "policy_params": policy_params}
        attend = SelectedAttend(positions, cache.lengths, num_uncommitted, **settings)
        pass_state, outputs = start(cache), []
        for layer in range(len(cache.specs)):
            q, k, v, qk_rope = token(layer, positions.shape[1], **token_settings)
            settings = {"qk_rope": qk_rope} | (attend_settings or {})
            out, pass_state = attend(layer, q, k, v, pass_state, **settings)
            outputs.append((out, getattr(pass_state, "selections", [None])[-1]))
        return outputs, getattr(pass_state, "cache", pass_state).columns

    return lambda positions: run(cache, np.asarray(positions, np.int32))


def attended(policy, positions, **settings):
    return pass_of(policy, **settings)(positions)


AT = {"first": LENGTHS[:, None], "ahead": LENGTHS[:, None] + 2, "padded": [[20], [-1], [0]]}
SOME = {
    "plain": {},
    "ratio": {"budget": 0.3},
    "none": {"budget": 0, "sinks": 0, "recent": 0},
    "beyond": {"budget": 1000},
    "served": {"every": 2},
    "dense-first": {"dense_layers": 1},
}


@pytest.fixture(scope="module")
def usual():
    """The outputs and columns of `POLICY` for its first token."""
    return attended(POLICY, AT["first"])


@pytest.fixture
def calls(monkeypatch):
    """The backend that was named for each call of `hash_attention` by the policy."""
    implementations = []

    def watched(*arguments, **settings):
        implementations.append(named_backend("hash_attention"))
        return hash_attention(*arguments, **settings)

    monkeypatch.setattr(module, "hash_attention", watched)
    return implementations


def assert_same(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("change", default_run(list(SOME), "plain", "served"))
def test_it_gives_the_bits_of_its_parts(change, calls, monkeypatch):
    """Outputs, selections, keys, values and codes; two layers, one with a scale and a soft cap."""
    policy = dataclasses.replace(POLICY, **SOME[change])
    fused = pass_of(policy)
    results = [fused(positions) for positions in AT.values()]
    assert calls == [None] * (1 if change in ("served", "dense-first") else 2)
    monkeypatch.setattr(Hata, "attend_token", lambda *_: None)
    in_parts = pass_of(policy)
    for positions, result in zip(AT.values(), results, strict=True):
        assert_same(result, in_parts(positions))
        for out, _ in result[0]:
            assert np.isfinite(np.asarray(out)[np.asarray(positions)[:, 0] >= 0]).all()


def test_a_selection_serves_the_layer_after_it(usual, calls):
    """The second layer reads what the first one selected, not what it would select itself."""
    one, two = attended(dataclasses.replace(POLICY, every=2), AT["first"])[0], usual[0]
    np.testing.assert_array_equal(one[0][1], one[1][1])
    assert not np.array_equal(two[0][1], two[1][1])
    assert len(calls) == 1


def test_sinks_and_a_projection_follow(calls, monkeypatch):
    settings = {"sinks": random(4, seed=8), "up": random(4, 4, 5, seed=9)}
    got = attended(POLICY, AT["first"], attend_settings=settings)
    assert calls == [None, None]
    assert got[0][0][0].shape == (BATCH, 1, 4, 5)
    monkeypatch.setattr(Hata, "attend_token", lambda *_: None)
    assert_same(got, attended(POLICY, AT["first"], attend_settings=settings))


def test_a_bare_cache_is_returned_as_one(usual, calls):
    got = attended(POLICY, AT["first"], start=lambda cache: cache)
    assert_same(got[1], usual[1])
    assert len(calls) == 2


def test_a_named_backend_runs(calls):
    got = attended(POLICY, AT["first"], backends=Backends(hash_attention="xla"))
    assert calls == ["xla", "xla"]
    in_parts = attended(POLICY, AT["first"], backends=Backends(dict.fromkeys(PARTS, "xla")))
    assert len(calls) == 2
    assert_same(got, in_parts)


@pytest.mark.parametrize("part", PARTS)
def test_a_backend_that_is_named_for_a_part_runs(part, usual, calls):
    named = attended(POLICY, AT["first"], backends=Backends({part: "xla"}))
    assert calls == []
    for x, y in zip(jax.tree.leaves(named), jax.tree.leaves(usual), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)  # another backend rounds otherwise


class Other(Hata):
    """HATA that never reads position 1."""

    def best(self, policy_params, layer, cache, q, limit, **budget):
        chosen = super().best(policy_params, layer, cache, q, limit, **budget)
        return jnp.where(chosen == 1, -1, chosen)


def test_a_subclass_selects_as_it_says(calls):
    outputs, _ = attended(Other(**dataclasses.asdict(POLICY) | {"budget": 20}), AT["first"])
    assert not (np.asarray(outputs[0][1]) == 1).any()
    assert calls == []


class Asked(HataOff):
    """HATA-off that must not be asked, since its keys lie in the host's memory."""

    def attend_token(self, *arguments):
        raise AssertionError("it is asked")


NOT_ONE = ("norms", "off", "window", "striped", "two-tokens", "not-joined", "rotated")


@pytest.mark.parametrize("name", NOT_ONE)
def test_what_the_operation_does_not_do_runs_in_parts(name, calls):
    policy, settings = POLICY, {}
    if name == "norms":
        policy = dataclasses.replace(POLICY, norms=True)
    elif name == "off":
        policy = Asked(**dataclasses.asdict(POLICY))
        settings["cache"] = create_cache(policy, [SPEC], [LINEAR], BATCH, jnp.float32)
    elif name == "window":
        specs = [dataclasses.replace(SPEC, window=6)]
        settings["cache"] = create_cache(policy, specs, [LINEAR], BATCH, jnp.float32)
    elif name == "striped":
        settings["cache"] = cache_of(POLICY, layout=StripedLayout(CAPACITY, 3, 2))
    elif name == "not-joined":
        settings["joined"] = False
    elif name == "rotated":
        settings["attend_settings"] = {"qk_rope": None}
    tokens = np.arange(2 if name == "two-tokens" else 1)
    attended(policy, LENGTHS[:, None] + tokens, **settings)
    assert calls == []


def test_a_device_that_has_a_part_of_the_rows_reads_it_apart(usual, calls):
    """It may be asked for the rows of others, chunk by chunk."""

    @dataclasses.dataclass(frozen=True)
    class Alone:
        def attended(self, read, q, positions, up=None):
            return read(q, positions)

        def local_heads(self, x):
            return x

    cache = dataclasses.replace(cache_of(POLICY), shards=Alone())
    assert_same(attended(POLICY, AT["first"], cache=cache)[0], usual[0])
    assert calls == []


@pytest.mark.parametrize(("norms", "count"), [(False, 2), (True, 0)], ids=["codes", "norms"])
def test_codes_are_made_by_the_operation_that_appends(norms, count, monkeypatch):
    """One call per layer for two tokens; with norms the keys are encoded after they are written."""
    fused = []

    def watched(*arguments, **settings):
        fused.append(arguments)
        return rotate_append_encode(*arguments, **settings)

    monkeypatch.setattr(append, "rotate_append_encode", watched)
    attended(dataclasses.replace(POLICY, norms=norms), LENGTHS[:, None] + np.arange(2))
    assert len(fused) == count


def test_a_cache_without_codes_is_refused():
    cache = create_cache(
        dataclasses.replace(POLICY, dense_layers=9), [SPEC], [LinearLayout(9)], 3, "f4"
    )
    run = functools.partial(attended, POLICY, AT["first"], cache=cache)
    with pytest.raises(ValueError, match=r"layer 0 keeps \['keys', 'values'\] and no \['codes'\]"):
        run()
