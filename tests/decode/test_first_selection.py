"""What the first draft after a prompt reads: what the prompt's last cached token attends to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import helix
from jspec.config import SamplingParams
from jspec.decode.convert_state import convert_state
from jspec.decode.draft import Chain, GuidedDraft, NgramDraft
from jspec.decode.engine import Engine
from jspec.decode.prefill import start_decoding
from jspec.decode.prefill_pass import prefill_chunk
from jspec.decode.request import Request
from jspec.decode.settings import PLAIN, StepConfig
from jspec.ops.attention.dense import causal
from jspec.policies import SparseSpec, SpecExtend, Vegas
from tests.conftest import make_decoder
from tests.decode.common import prompts
from tests.parameters import default_run

GAMMA, BUDGET = 3, 6
LENGTHS = (40, 1, 17, 4, 9)  # with chunks of 8 tokens, rows end in several of them
PROMPTS = prompts(LENGTHS)
PARAMS = SamplingParams(max_new_tokens=9, seed=0)
VEGAS = Vegas(budget=BUDGET, least=0)
POLICIES = {
    "logit": VEGAS,
    "weight": SparseSpec(budget=BUDGET, least=0),
    "last": Vegas(budget=BUDGET, least=0, collect="last", per_head=True),
    "softmax": Vegas(budget=BUDGET, least=0, score="softmax", dense_layers=1),
    "pages": SpecExtend(budget=8, least=0, page=4),
}


@pytest.fixture(scope="module")
def tiny():
    """Two layers, of which a policy may read the first one whole."""
    return make_decoder(seed=3)


@pytest.fixture(scope="module")
def queries_and_keys(tiny):
    """Of each prompt and layer: queries ``[T, N, H]`` and keys ``[T, K, H]``."""

    @jax.jit
    def run(model, tokens):
        of_layers = []

        def attend(layer, q, k, v, cache):
            of_layers.append((q, k))
            return causal(q, k, v), cache

        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        model(tokens, positions, attend, None)
        return of_layers

    tokens = np.zeros((len(PROMPTS), max(LENGTHS)), np.int32)
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    of_layers = jax.device_get(run(tiny, tokens))
    return [
        [(q[row, :length], k[row, :length]) for q, k in of_layers]
        for row, length in enumerate(LENGTHS)
    ]


def expected_positions(policy, q, k) -> list[set[int]]:
    """What each KV head reads of the positions before the end of the prompt, from dense scores."""
    cached = len(q) - 1
    end = max(cached - (GAMMA + 1), 0)
    logits = np.einsum("nh,snh->ns", q[cached - 1], np.repeat(k[:cached], 2, axis=1)) / 4
    scores = logits
    if policy.score == "weight":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores = scores / scores.sum(axis=1, keepdims=True)
    scores = scores[:, :end].reshape(2, 2, end).mean(axis=1)
    if policy.score == "softmax" and end:
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        scores = scores / scores.sum(axis=1, keepdims=True)
    if not policy.per_head:
        scores = np.repeat(scores.sum(axis=0)[None], 2, axis=0)
    if policy.page_size == 1:
        return [set(np.argsort(-head)[:BUDGET].tolist()) for head in scores]
    size = policy.page_size
    begins = range(0, end, size)
    by_mean = sorted(begins, key=lambda begin: -scores[0, begin : begin + size].mean())
    by_mean.sort(key=lambda begin: begin + size < end)  # the last page is always read
    pages = by_mean[: policy.budget // size]
    return [{p for begin in pages for p in range(begin, min(begin + size, end))}] * 2


def picked_in(guide, row: int, layer: int) -> list[set[int]]:
    """The positions that each KV head of a layer reads, on all devices."""
    picked = np.asarray(guide.picked[layer])[row]
    heads = picked if picked.ndim == 2 else [picked] * 2
    return [{p for p in head.tolist() if p >= 0} for head in heads]


def check(guide, policy, queries_and_keys) -> None:
    """What the first draft reads in each row, by the definition: picked, and the prompt's end."""
    for row, of_layers in enumerate(queries_and_keys):
        cached = LENGTHS[row] - 1
        since = [p for p in np.asarray(guide.since)[row].tolist() if p >= 0]
        assert since == list(range(max(cached - GAMMA - 1, 0), cached))
        for layer, (q, k) in enumerate(of_layers):
            if guide.picked[layer] is None:
                assert layer < policy.dense_layers
                continue
            expected = expected_positions(policy, q, k) if cached else [set(), set()]
            assert picked_in(guide, row, layer) == expected, (row, layer)


@pytest.mark.parametrize("name", default_run(list(POLICIES), "pages"))
def test_the_last_query_of_a_prompt_selects(name, tiny, queries_and_keys):
    """In ragged prompts that end in different chunks, and in the middle of one."""
    policy = POLICIES[name]
    config = StepConfig(GAMMA, GuidedDraft(policy))
    state = start_decoding(tiny, PROMPTS, PARAMS, config, chunk=8)
    check(state.draft, policy, queries_and_keys)


@pytest.mark.exhaustive
def test_a_pass_in_which_no_prompt_ends_selects_nothing(tiny):
    """It is the program of policies that never select in prefill."""
    seen = []

    def run(function, *args, **static):
        if function is prefill_chunk:
            seen.append(static["selects"])
        return function(*args, **static)

    for draft in (GuidedDraft(VEGAS), NgramDraft()):
        config = StepConfig(GAMMA, draft)
        start_decoding(tiny, prompts((40, 9, 17)), PARAMS, config, chunk=8, run=run)
    # The rows end after 39, 8 and 16 tokens.
    assert seen == [True, True, False, False, True, *[False] * 5]


def test_a_state_of_another_drafter_selects_by_its_last_token(tiny, queries_and_keys):
    shared = start_decoding(tiny, PROMPTS, PARAMS, StepConfig(GAMMA, PLAIN.draft))
    chain = Chain(NgramDraft(), GuidedDraft(VEGAS), inner=2, rounds=2)
    got = convert_state(tiny, shared, StepConfig(GAMMA, chain))
    check(got.draft[1], VEGAS, queries_and_keys)
    np.testing.assert_allclose(got.cache.keys(1), shared.cache.keys(1), atol=1e-5)


def test_slots_of_an_engine_select(tiny, queries_and_keys):
    """Short prompts in one pass, another by itself, and one after a shared prefix."""
    sizes = {"slots": len(PROMPTS), "capacity": 64, "prefill_chunk": 64}
    engine = Engine(tiny, draft=GuidedDraft(VEGAS), gamma=GAMMA, **sizes)
    prefill, state = engine._scheduler.prefill, engine._runner.state
    texts = [np.asarray(prompt, np.int32) for prompt in PROMPTS]
    row = prefill.prefix(texts[0][:20])
    while row.left:
        prefill.advance(row)
    prefill.share(row)
    short = [1, 3, 4]
    count, rows, size = prefill.group([texts[row] for row in short])
    assert (count, rows) == (3, 4)
    requests = [Request(text, PARAMS, (), None) for text in texts]
    state = prefill.fill(state, rows, size, short, [requests[row] for row in short])
    for slot in (0, 2):
        prefill.begin(texts[slot], state)
        while prefill.current_row.left:
            prefill.advance(prefill.current_row)
        state = prefill.insert(state, slot, requests[slot])
    check(state.draft, VEGAS, queries_and_keys)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize(
    "name",
    default_run(["logit", "weight", "last", "softmax"], slow=["last", "softmax"]),
)
def test_devices_of_a_mesh_select_together(name, tiny, queries_and_keys):
    policy, mesh = POLICIES[name], helix.HelixConfig(kvp=2, tpa=2, block=4)
    config = StepConfig(GAMMA, GuidedDraft(policy))
    state = start_decoding(helix.shard(tiny, mesh), PROMPTS, PARAMS, config, chunk=8)
    check(state.draft, policy, queries_and_keys)
