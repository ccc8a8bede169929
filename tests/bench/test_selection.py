"""The suites of hash codes and selection: what they expect, and checks that can fail."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench import hash as hashing
from bench import point, select
from bench.__main__ import SUITES, main
from bench.settings import Settings
from jspec.dispatch import Backend, always
from jspec.policies import MagicPIG
from tests.ops.test_collisions import collided
from tests.ops.test_hash import shared_bits
from tests.ops.test_selection import by_sorting

SMALL = {
    "select": [
        {"rows": 3, "n": 200, "k": 9, "scores": name} for name in ("0..128", "float32", "bfloat16")
    ],
    "hash": [hashing.case("B=2,S=64,n=9,heads=4/2,H=16,R=64,T=2")],
}


@pytest.mark.parametrize("case", SMALL["select"], ids=lambda case: case["scores"])
def test_what_is_expected_is_a_stable_sort(case):
    scores = select.scores_of(case)
    lengths = np.full(3, 200)
    wanted = by_sorting(scores, lengths, lengths, k=9)
    np.testing.assert_array_equal(select.expected(scores, 9), wanted)


def test_expected_scores_are_shared_bits():
    rng = np.random.default_rng(0)
    q, k = (rng.integers(0, 2**32, x, np.uint32) for x in ((2, 3, 4, 2), (2, 9, 2, 2)))
    np.testing.assert_array_equal(hashing.scores_of(q, k), shared_bits(q, k))


def test_expected_collisions_are_shared_buckets():
    policy, rng = MagicPIG(bits=3, tables=40), np.random.default_rng(0)
    used = hashing.used_bits(policy)
    q, k = (rng.integers(0, 2**32, x, np.uint32) & used for x in ((2, 3, 4, 6), (2, 9, 2, 6)))
    np.testing.assert_array_equal(hashing.collisions_of(q, k, 40), collided(q, k, 40))
    assert np.bitwise_count(used).tolist() == [32] * 3 + [8] * 3


@pytest.mark.parametrize("name", SMALL)
def test_every_backend_is_checked_and_a_wrong_one_is_told(name, tmp_path, monkeypatch):
    module = {"select": select, "hash": hashing}[name]
    monkeypatch.setattr(module, "grid", lambda settings: SMALL[name])

    def broken(operation):
        def run(*arguments, **static):
            out = operation.backend("xla").run(*arguments, **static)
            return (
                tuple(x + x.dtype.type(1) for x in out) if type(out) is tuple else out.at[0].add(1)
            )

        return dataclasses.replace(
            operation,
            backends=dict(operation.backends) | {"broken": Backend("broken", run, always)},
        )

    found = [broken(operation) for operation in SUITES[name].operations]
    for own, wrong in zip(SUITES[name].operations, found, strict=True):
        monkeypatch.setattr(module, next(x for x, y in vars(module).items() if y is own), wrong)
    monkeypatch.setitem(SUITES, name, dataclasses.replace(SUITES[name], operations=tuple(found)))
    assert main([name, "--json", str(tmp_path / "out.json")]) == 1
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    told = {row["name"]: row["checked"] for row in rows}
    assert told["xla"] is True
    assert told["broken"] is False
    assert {row["operation"] for row in rows} == {operation.name for operation in found}


def test_cases_of_the_hash_suite_are_checked():
    for text in ("R=48", "n=64K", "S=0"):
        with pytest.raises(ValueError, match="must be"):
            hashing.case(text)
    assert point.DEVICE.reason is None or len(hashing.grid(Settings(True, True, ()))) == 1
    assert jnp.dtype(select.scores_of(SMALL["select"][2]).dtype) == jnp.bfloat16
