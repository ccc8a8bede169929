"""Drafts that end early: where they do, by brute force; their tokens and the law of these."""

import dataclasses
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jspec import helix
from jspec.config import SamplingParams
from jspec.decode import prefill
from jspec.decode import step as step_module
from jspec.decode.draft import ModelDraft, SelfDraft, base
from jspec.decode.draft.base import autoregressive
from jspec.decode.ending import LEVELS, MEMORY, SHARED, Ending, level_of
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk
from jspec.ops import vocabulary as vocabulary_module
from jspec.ops.stochastic import Rule
from jspec.policies import Quest
from tests.decode.common import STREAMING, prompts
from tests.decode.engines import VEGAS
from tests.decode.text_laws import (
    PROMPT,
    SAMPLED,
    SOURCES,
    check_counts,
    enumerated,
    second,
    seeded,
    target,
)

# --- what is known -------------------------------------------------------------------------------


def logits_of(rows: int = 64, vocabulary: int = 40) -> np.ndarray:
    """From flat to nearly certain, with minus infinity and NaN among them."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(rows, vocabulary))
    logits[:, 2] += np.linspace(0, 14, rows)
    logits[::5, 3], logits[1::5, 4], logits[7] = -np.inf, np.nan, -np.inf
    logits[8, 1:] = -np.inf
    return logits.astype(np.float32)


def right_levels(logits: np.ndarray, temperature: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The level of each row in float64, and how far it is from the next one."""
    logits = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    logits[~np.isfinite(logits).any(axis=1)] = 0
    scaled = logits / np.where(temperature > 0, temperature, 1)[:, None]
    mass = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    others = np.sort(mass, axis=1)[:, :-1].sum(axis=1) / mass.sum(axis=1)
    found = -np.log2(np.maximum(others, 2.0**-LEVELS))
    return np.clip(found, 0, LEVELS - 1).astype(int), np.abs(found - np.round(found))


@pytest.mark.parametrize("devices", [1, 4])
def test_a_level_is_that_of_the_mass_of_other_tokens(devices):
    logits = logits_of()
    temperature = np.resize(np.array([0.0, 0.5, 1.0, 2.0], np.float32), len(logits))
    right, apart = right_levels(logits, temperature)
    if devices == 1:
        got = level_of(jnp.asarray(logits), jnp.asarray(temperature))
    else:
        mesh = jax.make_mesh((devices,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = PartitionSpec(None, "v")
        sharded = jax.shard_map(
            lambda x: level_of(x, jnp.asarray(temperature), "v"),
            mesh=mesh,
            in_specs=spec,
            out_specs=PartitionSpec(),
        )
        got = jax.jit(sharded)(jnp.asarray(logits))
    sure = apart > 1e-3
    assert sure.sum() > 50
    assert len(set(right)) > 10
    np.testing.assert_array_equal(np.asarray(got)[sure], right[sure])
    greedy = level_of(jnp.asarray(logits), None)
    right, apart = right_levels(logits, np.zeros(len(logits)))
    np.testing.assert_array_equal(np.asarray(greedy)[apart > 1e-3], right[apart > 1e-3])


def test_a_token_counts_where_all_before_it_were_accepted():
    """Against counting token by token; what was known fades."""
    rng = np.random.default_rng(1)
    ending = Ending.unknown(6)
    tried, taken = np.zeros((6, LEVELS)), np.zeros((6, LEVELS))
    for _ in range(30):
        levels, lengths = rng.integers(0, LEVELS, (6, 5)), rng.integers(0, 6, 6)
        accepted = rng.integers(0, lengths + 1)
        arrays = (jnp.asarray(x, jnp.int32) for x in (levels, lengths, accepted))
        ending = ending.learned(*arrays)
        tried, taken = tried * 0.5 ** (1 / MEMORY), taken * 0.5 ** (1 / MEMORY)
        for row in range(6):
            for at in range(min(accepted[row] + 1, lengths[row])):
                tried[row, levels[row, at]] += 1
                taken[row, levels[row, at]] += at < accepted[row]
    np.testing.assert_allclose(ending.tried, tried, rtol=1e-5)
    np.testing.assert_allclose(ending.accepted, taken, rtol=1e-5)


def test_rates_go_from_what_drafts_say_to_what_is_accepted():
    """Nothing is known, then the other rows, then much of the row itself."""
    said = 1 - 0.5 ** (np.arange(LEVELS) + 1.0)
    np.testing.assert_allclose(Ending.unknown(2).rates, np.tile(said, (2, 1)), rtol=1e-6)
    tried = np.zeros((2, LEVELS), np.float32)
    tried[0, 2] = 1e6
    known = Ending(jnp.asarray(tried), jnp.asarray(0.25 * tried), jnp.zeros(2))
    np.testing.assert_allclose(known.rates[:, 2], 0.25, atol=1e-4)
    np.testing.assert_allclose(known.mean_rate, 0.25, atol=1e-4)
    np.testing.assert_allclose(known.rates[:, 3], said[3], rtol=1e-6)
    tried[1, 2] = SHARED
    known = Ending(jnp.asarray(tried), jnp.asarray([[0.25], [1.0]] * tried), jnp.zeros(2))
    np.testing.assert_allclose(known.rates[1, 2], (1 + 0.25) / 2, atol=1e-3)


# --- where a draft ends --------------------------------------------------------------------------


@jax.jit
def drafted_by(table, ending, lengths, limits, draft_limits, done):
    """A draft whose logits behind token i are ``table[i]``, and the passes that it took."""
    batch, gamma = table.shape[1], table.shape[0]
    state = SimpleNamespace(
        lengths=lengths,
        last_token=jnp.zeros(batch, jnp.int32),
        mode="greedy",
        ending=ending,
        limits=limits,
        draft_limits=draft_limits,
        done=done,
    )

    def advance(step, token, positions, passes):
        return table[step], passes + 1

    config = SimpleNamespace(gamma=gamma, ends_early=True)
    return autoregressive(state, config, advance, jnp.int32(0))  # pyright: ignore


def ends_at(levels, ending, room, live) -> int:
    """Where the draft ends: behind the first token whose next one gains no more than its price."""
    rates, mean = np.asarray(ending.rates, np.float64), np.asarray(ending.mean_rate, np.float64)
    price, count = np.asarray(ending.price), 1
    reached = np.ones(len(live))
    while count < len(levels):
        for row in range(len(live)):
            reached[row] *= rates[row, levels[count - 1][row]]
        gain = sum(reached[r] * mean[r] for r in range(len(live)) if live[r] and room[r] > count)
        if gain <= sum(price[r] for r in range(len(live)) if live[r]):
            break
        count += 1
    return count


def test_a_draft_ends_where_the_next_token_is_not_worth_a_pass():
    rng, counts = np.random.default_rng(2), Counter()
    batch, gamma = 3, 6
    for trial in range(60):
        table = rng.normal(size=(gamma, batch, 12)) * rng.choice([0.3, 3, 9], (gamma, batch, 1))
        tried = rng.integers(0, 20, (batch, LEVELS)).astype(np.float32)
        taken = np.floor(tried * rng.random((batch, LEVELS))).astype(np.float32)
        price = np.full(batch, rng.choice([0.0, 0.1, 0.3, 0.6]), np.float32)
        ending = Ending(*map(jnp.asarray, (tried, taken, price)))
        lengths = np.array([5, 9, 3], np.int32)
        limits = (lengths + rng.integers(1, 12, batch)).astype(np.int32)
        most, done = rng.integers(0, 9, batch).astype(np.int32), rng.random(batch) < 0.2
        own, passes = drafted_by(
            jnp.asarray(table, jnp.float32),
            ending,
            *map(jnp.asarray, (lengths, limits, most, done)),
        )
        flat = table.astype(np.float32).reshape(-1, 12)
        levels = right_levels(flat, np.zeros(len(flat)))[0].reshape(gamma, batch)
        room = np.minimum(limits - lengths - 1, most)
        right = ends_at(levels, ending, room, ~done)
        assert passes == right, trial
        np.testing.assert_array_equal(own.lengths, right)
        np.testing.assert_array_equal(own.tokens[:, :right], table.argmax(-1).T[:, :right])
        np.testing.assert_array_equal(own.levels[:, :right], levels.T[:, :right])
        counts[right] += 1
    assert set(counts) == set(range(1, gamma + 1))


# --- in steps ------------------------------------------------------------------------------------

DRAFTS = {
    "in-a-copy": STREAMING,
    "in-the-cache": SelfDraft(Quest(budget=12, page=4, sinks=1, recent=2, dense_layers=0)),
    "guided": VEGAS,
    "model": ModelDraft(),
}


def priced(state, price: float):
    return dataclasses.replace(state, ending=state.ending.priced(price))


def run_steps(models, texts, params, config, price):
    """The tokens, and what each step of each row drafted."""
    state = priced(start_decoding(models, texts, params, config, capacity=256), price)
    drafted = []
    while not bool(state.done.all()):
        state, record = decode_chunk(models, state, config, 4)
        drafted.append(np.where(record.committed > 0, record.drafted, -1))
    tokens = [row[row >= 0].tolist() for row in np.asarray(state.tokens)]
    return tokens, np.concatenate(drafted), state


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * x.startswith("in-")) for x in DRAFTS]
)
def test_greedy_tokens_are_the_plain_ones_wherever_drafts_end(name, sharp, other):
    texts, params = prompts((40, 9, 17)), SamplingParams(max_new_tokens=40)
    models = Models(sharp, other if name == "model" else None)
    plain = generate(sharp, texts, params, draft=None).tokens
    config = StepConfig(6, DRAFTS[name], ends_early=True)
    price = 0.2 if name == "model" else 0.6  # which agrees by chance
    tokens, drafted, state = run_steps(models, texts, params, config, price)
    assert [row[len(text) :] for row, text in zip(tokens, texts, strict=True)] == list(
        map(list, plain)
    )
    assert len(set(drafted[drafted >= 0])) > 2
    assert float(state.ending.tried.sum()) > 10


def test_at_no_price_drafts_are_whole(sharp):
    texts, params = prompts((40, 9)), SamplingParams(max_new_tokens=40)
    found = []
    for early in (False, True):
        config = StepConfig(5, STREAMING, ends_early=early)
        tokens, drafted, _ = run_steps(Models(sharp), texts, params, config, 0.0)
        found.append((tokens, drafted.tolist()))
    assert found[0] == found[1]


def check_law_alone(source: str, rule: Rule, rows: int, monkeypatch) -> None:
    """The joint law of four tokens over texts of which each is a batch by itself, so that its own
    tokens alone end its drafts; fails below p = 1e-4."""
    monkeypatch.setattr(prefill, "CAPACITY_STEP", 2)
    monkeypatch.setattr(vocabulary_module, "TILE", 4)
    draft, price = SOURCES[source], {"streaming": 0.25, "model": 0.52}[source]
    backends = dict.fromkeys(("verify_stochastic", "sample"), "xla")  # kernels take no vmap
    config = StepConfig(3, draft, backends, rule=rule, ends_early=True)
    models = Models(target(), second() if draft.needs_model else None)
    start = start_decoding(models, [PROMPT] * rows, seeded(SAMPLED, 0, rows), config)
    alone, drafted = jax.tree.map(lambda x: x[:, None], priced(start, price)), Counter()
    step = jax.jit(jax.vmap(lambda own: step_module.step(models, own, config)))
    for _ in range(SAMPLED.max_new_tokens):
        alone, record = step(alone)
        drafted.update(record.drafted[record.committed > 0].tolist())
    assert bool(alone.done.all())
    assert min(drafted[1], drafted[2], drafted[3]) > rows / 12
    texts = np.asarray(alone.tokens)[:, 0, len(PROMPT) : len(PROMPT) + SAMPLED.max_new_tokens]
    check_counts(Counter(map(tuple, texts.tolist())), enumerated(SAMPLED))


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
@pytest.mark.parametrize("source", ["streaming", pytest.param("model", marks=pytest.mark.slow)])
def test_texts_by_drafts_that_end_early_have_the_target_law(source, rule, monkeypatch):
    check_law_alone(source, rule, 12_000, monkeypatch)


@pytest.mark.slow
def test_a_token_may_not_decide_whether_it_is_drafted(monkeypatch):
    """A mutant whose drafts leave out a last token of 1."""
    right = base.while_it_pays

    def mutant(*args):
        count, levels, carried, logits = right(*args)
        _, tokens, _ = carried
        last = jnp.take(tokens, count - 1, axis=1)
        return jnp.where(last == 1, count - 1, count), levels, carried, logits

    monkeypatch.setattr(base, "while_it_pays", mutant)
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law_alone("streaming", "token", 3000, monkeypatch)


def test_a_mesh_ends_drafts_where_one_device_does(sharp):
    texts = prompts((40, 9))
    params = [SamplingParams(max_new_tokens=24, seed=1, temperature=t) for t in (0.0, 0.9)]
    config = StepConfig(5, STREAMING, ends_early=True)
    sharded = helix.shard(sharp, helix.HelixConfig(kvp=2, tpa=2, block=4))
    one, many = (run_steps(m, texts, params, config, 0.6) for m in (Models(sharp), Models(sharded)))
    assert one[0] == many[0]
    np.testing.assert_array_equal(one[1], many[1])
    assert len(set(one[1][one[1] >= 0])) > 2
