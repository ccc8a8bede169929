"""The suite `helix`: what is right is timed, what is wrong is told, and what cannot run."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from bench import clocks
from bench.decode import running
from bench.helix import LAYER, MESSAGE, STEP, check, mesh, messages, shapes, states, steps
from bench.helix.check import Computed
from bench.settings import Settings
from jspec.helix import attention as exchange
from jspec.models.decoder import Decoder
from tests.models.goldens import GOLDEN
from tests.parameters import default_run

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices")
SMALL = "shape=tiny,B=2,S=64,gamma=2"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Compiling loops takes longer than what is looked at here."""
    monkeypatch.setattr(mesh, "marginal", lambda *args: [1000])
    monkeypatch.setattr(clocks, "UNROLL", 1)
    monkeypatch.setattr(states, "STEPS", 4)
    monkeypatch.setattr(running, "CPU_REPEATS", 1)
    check._reference.cache_clear()


def rows(benchmark: Any, text: str) -> list[dict]:
    return list(benchmark.rows(benchmark.case(text), Settings(quick=True)))


def is_refused(row: dict) -> bool:
    """Whether a row is of an exchange that cannot run here, as Mosaic GPU's on a CPU."""
    reason = row.get("reason") or ""
    return row["checked"] is None and reason.startswith("exchange='pallas' cannot run here: ")


# A layer, and messages


@pytest.mark.parametrize(
    ("kvp", "tpa", "strategy"),
    default_run([(4, 1, "helix"), (2, 2, "gather"), (2, 1, "medha")], "2-2-gather"),
)
def test_attention_on_a_mesh_is_checked_and_timed(kvp, tpa, strategy):
    text = f"B=2,S=64,heads=4/2,H=16,T=3,kvp={kvp},tpa={tpa},strategy={strategy}"
    (row,) = rows(LAYER, text)
    assert (row["name"], row["checked"], row["step_ns"]) == (strategy, True, [1000])
    assert row["bytes"] == 2 * 2 * 2 * 64 * 2 * 16 // (kvp * tpa)


def test_a_kernel_that_refuses_is_a_row_with_its_reason():
    small = "B=2,S=64,heads=4/2,H=16,kvp=2"
    by_name = {name: rows(LAYER, f"{small},kernel={name}")[0] for name in ("xla", "cuda")}
    assert by_name["xla"]["checked"] is True
    assert by_name["cuda"]["checked"] is None
    assert "H=16 and H'=16 are not both 64 or" in by_name["cuda"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["up=before,overlap=2", "up=after", "exchange=cuda"])
def test_latent_attention_on_a_mesh_is_checked_and_timed(how):
    (row,) = rows(LAYER, f"B=3,S=64,heads=4/1,H=24,latent=16,kvp=2,{how}")
    assert row["checked"] is True, row
    assert row["bytes"] == 3 * 64 * 24 * 2 // 2


def test_an_exchange_that_is_wrong_is_told(monkeypatch):
    monkeypatch.setattr(exchange, "merge_attention", lambda outs, lses: (outs[0], lses[0]))
    (row,) = rows(LAYER, "B=2,S=64,heads=4/2,H=16,kvp=2")
    assert (row["checked"], row["reason"]) == (False, "its output is wrong")


def test_every_collective_is_what_numpy_makes_of_it(monkeypatch):
    measured = rows(MESSAGE, "P=4,bytes=256")
    assert [row["name"] for row in measured] == list(messages.COLLECTIVES)
    assert all(row["checked"] is True for row in measured if not is_refused(row))
    _, right = messages.COLLECTIVES["all_reduce"]
    monkeypatch.setattr(messages, "COLLECTIVES", {"all_reduce": (jnp.negative, right)})
    assert [row["checked"] for row in rows(MESSAGE, "P=4,bytes=64")] == [False]


@pytest.mark.parametrize(
    ("benchmark", "text"), [(MESSAGE, "P=64"), (LAYER, "kvp=64,S=1K"), (STEP, "kvp=32")]
)
def test_too_few_devices_are_a_row_with_its_reason(benchmark, text):
    for row in rows(benchmark, text):
        assert row["checked"] is None
        assert re.match(r"it needs (64|32) devices, and JAX has ", row["reason"])


# Whole steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *("kvp=2,overlap=2,draft=verify", "tpa=2,draft=vegas", "kvp=2,tpa=2,draft=vegas"),
        *("kvp=2,tpa=2,strategy=tp", "draft=verify"),
    ],
)
def test_a_step_is_checked_and_timed(text, monkeypatch):
    monkeypatch.setattr(steps, "device_bytes", lambda name: 2**30)
    (row,) = rows(STEP, f"{SMALL},{text}")
    assert row["checked"] == "2 layers", row
    drafts = {"draft"} if "vegas" in text else set()
    assert row["error"].keys() == {"verification"} | drafts
    assert row["committed"] >= 1
    assert len(row["step_ns"]) == 1
    # Three layers of keys and values of 2 heads of 16, bfloat16, in 256 slots of 2 rows.
    ranks = row["case"]["kvp"] if row["case"]["strategy"] == "helix" else 1
    cache_bytes = row["memory"]["cache_bytes"]
    assert cache_bytes == 3 * 2 * 2 * 16 * 2 * 256 * 2 // ranks // row["case"]["tpa"]
    assert 2 < row["fit"] < 2**30 / (cache_bytes / 2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["kvp=4,ep=2", "kvp=2,strategy=tp,ep=2"])
def test_a_step_with_latents_and_experts_is_checked_and_timed(mesh, monkeypatch):
    config = jspec.load_model(GOLDEN / "deepseek_v3").config
    monkeypatch.setitem(states.MODELS, "tiny", config)
    (row,) = rows(STEP, f"{SMALL},draft=verify,{mesh}")
    assert row["checked"] == "2 layers", row
    ranks = 1 if "tp" in mesh else row["case"]["kvp"]
    assert row["memory"]["cache_bytes"] == 2 * 2 * 256 * 2 * config.layers[0].key_size // ranks
    (row,) = rows(STEP, f"{SMALL},layers=1,kvp=2")
    assert row["checked"] == "1 layers"


def off_by_one(monkeypatch):
    """In a program: the first position of a block turns as the next one."""
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
    right = states.shard

    def wrong(model, helix):
        kernel = model.layers[1].attention.out.kernel
        kernel[...] = jnp.roll(kernel[...], len(kernel[...]) // 2, axis=0)
        return right(model, helix)

    monkeypatch.setattr(states, "shard", wrong)


def zeroed(monkeypatch):
    """A block of keys and values of one rank and layer is 0."""
    right = check.filled

    def wrong(model, case, config):
        state = right(model, case, config)
        if case["kvp"] == 1:
            return state
        first, *rest = state.cache.columns
        slots = state.cache.layouts[0].slots(jnp.arange(16, 32, dtype=jnp.int32))
        first = {name: x.at[:, slots].set(jnp.zeros((), x.dtype)) for name, x in first.items()}
        return dataclasses.replace(
            state, cache=dataclasses.replace(state.cache, columns=(first, *rest))
        )

    monkeypatch.setattr(check, "filled", wrong)


def moved(monkeypatch):
    """Logits at one position are 0.3 of their standard deviation off."""
    right = check.computed

    def wrong(case, reference=None, **settings):
        result = right(case, reference, **settings)
        if case["kvp"] > 1:
            logits = result.logits["verification"][1, 7]
            logits += 0.3 * logits.std() * np.random.default_rng(0).standard_normal(logits.shape)
        return result

    monkeypatch.setattr(check, "computed", wrong)


def is_told(result: tuple[str | None, dict[str, float]], name: str) -> None:
    reason, error = result
    assert reason is not None
    assert reason.startswith(f"the logits of its {name} are wrong by "), reason
    assert error[name] > 0.1


@pytest.mark.exhaustive
@pytest.mark.parametrize(("break_mesh", "draft"), [(off_by_one, "plain"), (base_2, "verify")])
def test_a_program_that_is_wrong_is_told(break_mesh, draft, monkeypatch):
    break_mesh(monkeypatch)
    jax.clear_caches()  # what is traced is kept
    is_told(check.check(STEP.case(f"{SMALL},kvp=2,draft={draft}")), "verification")
    jax.clear_caches()


@pytest.mark.exhaustive
def test_arrays_that_are_wrong_are_told(monkeypatch):
    case = STEP.case(f"{SMALL},kvp=2,draft=verify")
    reason, error = check.check(case)
    assert reason is None
    assert error.keys() == {"verification"}
    for break_mesh in (swapped, zeroed, moved):
        with monkeypatch.context() as patch:
            break_mesh(patch)
            is_told(check.check(case), "verification")


@pytest.mark.slow
def test_a_draft_reads_what_all_devices_have_of_its_selection(monkeypatch):
    monkeypatch.setitem(states.DRAFTS, "vegas", "vegas:budget=0.25,least=0")
    placed = check._placed

    def of_one_device(positions, like):
        whole, size = placed(positions, like), positions.shape[1]
        return whole if like.shape[1] == size else whole.at[:, size:].set(-1)

    case = STEP.case(f"{SMALL},S=128,kvp=2,draft=vegas")
    reason, error = check.check(case)
    assert reason is None
    assert error.keys() == {"verification", "draft"}
    monkeypatch.setattr(check, "_placed", of_one_device)
    is_told(check.check(case), "draft")


def test_what_is_wrong_is_not_timed(monkeypatch):
    told = "its logits are wrong", {"verification": 0.3}
    monkeypatch.setattr(check, "check", lambda case: told)
    (row,) = rows(STEP, f"{SMALL},kvp=2")
    assert (row["checked"], row["reason"], row["error"]) == (False, *told)
    assert "step_ns" not in row


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
    one, mesh = rounded(right, 1), rounded(right, 2)

    def reason(mesh: Computed, one: Computed = one) -> str | None:
        return check.judged(mesh, one, right)[0]

    def off(where: Any, by: float) -> Computed:
        wrong = {name: x.copy() for name, x in mesh.logits.items()}
        wrong["draft"][where] += by * rng.standard_normal(wrong["draft"][where].shape)
        return dataclasses.replace(mesh, logits=wrong)

    assert reason(mesh) is None
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
    assert reason(dataclasses.replace(mesh, picked=other)) == (
        "it picks 80% of what it should in a layer"
    )


def test_the_error_of_one_device_is_against_float32():
    ones = np.ones((1, 2, 9), np.float32)
    right, one = (Computed({"verification": x}, []) for x in (ones, 1.03 * ones))
    _, error = check.judged(one, one, right)
    assert error == {"verification": pytest.approx(0.03, rel=1e-4)}


@pytest.mark.parametrize(
    ("benchmark", "text", "message"),
    [
        (MESSAGE, "P=1", "P must be 2 or more"),
        (MESSAGE, "P=4,bytes=24", "a multiple of 4 P"),
        (LAYER, "heads=8/2,tpa=4", "tpa=4 is more than the 2 key-value heads"),
        (LAYER, "strategy=ring", "strategy=ring must be one of helix"),
        (LAYER, "kvp=1,overlap=2", "overlap=2 cuts the exchange"),
        (LAYER, "latent=512", "latent=512 must be at most H=128"),
        (LAYER, "up=after", "up=after projects latents"),
        (STEP, "S=40", "S=40 must be a multiple of 16"),
        (STEP, "tpa=16", "tpa=16 is more than the 8 key-value heads"),
        (STEP, "overlap=2", "overlap=2 cuts the exchange"),
        (STEP, "kvp=2,ep=2", "ep=2 shares out experts, and llama-3.1-8b has none"),
        (STEP, "draft=hope", "draft=hope must be one of plain, verify, vegas"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_cases_that_cannot_be_are_refused(benchmark, text, message):
    with pytest.raises(ValueError, match=message):
        benchmark.case(text)


def test_every_default_case_is_one(monkeypatch):
    for backend in ("cpu", "gpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        for benchmark in (STEP, LAYER, MESSAGE, *shapes.SUITE.benchmarks):
            for quick in (False, True):
                assert benchmark.grid(Settings(quick=quick))
