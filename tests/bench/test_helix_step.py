"""Whole steps on a mesh: their logits are those of one device, and what is not is told."""

import contextlib
import dataclasses
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import helix_check, helix_programs, helix_state, helix_step
from bench.__main__ import SUITES
from bench.helix_check import Computed
from bench.helix_programs import Programs
from bench.settings import Settings
from jspec.helix import attention as exchange
from jspec.models.decoder import Decoder

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
SMALL = "shape=tiny,B=2,S=64,gamma=2"
TIMED = {"checked": "2 layers", "step_ns": [10**7] * 3, "committed": 2.0, "largest_batch": 12}
EARLIER = {"checked": True, "same_tokens": 31, "compared_tokens": 32, "apart": 0.01}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(helix_state, "STEPS", 4)
    monkeypatch.setattr(helix_step, "REPEATS", 1)


def row(text: str) -> dict[str, Any]:
    (found,) = SUITES["helix-step"].run(Settings(quick=True, cases=(f"{SMALL},{text}",)))["rows"]
    return found


@pytest.mark.parametrize(
    "text",
    [
        "kvp=2,overlap=2,draft=verify",
        pytest.param("tpa=2,draft=vegas", marks=pytest.mark.slow),
        pytest.param("kvp=2,tpa=2,draft=vegas", marks=pytest.mark.slow),
        pytest.param("kvp=2,tpa=2,strategy=tp", marks=pytest.mark.slow),
        pytest.param("draft=verify", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_checked_and_timed(text, monkeypatch):
    monkeypatch.setattr(helix_step, "device_bytes", lambda name: 2**30)
    found = row(text)
    assert found["checked"] == "2 layers", found
    drafts = {"draft"} if "vegas" in text else set()
    assert found["error"].keys() == {"verification"} | drafts
    assert found["committed"] >= 1
    assert len(found["step_ns"]) == 1
    # Two layers of keys and values of 2 heads of 16, bfloat16, in 256 slots of 2 rows.
    ranks = found["case"]["kvp"] if found["case"]["strategy"] == "helix" else 1
    assert found["cache_bytes"] == 2 * 2 * 2 * 16 * 2 * 256 * 2 // ranks // found["case"]["tpa"]
    assert 2 < found["largest_batch"] < 2**30 / (found["cache_bytes"] / 2)


@contextlib.contextmanager
def prepared(text: str):
    """A case, and programs that are compiled for its check."""
    here = helix_state.case(f"{SMALL},{text}")
    with ThreadPoolExecutor(1) as pool:
        programs = Programs(pool)
        programs.prepare_checks([here], lambda: None)
        yield here, programs


def off_by_one(monkeypatch):
    """In a program: the first position of a block turns as the one behind it."""
    angles = Decoder.angles

    def wrong(self, positions, spec):
        begins = (positions % 16 == 0) & bool(self.vocabulary_axes)  # on the mesh alone
        return angles(self, positions + begins.astype(positions.dtype), spec)

    monkeypatch.setattr(Decoder, "angles", wrong)


def base_2(monkeypatch):
    """In a program: the second rank's log-sum-exp has base 2."""
    right = exchange.all_to_all_merge

    def wrong(out, lse, axes, by):
        is_wrong = jax.lax.axis_index(axes) == 1
        return right(out, jnp.where(is_wrong, lse / jnp.log(jnp.float32(2)), lse), axes, by)

    monkeypatch.setattr(exchange, "all_to_all_merge", wrong)


def swapped(monkeypatch):
    """Each device has the other one's rows of a layer's output projection."""
    right = helix_state.shard

    def wrong(model, helix):
        kernel = model.layers[1].attention.out.kernel
        kernel[...] = jnp.roll(kernel[...], len(kernel[...]) // 2, axis=0)
        return right(model, helix)

    monkeypatch.setattr(helix_state, "shard", wrong)


def zeroed(monkeypatch):
    """A block of keys and values of one rank and layer is 0."""
    right = helix_programs.filled

    def wrong(model, here, config):
        state = right(model, here, config)
        if here["kvp"] == 1:
            return state
        first, *rest = state.cache.columns
        slots = state.cache.layouts[0].slots(jnp.arange(16, 32, dtype=jnp.int32))
        first = {name: x.at[:, slots].set(jnp.zeros((), x.dtype)) for name, x in first.items()}
        return dataclasses.replace(
            state, cache=dataclasses.replace(state.cache, columns=(first, *rest))
        )

    monkeypatch.setattr(helix_programs, "filled", wrong)


def moved(monkeypatch):
    """Logits at one position are 0.3 of their standard deviation off."""
    right = Programs.computed

    def wrong(self, here, given=None):
        found = right(self, here, given)
        if here["kvp"] > 1:
            own = found.logits["verification"][1, 7]
            own += 0.3 * own.std() * np.random.default_rng(0).standard_normal(own.shape)
        return found

    monkeypatch.setattr(Programs, "computed", wrong)


def is_told(found: tuple[str | None, dict[str, Any]], name: str) -> None:
    reason, about = found
    assert reason is not None
    assert reason.startswith(f"the logits of its {name} are wrong by "), reason
    assert about["error"][name] > 0.1


@pytest.mark.parametrize(("break_mesh", "draft"), [(off_by_one, "plain"), (base_2, "verify")])
def test_a_program_that_is_wrong_is_told(break_mesh, draft, monkeypatch):
    break_mesh(monkeypatch)
    jax.clear_caches()  # what is traced is kept
    with prepared(f"kvp=2,draft={draft}") as (here, programs):
        is_told(helix_step.check(here, programs), "verification")
    jax.clear_caches()


def test_arrays_that_are_wrong_are_told(monkeypatch):
    with prepared("kvp=2,draft=verify") as (here, programs):
        reason, about = helix_step.check(here, programs)
        assert reason is None
        assert about["error"].keys() == {"verification"}
        for break_mesh in (swapped, zeroed, moved):
            with monkeypatch.context() as patch:
                break_mesh(patch)
                is_told(helix_step.check(here, programs), "verification")


def test_a_draft_reads_what_all_devices_hold_of_its_selection(monkeypatch):
    monkeypatch.setitem(helix_state.DRAFTS, "vegas", "vegas:budget=0.25,least=0")
    placed = helix_check._placed

    def of_one_device(positions, like):
        own, size = placed(positions, like), positions.shape[1]
        return own if like.shape[1] == size else own.at[:, size:].set(-1)

    with prepared("S=128,kvp=2,draft=vegas") as (here, programs):
        reason, about = helix_step.check(here, programs)
        assert reason is None
        assert about["error"].keys() == {"verification", "draft"}
        monkeypatch.setattr(helix_check, "_placed", of_one_device)
        is_told(helix_step.check(here, programs), "draft")


def test_what_is_wrong_is_not_timed(monkeypatch):
    told = "its logits are wrong", {"error": {"verification": 0.3}}
    monkeypatch.setattr(Programs, "prepare", lambda self, cases: None)
    monkeypatch.setattr(helix_step, "check", lambda here, programs: told)
    found = row("kvp=2")
    assert (found["checked"], found["reason"]) == (False, "its logits are wrong")
    assert found["error"] == {"verification": 0.3}
    assert "step_ns" not in found


def rounded(right: Computed, seed: int, by: float = 0.02) -> Computed:
    """``right`` with noise of so much of its norm at each position, more at some than at others."""
    rng = np.random.default_rng(seed)

    def of(x: np.ndarray) -> np.ndarray:
        size = by * rng.uniform(0.5, 2, (*x.shape[:-1], 1))
        return x + size * rng.standard_normal(x.shape, np.float32)

    return Computed({name: of(x) for name, x in right.logits.items()}, right.picked)


def test_logits_are_as_near_to_one_device_as_rounding_explains():
    rng = np.random.default_rng(0)
    logits = {x: rng.standard_normal((4, 18, 999), np.float32) for x in ("verification", "draft")}
    right = Computed(logits, [np.arange(40).reshape(2, 20)])
    one, found = rounded(right, 1), rounded(right, 2)

    def reason(found: Computed, one: Computed = one) -> str | None:
        return helix_check.judged(found, one, right)[0]

    def off(where: Any, by: float) -> Computed:
        wrong = {name: x.copy() for name, x in found.logits.items()}
        wrong["draft"][where] += by * rng.standard_normal(wrong["draft"][where].shape)
        return dataclasses.replace(found, logits=wrong)

    assert reason(found) is None
    assert reason(one) is None
    # At one position by 0.3 standard deviations, and at all by less than rounding is at the worst.
    for where, by, told in (
        (np.s_[2, 7], 0.3, r"\d+\.\d% at the worst position"),
        (np.s_[:], 0.05, r"\d+\.\d% in the mean of a row"),
        (np.s_[2, 7], np.nan, "nan%"),
    ):
        told = f"the logits of its draft are wrong by {told}"
        assert re.match(told, reason(off(where, by)) or ""), (where, by)
    far = rounded(right, 1, by=0.1)
    assert (reason(far, far) or "").startswith("one device's logits of its verification are wrong")
    other = [np.where(right.picked[0] % 5 == 0, 77, right.picked[0])]
    assert reason(dataclasses.replace(found, picked=other)) == (
        "it picks 80% of what it should in a layer"
    )


def test_the_error_of_one_device_is_against_float32():
    ones = np.ones((1, 2, 9), np.float32)
    right, one = (Computed({"verification": x}, []) for x in (ones, 1.03 * ones))
    _, error = helix_check.judged(one, one, right)
    assert error == {"verification": pytest.approx(0.03, rel=1e-4)}


def test_too_few_devices_are_a_row_with_its_reason():
    found = row("shape=llama-3.1-8b,kvp=32")
    assert found["checked"] is None
    assert found["reason"].startswith("it needs 32 devices, and ")


def test_tables_say_what_was_measured_and_why_not(capsys):
    case = helix_state.case(f"{SMALL},kvp=2,overlap=2,draft=vegas")
    own = {"operation": "step", "case": case, "name": "helix, 2 chunks"}
    earlier = own | {"case": case | {"S": 128}} | TIMED | EARLIER
    other = own | {"case": case | {"B": 1}, "reason": "it needs 2 devices"}
    machine = {"device": "x", "versions": {}, "driver": "", "cores": 2, "date": "today"}
    error = {"verification": 0.012, "draft": 0.034}
    result = {"machine": machine, "rows": [own | TIMED | {"error": error}, earlier, other]}
    SUITES["helix-step"].show(result)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "[1] it needs 2 devices" in lines
    shown = [" ".join(line.split()) for line in lines]
    assert any("10.000 2.00 5.000 3.4% 12" in line for line in shown)
    assert any("10.000 2.00 5.000 12" in line for line in shown)
    assert SUITES["helix-step"].compare(result, result) == 2
    SUITES["helix-step"].show(result)
    assert " 1.00x" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S=40", "S=40 must be a multiple of 16"),
        ("tpa=16", "tpa=16 is more than the 8 key-value heads"),
        ("overlap=2", "overlap=2 cuts the exchange"),
        ("draft=hope", "draft=hope must be one of plain, verify, vegas"),
    ],
    ids=str,
)
def test_cases_that_cannot_be_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        helix_state.case(text)
