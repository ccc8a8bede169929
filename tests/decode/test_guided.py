"""Drafts that verification guides: the text stays the target's own, whatever they read."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jspec.config import SamplingParams
from jspec.decode.draft import Chain, GuidedDraft, NgramDraft, NoDraft, SelfDraft, named_draft
from jspec.decode.draft.autoregressive import alternating_scan
from jspec.decode.draft.self_draft import Guide
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.rows import grow_capacity
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_step
from jspec.ops.hash import hash_encode
from jspec.policies import Hata, SparseSpec, SpecExtend, Streaming, Vegas
from jspec.policies.prepare import prepare_params
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts, requests
from tests.parameters import default_run

DRAFTS = {
    "vegas": "vegas:budget=6,least=0",
    "one-layer-for-both": "vegas:budget=6,least=0,every=2,collect=accepted,score=weight",
    "sparsespec": "sparsespec:budget=6,least=0,dense_layers=1",
    "specextend": "specextend:budget=8,least=0,page=4",
    "refreshed": "vegas:budget=6,least=0,refresh=2",
}


@pytest.fixture(scope="module")
def tiny():
    """Two layers: drafters differ in which of them they read whole."""
    return make_decoder(seed=3)


@pytest.fixture(scope="module")
def sharp():
    return make_decoder(seed=1, embedding=400.0, head=4.0)


@pytest.fixture(scope="module")
def plain(sharp):
    return generate(sharp, prompts(), requests(), draft=None)


# Vegas as it is drafts in engines and on meshes too.
@pytest.mark.parametrize("name", default_run(list(DRAFTS), "sparsespec", slow=["vegas"]))
def test_greedy_tokens_stay_as_they_are(name, plain, sharp):
    got = generate(sharp, prompts(), requests(), gamma=3, draft=named_draft(DRAFTS[name]))
    assert got.tokens == plain.tokens
    assert got.stats.acceptance_rate > 0.4


def test_names_and_settings_of_drafts():
    assert named_draft("vegas") == GuidedDraft(Vegas())
    policy = Vegas(budget=0.05, collect="all", score="weight", per_head=True)
    text = "vegas:budget=0.05,collect=all,score=weight,per_head=true"
    assert named_draft(text) == GuidedDraft(policy)
    assert named_draft("sparsespec:least=9") == GuidedDraft(SparseSpec(least=9))
    assert named_draft("specextend:page=16") == GuidedDraft(SpecExtend(page=16))


@pytest.mark.parametrize("collect", ["ends", "all", "accepted", "last"])
def test_steps_use_separate_random_numbers_where_rejected_tokens_score(collect):
    draft = GuidedDraft(Vegas(collect=collect))
    assert draft.traits.learns_from_rejected == (collect in ("ends", "all"))
    chain = Chain(NgramDraft(), draft)
    assert chain.traits.learns_from_rejected == draft.traits.learns_from_rejected


def test_a_step_leaves_what_the_next_draft_reads(tiny):
    """Positions that it picked below the length it began with, and all that it committed since."""
    policy = Vegas(budget=5, least=0)
    config = StepConfig(3, GuidedDraft(policy))
    params = [SamplingParams(max_new_tokens=new) for new in (30, 30, 1)]
    state = start_decoding(tiny, prompts((20, 9, 5)), params, config, capacity=64)
    run = jax.jit(lambda models, state: decode_step(models, state, config))
    models = Models(tiny)
    for _ in range(3):
        before = np.asarray(state.cache.lengths)
        was_done = np.asarray(state.done)
        state, record = run(models, state)
        since = np.asarray(state.draft.since)
        for row, committed in enumerate(np.asarray(record.committed)):
            committed_positions = (
                [] if was_done[row] else list(range(before[row], before[row] + committed))
            )
            assert [p for p in since[row].tolist() if p >= 0] == committed_positions
        for picked in state.draft.picked:
            assert picked.shape == (3, 5)
            live = ~was_done
            assert (np.asarray(picked)[live] < before[live, None]).all()
            assert (
                (np.asarray(picked)[live] >= 0).sum(axis=1) == np.minimum(before, 5)[live]
            ).all()


@pytest.mark.exhaustive
def test_sync_replaces_no_selection_of_a_query(tiny):
    """Where there was none it selects the first and the last positions."""
    config = StepConfig(3, GuidedDraft(Vegas(budget=8, least=0)))
    state = start_decoding(tiny, prompts((40, 9)), SamplingParams(max_new_tokens=9), config)

    step = jax.jit(lambda models, state: decode_step(models, state, config)[0])
    sync = jax.jit(config.draft.sync, static_argnums=4)

    def check(state):
        args = (Models(tiny), state.draft, state.tokens, state.cache.lengths, 4)
        jax.tree.map(np.testing.assert_array_equal, sync(*args), state.draft)
        return np.asarray(state.draft.picked[1])

    first = check(state)
    assert (check(step(Models(tiny), state)) != first).any()
    fresh = config.draft.init(Models(tiny), 2, state.tokens.shape[1], 3)
    args = (Models(tiny), fresh, state.tokens, jnp.array([39, 8], jnp.int32), 4)
    initial = np.asarray(sync(*args).picked[1])
    assert initial.max(axis=1).tolist() == [38, 7]


def test_a_guide_on_a_mesh_is_of_a_devices_positions_and_heads():
    shared, per_head = (jnp.zeros(shape, jnp.int32) for shape in ((3, 8), (3, 2, 8)))
    specs = Guide((shared, None, per_head), jnp.zeros((3, 4), jnp.int32)).partition_specs("t", "k")
    assert specs == Guide((P(None, "k"), None, P(None, "t", "k")), P())  # pyright: ignore


@pytest.mark.exhaustive
def test_more_room_gives_a_ratio_more_room(sharp):
    """A capacity of twice the size holds twice as many picked positions, and the same text."""
    config = StepConfig(3, GuidedDraft(Vegas(budget=0.25, least=0)))
    texts, params = prompts((20, 9)), SamplingParams(max_new_tokens=20)
    small = start_decoding(sharp, texts, params, config, capacity=40)
    assert small.draft.picked[0].shape == (2, 10)
    grown = grow_capacity(small, 80, config)
    assert grown.draft.picked[0].shape == (2, 20)
    large = start_decoding(sharp, texts, params, config, capacity=80)
    run = jax.jit(lambda models, state: decode_step(models, state, config)[0])
    for _ in range(6):
        grown, large = (run(Models(sharp), state) for state in (grown, large))
    np.testing.assert_array_equal(grown.tokens, large.tokens)
    # The second row is done: what is picked for it means nothing.
    np.testing.assert_array_equal(grown.done, [False, True])
    for got, expected in zip(grown.draft.picked, large.draft.picked, strict=True):
        np.testing.assert_array_equal(got[:1], expected[:1])


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: SelfDraft(Vegas()), TypeError, r"guided by verification; pass GuidedDraft\("),
        (lambda: GuidedDraft(Streaming()), TypeError, "is not guided by verification"),  # pyright: ignore
        (lambda: StepConfig(draft=Vegas()), TypeError, r"is a policy; pass GuidedDraft\("),  # pyright: ignore
        (
            lambda: StepConfig(0, named_draft("none"), target=Vegas()),
            ValueError,
            r"it only drafts: pass draft=GuidedDraft\(",
        ),
    ],
    ids=["self-draft", "not-guided", "policy", "target"],
)
def test_what_is_not_a_guided_draft_is_refused(made, error, message):
    with pytest.raises(error, match=message):
        made()


# --- picked again by hashes ------------------------------------------------------------------


def after_steps(model, policy, gamma: int, drafter: Any = None, steps: int = 1):
    """The models and the state of ragged rows after some steps, and the draft that comes next."""
    config = StepConfig(gamma, drafter or GuidedDraft(policy))
    models = Models(model, policy=prepare_params(config.cache_policy, model))
    params = [SamplingParams(max_new_tokens=40, temperature=t, seed=7) for t in (1.0, 0.0, 0.6)]
    state = start_decoding(models, prompts((31, 9, 4)), params, config, capacity=96)
    run = jax.jit(lambda models, state: decode_step(models, state, config)[0])
    for _ in range(steps):
        state = run(models, state)
    draft = jax.jit(lambda models, state: config.draft.draft(models, state, config.gamma)[0])
    return models, state, draft(models, state)


def read_in_each_layer(policy, state, matrices, step: int, layer: int, row: int, keys, q, before):
    """The positions below the cached length that KV heads read, from the definition.

    ``keys [n, K, H]`` of the cache and queries ``q [N, H]`` of the pass; ``before``: of the last.
    """
    context_len = int(state.cache.lengths[row])
    since = [p for p in np.asarray(state.draft.since)[row].tolist() if p >= 0]
    begin = since[0] if since else context_len
    if step == 0:
        picked = np.asarray(state.draft.picked[layer])[row]
        heads = picked if policy.per_head else [picked] * keys.shape[1]
        return [{p for p in head.tolist() if p >= 0} | set(since) for head in heads]
    if not policy.refresh or step % policy.refresh:
        return before
    group = len(q) // keys.shape[1]
    bits = [
        [(keys[:begin, head] @ w > 0) == (q[head * group + g] @ w > 0) for g in range(group)]
        for head, w in enumerate(np.float32(matrices[layer]))
    ]
    scores = np.sum(bits, axis=(1, 3))
    scores = scores if policy.per_head else np.repeat(scores.sum(0)[None], len(scores), 0)
    best = [
        sorted(range(begin), key=lambda p: (-head_scores[p], p))[: policy.budget]
        for head_scores in scores
    ]
    return [set(head_scores) | set(since) for head_scores in best]


def drafted_by_definition(policy, models, state, gamma: int, tokens):
    """The logits of a draft of ``tokens [B, gamma]``, pass by pass and row by row, in NumPy."""
    lengths = np.asarray(state.cache.lengths)
    rows, layers = range(len(lengths)), range(len(TINY.layers))
    cached: Any = {
        (layer, row): [list(state.cache.columns[layer][n][row, : lengths[row]]) for n in names]
        for layer in layers
        for row in rows
        for names in [("keys", "values")]
    }
    read: dict[tuple[int, int], list[set[int]]] = {}
    fed, logits_per_pass = np.asarray(state.last_token), []
    for index in range(gamma):

        def attend(layer, q, k, v, cache, index=index):
            out = np.zeros((*q.shape[:3], v.shape[-1]), np.float32)
            for row in rows:
                keys, values = cached[layer, row]
                positions_read = read_in_each_layer(
                    *(policy, state, models.policy, index, layer, row),
                    *(np.stack(keys)[: lengths[row]], np.asarray(q)[row, 0]),
                    read.get((layer, row)),
                )
                read[layer, row] = positions_read
                keys.append(np.asarray(k)[row, 0])
                values.append(np.asarray(v)[row, 0])
                for head in range(q.shape[2]):
                    kv = head // (q.shape[2] // k.shape[2])
                    where = sorted(positions_read[kv] | set(range(lengths[row], len(keys))))
                    logits = np.stack(keys)[where, kv] @ np.asarray(q)[row, 0, head] / 4.0
                    weights = np.exp(logits - logits.max())
                    out[row, 0, head] = weights @ np.stack(values)[where, kv] / weights.sum()
            return jnp.asarray(out), cache

        positions = jnp.asarray(lengths + index)[:, None]
        hidden, _ = models.target(jnp.asarray(fed)[:, None], positions, attend, None)
        logits_per_pass.append(np.asarray(models.target.logits(hidden))[:, 0])
        fed = np.asarray(tokens)[:, index]
    return np.stack(logits_per_pass, axis=1)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"refresh": 3}, marks=pytest.mark.exhaustive),
        {"refresh": 1, "per_head": True, "collect": "last"},
    ],
    ids=str,
)
def test_each_draft_token_reads_what_the_definition_says(settings, tiny):
    """After a verification, of which rows took drafts of several lengths."""
    policy = Vegas(budget=5, least=0, **settings)
    models, state, drafted = after_steps(tiny, policy, 7)
    assert len(set((np.asarray(state.draft.since) >= 0).sum(axis=1).tolist())) > 1
    expected = drafted_by_definition(policy, models, state, 7, drafted.tokens)
    np.testing.assert_allclose(drafted.logits, expected, atol=2e-4)
    # Verification wrote the codes of its own keys over those of the draft's.
    for columns, matrices in zip(state.cache.columns, models.policy, strict=True):
        codes = hash_encode(columns["keys"], matrices)
        for row, length in enumerate(state.cache.lengths):
            np.testing.assert_array_equal(columns["codes"][row, :length], codes[row, :length])


@pytest.mark.exhaustive
def test_a_round_of_a_chain_is_a_pass(tiny):
    """Where its first drafter drafts nothing, a round adds a token: the draft is that of passes."""
    policy = Vegas(budget=5, least=0, refresh=2)
    _, _, expected = after_steps(tiny, policy, 5, steps=0)
    chain = Chain(NoDraft(), GuidedDraft(policy), inner=1, rounds=5)
    _, _, got = after_steps(tiny, policy, 5, chain, steps=0)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-4)


# Never, each time, with and without a rest, as often as there are steps, and less often.
@pytest.mark.parametrize(
    ("every", "count"),
    [(0, 5), (1, 1), (1, 5), (2, 5), (2, 8), (3, 7), (3, 8), (7, 7), (7, 8), (50, 8)],
)
def test_alternating_scan(every, count):
    """Which of them are others, and in which order all of them give what they give."""

    def named(other):
        def body(carry, step):
            return (carry[0] * 3 + step, carry[1] + other), (step, jnp.int32(other), None)

        return body

    (mixed, others), outs = alternating_scan(
        named(0), named(1), every, (jnp.int32(1), jnp.int32(0)), count
    )
    expected, right = 1, [int(every > 0 and i > 0 and i % every == 0) for i in range(count)]
    for index in range(count):
        expected = expected * 3 + index
    assert (mixed, others) == (expected, sum(right))
    assert [x.tolist() for x in outs[:2]] == [list(range(count)), right]


def test_without_refresh_a_cache_keeps_no_codes(tiny):
    state = start_decoding(tiny, prompts((9,)), config=StepConfig(7, GuidedDraft()))
    assert [set(columns) for columns in state.cache.columns] == [{"keys", "values"}] * 2


def test_without_hashes_it_says_what_hata_says(tiny):
    """Before the prefill, as for any policy that takes parameters."""
    messages = []
    for draft in (named_draft("vegas:refresh=2"), SelfDraft(Hata())):
        with pytest.raises(ValueError, match=r"Hata needs parameters; pass jspec\.Mo") as e:
            start_decoding(tiny, prompts((9,)), config=StepConfig(3, draft))
        messages.append(str(e.value))
    assert messages[0] == messages[1]
