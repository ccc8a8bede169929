"""A layer of each policy: its cases, and its checks, which can fail."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.hata import check, layer, parts, workload
from bench.policies import arrays_of
from bench.report import steps
from bench.settings import Settings
from jspec.ops import operations
from jspec.policies import Hata

SMALL = "B=2,S=256,heads=4/2,H=16,n=96,R=32,channels=4"
CASE = layer.BENCHMARK.case(SMALL)
NAMES = ("hata", "quest_16", "loki")


@pytest.fixture(scope="module")
def made():
    """Of some policies: its arrays, the cache after the new token, and what a layer gives."""
    result, new = {}, workload.token(CASE)
    for name, policy in workload.policies(CASE).items():
        if name in NAMES:
            arrays = arrays_of(policy, [workload.spec_of(CASE)])
            cache = workload.filled(policy, arrays, CASE)
            result[name] = policy, arrays, *jax.jit(workload.program(policy))(arrays, cache, new)
    return result, new


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_right_and_each_fault_of_it_is_detected(name, made):
    policy, arrays, cache, (out, chosen) = made[0][name]
    new = made[1]

    def right(out=out, chosen=chosen, cache=cache):
        return check.is_right(policy, arrays, cache, new, (out, chosen))

    assert right()
    worse = np.array(out)
    worse[1, 0, 3] *= 1.05
    assert not right(out=worse)
    # Another slot in place of one that is neither a sink nor recent, and one that is there twice.
    some = 40
    others = np.setdiff1d(np.arange(200), np.asarray(chosen[1, 1]))
    for wrong in (int(others[0]), int(chosen[1, 1, some + 1]), -1):
        faulty = np.array(chosen)
        faulty[1, 1, some] = wrong
        assert not check.selects(policy, arrays, cache, new.parts()[0], faulty, new)
    for lost, column in cache.columns[0].items():
        zeroed = np.array(column)
        zeroed[0, -1] = 0
        assert not right(cache=cache.replaced(0, **{lost: jax.device_put(zeroed)}))


def test_positions_without_a_score_are_not_to_be_selected():
    """MagicPIG scores a key that shares too few buckets below 0, and leaves budget unused."""
    policy, new = workload.policies(CASE)["magicpig"], workload.token(CASE)
    params = arrays_of(policy, [workload.spec_of(CASE)])
    cache = workload.filled(policy, params, CASE)
    cache, (out, chosen) = jax.jit(workload.program(policy))(params, cache, new)
    assert check.is_right(policy, params, cache, new, (out, chosen))
    free = int(np.nonzero(np.asarray(chosen[1, 1]) == -1)[0][0])
    unscored = np.setdiff1d(np.arange(4, 200), np.asarray(chosen[1, 1]))
    faulty = np.array(chosen)
    faulty[1, 1, free] = unscored[0]
    assert not check.is_right(policy, params, cache, new, (out, faulty))


def test_bytes_are_what_is_scored_and_what_is_read():
    case = layer.BENCHMARK.case("B=8,S=32K")
    result = {name: workload.needed(p, case) for name, p in workload.policies(case).items()}
    keys, vectors = 8 * 32768 * 32, 2 * 2 * 128
    around = 8 * 32 * vectors
    read = 8 * 513 * 32 * vectors + around
    assert result["dense"] == keys * vectors + around
    assert result["hata"] == keys * 16 + read
    assert result["loki"] == keys * 64 + read
    assert result["quest_16"] == keys * 32 + read
    assert result["quest_32"] == keys * 16 + read
    assert result["magicpig"] == keys * 200 + read
    assert result["exact_topk"] == keys * 256 + read
    assert result["streaming"] == read


@pytest.mark.exhaustive
def test_the_suite_runs_and_a_wrong_policy_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layer, "policies", lambda case: workload.policies(case) | {"hata": Late()})
    asked = ("hata", "--case", SMALL, "--json", str(tmp_path / "out.json"))
    expected = ("hata", "streaming", "xla")
    assert main([*asked, *(x for name in expected for x in ("--backend", name))]) == 1
    result = json.loads((tmp_path / "out.json").read_text())
    assert "bench: wrong output: hata of " in capsys.readouterr().err
    told = {row["name"]: row["checked"] for row in result["rows"]}
    assert told == {"hata": False, "streaming": True, "xla": True}
    (group,) = steps.groups(result["rows"])
    assert (list(group.dense), list(group.policies)) == (["xla"], ["streaming"])


class Late(Hata):
    """HATA that never reads slot 1, a sink."""

    def __init__(self):
        super().__init__(budget=96, dense_layers=0, bits=32)

    def best(self, arrays, layer, cache, q, limit, **budget):
        chosen = super().best(arrays, layer, cache, q, limit, **budget)
        return jnp.where(chosen == 1, -1, chosen)


def test_cases_are_checked():
    assert layer.BENCHMARK.case("B=1,S=256K")["n"] == 4096
    for text in ("R=48", "n=32K", "S=1K,n=16", "n=64,S=64"):
        with pytest.raises(ValueError, match="must be"):
            layer.BENCHMARK.case(text)


def test_stages_of_the_layer_have_the_kernels_of_those_before():
    *stages, (_, whole) = parts.stages().items()
    assert whole == {"hash_attention": "cuda"}
    for (_, before), (name, after) in itertools.pairwise(stages):
        assert {**before, **parts.STAGES[name]} == after != before
    known = {operation.name: operation.backends for operation in operations()}
    for _, named in parts.stages().items():
        assert all(backend in known[operation] for operation, backend in named.items())


@pytest.mark.exhaustive
def test_each_stage_is_checked_and_timed_or_says_why_not():
    case = parts.BENCHMARK.case("B=2,S=256,heads=4/2,H=64,n=96,R=32")
    rows = {row["name"]: row for row in parts.rows(case, Settings(quick=True))}
    assert [rows[name]["checked"] for name in ("plain", "one_operation")] == [True, True]
    if jax.default_backend() == "cpu":
        assert "hamming_scores cannot run as asked; triton: " in rows["score"]["reason"]
