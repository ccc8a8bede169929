"""Sampled decoding: a request's tokens are its own. Their law: `tests.decode.test_text_law`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.cuda_ffi import library
from jspec.decode import prefill
from jspec.decode import step as step_module
from jspec.decode.draft import DrafterTraits, NoDraft, SuffixDraft
from jspec.decode.generation import generate
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from tests.decode.common import DRAFTERS, MIXED, NGRAM, STREAMING, prompts
from tests.parameters import default_run


def mixed_requests() -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=24, seed=2**32 - 1 - row, **settings)
        for row, settings in enumerate(MIXED)
    ]


@pytest.mark.parametrize(
    ("hot", "source"),
    [
        (True, "streaming"),
        pytest.param(False, "streaming", marks=pytest.mark.slow),  # draws nothing
        pytest.param(True, "plain", marks=pytest.mark.slow),  # which draws by verification alone
        (False, "plain"),
    ],
    ids=["sampled-streaming", "greedy-streaming", "sampled-plain", "greedy-plain"],
)
def test_every_backend_gives_the_same_tokens(source, hot, sharp, monkeypatch):
    if reason := library.refusal("verify") or library.refusal("sample"):
        pytest.skip(reason)
    params = mixed_requests() if hot else SamplingParams(max_new_tokens=24)
    run = functools.partial(generate, sharp, prompts(), params, draft=DRAFTERS[source])
    called, call = set(), library.call

    def listening(target, *arguments, **settings):
        called.add(target)
        return call(target, *arguments, **settings)

    monkeypatch.setattr(library, "call", listening)

    def run_on(backend):
        operations = ("verify_greedy", "verify_stochastic", "sample")
        return run(backends=dict.fromkeys(operations, backend)).tokens

    kernels = run_on("cuda")
    drafts = source != "plain"
    drawn = {"sample"} if hot else set()
    verified = {"verify_stochastic"} if hot else {"verify_greedy"}
    # Decoding without a draft has nothing to verify: there the machine's own choice serves.
    assert called == drawn | verified or (not drafts and called <= drawn | {"verify_greedy"})
    assert run_on("xla") == kernels


@pytest.mark.parametrize(
    ("source", "rule"),
    default_run(
        [*((source, "token") for source in DRAFTERS), ("streaming", "block")],
        *("model-token", "streaming-block"),
        slow=["dense-token", "plain-token"],
    ),
)
def test_a_request_has_the_same_tokens_in_any_batch(source, rule, sharp, other):
    """In any row, among any others, alone, and however the work is cut."""
    second = other if source == "model" else None
    run = functools.partial(generate, sharp, draft=DRAFTERS[source], draft_model=second, rule=rule)
    texts, params = prompts(), mixed_requests()
    expected = run(texts, params).tokens
    assert len({tokens[:3] for tokens in expected}) > 4

    order = [5, 2, 7, 0, 1, 6, 4, 3]
    turned = run([texts[i] for i in order], [params[i] for i in order])
    assert turned.tokens == tuple(expected[i] for i in order)

    strangers = [[7, 7, 7]] * 7
    beside = run([*strangers, texts[0]], [params[1]] * 7 + [params[0]])
    assert beside.tokens[-1] == expected[0]

    cut = run(texts, params, steps_per_chunk=3, prefill_chunk=8)
    assert cut.tokens == expected


@pytest.mark.parametrize("settings", [MIXED[0], MIXED[2]], ids=["sampled", "greedy"])
def test_a_request_alone_needs_less_machinery_for_the_same_tokens(settings, sharp):
    """Alone it runs the greedy or the unfiltered program, in the batch the filtered one."""
    row = MIXED.index(settings)
    batch = generate(sharp, prompts(), mixed_requests(), draft=STREAMING)
    alone = generate(sharp, prompts()[row : row + 1], mixed_requests()[row], draft=STREAMING)
    assert alone.tokens[0] == batch.tokens[row]


@pytest.mark.parametrize(
    ("draft", "gamma", "rule"),
    default_run(
        {
            "ngram-1": (NGRAM, 1, "token"),
            "ngram-4-block": (NGRAM, 4, "block"),
            "suffix-8": (SuffixDraft(min_match=1), 8, "token"),
        },
        "ngram-4-block",
    ),
)
def test_one_hot_drafts_leave_the_tokens_of_plain_decoding(draft, gamma, rule, sharp):
    """Of every row, filtered or not: accepted tokens are those that their positions draw."""
    plain = generate(sharp, prompts(), mixed_requests(), draft=None)
    got = generate(sharp, prompts(), mixed_requests(), draft=draft, gamma=gamma, rule=rule)
    assert got.tokens == plain.tokens
    assert 0 < got.stats.acceptance_rate < 1


def test_another_seed_gives_other_tokens(sharp):
    params = [SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed) for seed in range(8)]
    tokens = generate(sharp, prompts()[:1] * 8, params, draft=STREAMING).tokens
    assert len(set(tokens)) > 4


@pytest.mark.parametrize(
    ("rule", "learns", "expected"),
    [
        ("token", False, [9, 9]),
        ("block", False, [[3, 9], [1, 9]]),
        ("token", True, [[3, 9], [1, 9]]),
    ],
    ids=["token", "block", "learns-from-rejected"],
)
def test_a_drafter_gets_the_seeds_of_the_block(rule, learns, expected, sharp, monkeypatch):
    """The first draft token's position is the upper word, and the state keeps the request's.

    Verification of a draft with logits gets the same seeds; under the block rule it makes them
    itself.
    """
    draft_seeds, judged = [], []
    verify = step_module.verify_stochastic

    def listening(tokens, logits, lengths, stops, sampling, *rest, **settings):
        judged.append(sampling.seeds)
        return verify(tokens, logits, lengths, stops, sampling, *rest, **settings)

    class Listening(NoDraft):
        traits = DrafterTraits(learns_from_rejected=learns)

        def draft(self, models, state, gamma):
            draft_seeds.append(state.sampling.seeds)
            drafted, state = super().draft(models, state, gamma)
            logits = jnp.zeros((*drafted.tokens.shape, sharp.config.vocab_size))
            return dataclasses.replace(drafted, logits=logits), state

    config = StepConfig(2, Listening(), rule=rule)
    hot = SamplingParams(temperature=1.0, seed=9, max_new_tokens=4)
    state = prefill.start_decoding(sharp, [[1, 2, 3], [4]], [hot, hot], config)
    monkeypatch.setattr(step_module, "verify_stochastic", listening)

    @jax.jit
    def run(models, state):
        _, after = step_module.draft(models, state, config)
        step_module.decode_step(models, after, config)
        return draft_seeds[0], after.sampling.seeds, judged[0]

    of_draft, after, of_verification = run(Models(sharp), state)
    np.testing.assert_array_equal(of_draft, expected)
    np.testing.assert_array_equal(after, [9, 9])
    np.testing.assert_array_equal(of_verification, expected if learns else [9, 9])
