"""What ``exact="tokens"`` has of a prefill: a prompt's passes follow from its own length.

With the CPU's backends in place of the batch-invariant ones; those: tests/triton.
"""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import jspec
from jspec import tuned
from jspec.config import SamplingParams
from jspec.decode import checks, prefill, prefill_pass, settings, slot_prefill
from jspec.decode.draft import GuidedDraft, NoDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import EXACT_APPENDS, StepConfig
from jspec.decode.slot_prefill import SlotPrefill
from jspec.decode.state import Models
from jspec.dispatch import Backends
from jspec.ops.attention.dense import attention_sizes
from jspec.policies import Vegas
from jspec.policies.prepare import prepare_params
from tests.decode.common import DRAFTERS, prompts
from tests.parameters import default_run

CHUNK = 8
TEXTS = prompts((1, 30, 12, 17), seed=2)
SYSTEM = prompts((70,), seed=8)[0]
GUIDED = GuidedDraft(Vegas(budget=8, least=0))
EVERY = {name: DRAFTERS[name] for name in ("plain", "ngram", "model")}
EVERY |= {"vegas": GUIDED, "quest": jspec.named_draft("quest:budget=64")}


@pytest.fixture
def on_a_cpu(monkeypatch):
    """As if the CPU's backends were those of exact decoding, and passes of 2 tokens few."""
    monkeypatch.setattr(checks, "refuses_triton", lambda: None)
    monkeypatch.setattr(settings, "EXACT_APPENDS", Backends())
    monkeypatch.setitem(settings.EXACT_BACKENDS, "tokens", Backends())
    for module in (prefill, prefill_pass, slot_prefill):
        monkeypatch.setattr(module, "BUSY_PASS", 2)


@pytest.fixture
def passes(monkeypatch):
    """Rows, begin and size of each pass of a prefill."""
    seen = []
    chunk_of, of_slot = prefill.prefill_chunk, SlotPrefill._pass

    def run(models, cache, drafter_state, tokens, begin, **static):
        seen.append((len(tokens), int(begin), static["size"]))
        return chunk_of(models, cache, drafter_state, tokens, begin, **static)

    def run_of_slot(self, row, size, selects):
        seen.append((len(row.tokens), row.done, size))
        return of_slot(self, row, size, selects)

    monkeypatch.setattr(prefill, "prefill_chunk", run)
    monkeypatch.setattr(SlotPrefill, "_pass", run_of_slot)
    return seen


def config_of(draft, gamma: int = 2) -> StepConfig:
    return StepConfig(0 if isinstance(draft, NoDraft) else gamma, draft, exact="tokens")


def keys_of(state, row: int, length: int) -> list[np.ndarray]:
    """Keys and values of the first tokens of a row."""
    columns = state.cache.columns
    return [np.asarray(x[n][row, :length]) for x in columns for n in ("keys", "values")]


def assert_equal(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for mine, its in zip(got, want, strict=True):
        np.testing.assert_array_equal(mine, its)


def test_only_the_appends_of_a_prefill_are_exact():
    config = StepConfig(backends=Backends(sample="xla"), exact="tokens")
    assert config.of_prefill == Backends({**EXACT_APPENDS, "sample": "xla"})
    decoding = {"linear", "linear_chain", "attention", "scored_attention"}
    exact = {*EXACT_APPENDS, *decoding}
    assert set(config.of_verification) == {*exact, "sample"}
    assert {config.of_verification[name] for name in decoding} == {"exact_decode"}


def test_scores_are_of_a_prefill_and_need_its_bits(tiny):
    with pytest.raises(ValueError, match=r'an ordinary prefill, .*; pass exact="bits" or leave'):
        jspec.score_tokens(tiny, [[1, 2]], exact="tokens")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("table", [x for x in tuned.tables().values() if x.compute_capability])
def test_no_capacity_changes_the_attention_of_a_prefill_on_a_gpu(table):
    for tokens, group, channels in itertools.product(
        (prefill_pass.BUSY_PASS, 512, 2048), (1, 4, 8), (64, 128, 256)
    ):
        orders = set()
        for slots in (256, 8192, 2**15, 2**18, 2**20):
            q = jax.ShapeDtypeStruct((1, tokens, group, channels), "bfloat16")
            k = jax.ShapeDtypeStruct((1, slots, 1, channels), "bfloat16")
            orders.add(table.order("attention", attention_sizes(q, k)))  # pyright: ignore
        assert len(orders) == 1


@pytest.mark.parametrize("name", default_run(list(EVERY), "plain", "vegas"))
def test_a_prompt_is_prefilled_alone_whatever_drafts(name, sharp, other, on_a_cpu, passes):
    draft = EVERY[name]
    models = Models(
        sharp,
        other if draft.traits.needs_model else None,
        prepare_params(config_of(draft).cache_policy, sharp),
    )
    params, progress = SamplingParams(max_new_tokens=8), []
    alone = []
    for text in TEXTS:
        alone.append(start_decoding(sharp, [text], params, config_of(NoDraft()), chunk=CHUNK))
    expected = list(passes)
    begins = [(0, 8), (8, 8), (16, 8), (24, 8), (0, 8), (8, 2), (10, 2), (0, 8), (8, 8)]
    assert expected == [(1, *of_pass) for of_pass in begins]
    passes.clear()
    state = start_decoding(
        *(models, TEXTS, params, config_of(draft)),
        chunk=CHUNK,
        on_prefill=lambda *counts: progress.append(counts),
    )
    assert passes == expected
    assert progress[-1] == (56, 56)
    assert progress == sorted(progress)
    for row, (text, one) in enumerate(zip(TEXTS, alone, strict=True)):
        assert int(state.lengths[row]) == len(text)
        np.testing.assert_array_equal(state.tokens[row, : len(text)], text)
        assert_equal(keys_of(state, row, len(text) - 1), keys_of(one, 0, len(text) - 1))


def test_a_selection_after_a_prefill_leaves_its_keys(sharp, on_a_cpu):
    """It is by the query of the last token, in a pass of its own."""
    state = start_decoding(sharp, TEXTS, config=config_of(NoDraft()), chunk=CHUNK)
    marked = jax.tree.map(lambda x: x + 1 if x.dtype == sharp.dtype else x, state)
    converted = jspec.convert_state(sharp, marked, config_of(GUIDED))
    for row, text in enumerate(TEXTS):
        assert_equal(*(keys_of(x, row, len(text) - 1) for x in (converted, marked)))


@pytest.mark.parametrize("shared", [False, True])
def test_an_engine_starts_prompts_from_whole_pieces_of_others(
    shared, sharp, other, on_a_cpu, passes, monkeypatch
):
    """A system prompt, found in a slot or shared, and the next turn of a conversation."""
    synced = []
    monkeypatch.setattr(SlotPrefill, "_sync_drafter", lambda self, row, count: synced.append(count))
    engine = jspec.Engine(
        sharp,
        slots=2,
        capacity=160,
        draft=DRAFTERS["model"],
        draft_model=other,
        gamma=2,
        prefill_chunk=16,
        exact="tokens",
    )
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    if shared:
        engine.share_prefix(SYSTEM)
    first = engine.submit([*SYSTEM, 1, 2, 3], params)
    engine.run()
    synced.clear()
    texts = [[*SYSTEM, *TEXTS[1]], [*SYSTEM, 1, 2, 3, *first.tokens, 5, 6]]
    for text in texts:
        del passes[:]
        request = engine.submit(text, params)
        engine.run()
        begun = list(passes)
        state = start_decoding(sharp, [text], params, config_of(NoDraft()), chunk=16)
        every = passes[len(begun) :]
        assert begun == every[4:]  # from position 64 on
        assert begun[0][1] == synced.pop() == 64
        whole = np.array([*text, *request.tokens], np.int32)
        slot, _ = engine._scheduler.prefill.texts.slot_with(whole)
        length = len(text) - 1
        assert_equal(keys_of(engine._runner.state, slot, length), keys_of(state, 0, length))


def test_an_engine_prefills_short_prompts_one_by_one(sharp, on_a_cpu, passes):
    engine = jspec.Engine(sharp, slots=4, capacity=64, draft=None, prefill_chunk=32, exact="tokens")
    del passes[:]
    for text in TEXTS:
        engine.submit(text, SamplingParams(max_new_tokens=2))
    engine.run()
    begun = list(passes)
    start_decoding(sharp, TEXTS, config=config_of(NoDraft()), chunk=32)
    assert begun == passes[len(begun) :]


def test_requests_of_every_kind_have_what_an_ordinary_prefill_gives(sharp, on_a_cpu):
    """Of different samplings, processors and records in one batch."""
    params = [
        SamplingParams(12, logprobs=1, prompt_logprobs=2, seed=1),
        SamplingParams(9, temperature=0.8, top_k=5, seed=3, stop_tokens=(7,)),
        SamplingParams(12, repetition_penalty=1.3, prompt_logprobs=1, seed=2),
        SamplingParams(1, banned_tokens=(4,), draft_limit=0, seed=4),
    ]
    results = []
    for config in (config_of(DRAFTERS["ngram"]), StepConfig(2, DRAFTERS["ngram"])):
        records = []
        state = start_decoding(sharp, TEXTS, params, config, on_prompt_records=records.append)
        assert state.exact == config.exact
        lengths = np.asarray(state.lengths)
        results.append((dataclasses.replace(state, cache=lengths, exact=None), records))
    (state, records), (expected, other_records) = results
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for mine, its in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        np.testing.assert_array_equal(mine, its)
    for mine, its in zip(*map(jax.tree.leaves, (records, other_records)), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-4)
