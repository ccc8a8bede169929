"""The suite `hata-layer`: its cases, its checks, which can fail, and its tables."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import layer
from bench.__main__ import main
from bench.layer import ablation, check, tables, workload
from bench.policies import arrays_of
from bench.settings import Settings
from jspec.ops.collisions import bucket_codes
from jspec.policies import Hata, MagicPIG
from tests.bench.test_report import MACHINE, ceilings, row
from tests.ops.test_collisions import collided

SMALL = "B=2,S=256,heads=4/2,H=16,n=96,R=32,channels=4"
CASE = layer.case(SMALL)
NAMES = ("hata", "quest_16", "loki")


@pytest.fixture(scope="module")
def made():
    """Of some policies: its arrays, the cache behind the new token, and what a layer gives."""
    found, new = {}, workload.token(CASE)
    for name, policy in workload.policies(CASE).items():
        if name in NAMES:
            arrays = arrays_of(policy, [workload.spec_of(CASE)])
            cache = workload.filled(policy, arrays, CASE)
            found[name] = policy, arrays, *jax.jit(workload.program(policy))(arrays, cache, new)
    return found, new


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_right_and_each_fault_of_it_is_found(name, made):
    policy, arrays, cache, (out, chosen) = made[0][name]
    new = made[1]

    def right(out=out, chosen=chosen, cache=cache):
        return check.right(policy, arrays, cache, new, (out, chosen))

    assert right()
    assert not right(out=out.at[1, 0, 3].multiply(1.05))
    # Another slot in place of one that is neither a sink nor recent, and one that is there twice.
    some = 40
    others = np.setdiff1d(np.arange(200), np.asarray(chosen[1, 1]))
    for wrong in (int(others[0]), int(chosen[1, 1, some + 1]), -1):
        faulty = chosen.at[1, 1, some].set(wrong)
        assert not check.selects(policy, arrays, cache, new.parts()[0], faulty, new)
    column = jax.tree.map(lambda x: x.at[0, -1].set(0), cache.columns[0])
    for lost in column:
        assert not right(cache=cache.replaced(0, **{lost: column[lost]}))


def test_equal_scores_go_to_the_first(made):
    policy, arrays, cache, (_, chosen) = made[0]["hata"]
    q, new = made[1].parts()[0], made[1]
    scores, doubt = check.SCORES[type(policy)](policy, arrays[0], cache.columns[0], q)
    assert not doubt.any()
    own, held = np.asarray(scores[0, 0]), np.asarray(chosen[0, 0])
    free = held[(held >= 4) & (held < 255 - 16)]
    lowest = own[free].min()
    (equal,) = np.nonzero(own[4 : 255 - 16] == lowest)
    left = np.setdiff1d(equal + 4, held)
    assert left.size, "no tie in this case"
    last = int(np.nonzero(held == free[own[free] == lowest][-1])[0][0])
    assert not check.selects(policy, arrays, cache, q, chosen.at[0, 0, last].set(int(left[0])), new)


def test_keys_that_share_too_few_buckets_are_not_to_be_selected():
    """The check's scores are the paper's rule; what no query found fills no budget."""
    policy, new = MagicPIG(budget=96, dense_layers=0, bits=8, tables=33), workload.token(CASE)
    arrays, q = arrays_of(policy, [workload.spec_of(CASE)]), new.parts()[0]
    cache = workload.filled(policy, arrays, CASE)
    cache, (out, chosen) = jax.jit(workload.program(policy))(arrays, cache, new)
    scores, doubt = check.SCORES[type(policy)](policy, arrays[0], cache.columns[0], q)
    assert not doubt.any()
    codes = np.asarray(bucket_codes(q, arrays[0]["projections"], policy.tables))
    wanted = collided(codes, np.asarray(cache.columns[0]["buckets"]), policy.tables)
    np.testing.assert_array_equal(scores, np.where(wanted > 0, wanted, -np.inf))
    assert check.right(policy, arrays, cache, new, (out, chosen))
    held = np.asarray(chosen[1, 1])
    found = np.nonzero((held >= 4) & (held < 255 - 16))[0]
    free = np.nonzero(held == -1)[0]
    lost = 4 + np.nonzero(wanted[1, 1, 4 : 255 - 16] < 0)[0]
    for at, wrong in ((found[0], -1), (free[0], int(lost[0]))):
        faulty = chosen.at[1, 1, at].set(wrong)
        assert not check.selects(policy, arrays, cache, q, faulty, new)


def test_brute_force_is_softmax_over_the_selected(made):
    _, _, cache, (_, chosen) = made[0]["hata"]
    q, context_len = made[1].parts()[0], made[1].context_len
    out = check.attended(q, cache.keys(0), cache.values(0), chosen, context_len)
    keys, values, q = (np.asarray(x, np.float64) for x in (cache.keys(0), cache.values(0), q))
    for head in range(4):
        slots = [*np.asarray(chosen[1, head // 2]).tolist(), 255]
        weights = np.exp(keys[1, slots, head // 2] @ q[1, 0, head] / 4)
        want = weights / weights.sum() @ values[1, slots, head // 2]
        np.testing.assert_allclose(out[1, 0, head], want, rtol=1e-4, atol=1e-5)


def test_bytes_are_what_is_scored_and_what_is_read():
    case = layer.case("B=8,S=32K")
    found = {name: workload.needed(p, case) for name, p in workload.policies(case).items()}
    keys, vectors = 8 * 32768 * 32, 2 * 2 * 128
    around = 8 * 32 * vectors
    read = 8 * 513 * 32 * vectors + around
    assert found["dense"] == keys * vectors + around
    assert found["hata"] == keys * 16 + read
    assert found["loki"] == keys * 64 + read
    assert found["quest_16"] == keys * 32 + read
    assert found["quest_32"] == keys * 16 + read
    assert found["magicpig"] == keys * 200 + read
    assert found["exact_topk"] == keys * 256 + read
    assert found["streaming"] == read


def test_the_suite_runs_and_a_wrong_policy_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "policies", lambda case: workload.policies(case) | {"hata": Late()})
    asked = ("hata-layer", "--case", SMALL, "--json", str(tmp_path / "out.json"))
    wanted = ("hata", "streaming", "xla")
    assert main([*asked, *(x for name in wanted for x in ("--backend", name))]) == 1
    result = json.loads((tmp_path / "out.json").read_text())
    told = {row["name"]: row["checked"] for row in result["rows"]}
    assert told == {"hata": False, "streaming": True, "xla": True}
    (group,) = tables.groups(result["rows"])
    dense, policy = (
        tables.time_of(x).median for x in (group.dense["xla"], group.policies["streaming"])
    )
    assert group.speedup("streaming") == pytest.approx(dense / policy)


class Late(Hata):
    """HATA that never reads slot 1, a sink."""

    def __init__(self):
        super().__init__(budget=96, dense_layers=0, bits=32)

    def best(self, arrays, layer, cache, q, most, **budget):
        chosen = super().best(arrays, layer, cache, q, most, **budget)
        return jnp.where(chosen == 1, -1, chosen)


def test_a_table_shows_speed_over_the_fastest_dense_and_targets(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    tables.show(result())
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    lines = {line.split()[4]: line.split() for line in out.splitlines() if line.startswith("8 32K")}
    assert "triton" not in lines
    assert lines["fa3"][5] == "1,000"
    # 500 us at the ceiling of 2 TB/s is 1 GB; it has 100 MB.
    assert lines["hata"][9:] == ["100%", "20.00x", "1.33", "of", "15x"]
    assert lines["quest_16"][-3:] == ["1.67", "of", "1.2x"]
    assert lines["streaming"][-1] == "100.00x"


def result():
    """FlashAttention-3 takes 1 ms, HATA 50 us, Quest 100, streaming 10."""
    case = layer.case("B=8,S=32K") | {"l2": "cold"}
    times = {"hata": 50.0, "quest_16": 100.0, "streaming": 10.0}
    rows = [
        row("attention", case, "triton", 1100.0, bytes=4 * 10**9),
        row("attention", case, "fa3", 1000.0, bytes=4 * 10**9),
        *(row("hata_layer", case, name, t, bytes=10**8) for name, t in times.items()),
    ]
    found = {"suite": "hata-layer", "machine": MACHINE, "rows": rows, "quick": False}
    return found | {"ceilings": list(ceilings())}


def test_cases_are_checked():
    assert layer.case("B=1,S=256K")["n"] == 4096
    for text in ("R=48", "n=32K", "S=1K,n=16", "n=64,S=64"):
        with pytest.raises(ValueError, match="must be"):
            layer.case(text)
    assert len(layer.grid(Settings())) == 2


def test_the_parts_of_a_layer_are_measured_against_the_plain_one(tmp_path, capsys):
    path = tmp_path / "out.json"
    asked = ["hata-ablation", "--quick", "--case", SMALL, "--json", str(path)]
    assert main([*asked, "--backend", "plain", "--backend", "select"]) == 0
    result = json.loads(path.read_text())
    assert [(row["name"], row["checked"]) for row in result["rows"]] == [
        ("plain", True),
        ("select", True),
    ]
    capsys.readouterr()
    case, rows = layer.case("B=1,S=128K"), []
    for name, time in (("plain", 700.0), ("score", 350.0), ("encode", 100.0)):
        rows.append(row("hata_parts", case, name, time, bytes=10**8))
    rows.append(row("hata_budget", case | {"n": 512}, "hata", 80.0, bytes=10**8))
    ablation.show(result | {"rows": rows, "ceilings": list(ceilings())})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert [line.split()[-1] for line in out.splitlines() if "1 128K" in line] == [
        *("1.00x", "2.00x", "7.00x"),
        "62%",
    ]


def test_a_budget_without_room_is_a_row_with_its_reason():
    case = layer.case(SMALL) | {"n": 16}
    (told,) = ablation._some("hata_budget", case, Settings())
    assert told["checked"] is None
    assert "budget=16 must be at least" in told["reason"]
