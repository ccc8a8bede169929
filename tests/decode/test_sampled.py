"""Sampled decoding: a request's tokens are its own, and their law is the target's.

The law is tested over the whole pipeline, with a model of three tokens whose every text can be
enumerated; the mutants at the end show that the check sees what may go wrong between steps.
"""

import dataclasses
import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import ModelConfig, SamplingParams
from jspec.cuda_ffi import library
from jspec.decode import chunks, prefill
from jspec.decode import step as step_module
from jspec.decode.auto import GammaChoice
from jspec.decode.draft import (
    Chain,
    Drafted,
    Drafter,
    GuidedDraft,
    ModelDraft,
    NgramDraft,
    NoDraft,
    SelfDraft,
)
from jspec.decode.draft import base as draft_module
from jspec.decode.draft import chain as chain_module
from jspec.decode.generation import generate
from jspec.decode.plan import Gamma
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.ops import vocabulary as vocabulary_module
from jspec.ops.sample import Role
from jspec.ops.stochastic import Rule
from jspec.policies import Dense, ExactTopK, Hata, Loki, MagicPIG, Quest, Streaming, Vegas
from jspec.policies.prepare import prepare
from tests.conftest import make_decoder
from tests.decode.common import DRAFTERS, STREAMING, full_logits, prompts
from tests.ops.laws import check_counts, filtered_law

# --- a request's tokens are its own ----------------------------------------------------------

MIXED = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 0.5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9},
    {},
]


def mixed_requests() -> list[SamplingParams]:
    return [
        SamplingParams(max_new_tokens=24, seed=2**32 - 1 - row, **settings)
        for row, settings in enumerate(MIXED)
    ]


@pytest.mark.parametrize("source", ["streaming", "plain"])
@pytest.mark.parametrize("hot", [True, False], ids=["sampled", "greedy"])
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
    drawn = {"sample"} if hot and drafts else set()
    verified = {"verify_stochastic"} if hot else {"verify_greedy"}
    # Greedy decoding without a draft has nothing to verify: there the machine's own choice serves.
    assert called == drawn | verified or (called <= verified and not hot and not drafts)
    assert run_on("xla") == kernels


@pytest.mark.parametrize(
    ("source", "rule"), [*((source, "token") for source in DRAFTERS), ("streaming", "block")]
)
def test_a_request_has_its_own_tokens(source, rule, sharp, other):
    """In any row, beside any neighbours, alone, and however the work is cut."""
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


def test_another_seed_gives_other_tokens(sharp):
    params = [SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed) for seed in range(8)]
    tokens = generate(sharp, prompts()[:1] * 8, params, draft=STREAMING).tokens
    assert len(set(tokens)) > 4


# --- the law of generated texts --------------------------------------------------------------

ROWS = 12_000
THREE = ModelConfig.uniform(
    vocab_size=3,
    hidden_size=16,
    intermediate_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    max_context=64,
)
PROMPT = (0, 2, 1, 1, 0, 2)
SAMPLED = SamplingParams(max_new_tokens=4, temperature=1.0)
ONE = {"budget": 1, "sinks": 0, "recent": 0, "dense_layers": 0}


@dataclasses.dataclass(frozen=True)
class Haunted(Drafter):
    """Knows what it drew at a position when that was rejected, and seldom draws it again."""

    @property
    def learns_from_rejected(self):
        return True

    def init(self, models, lengths, capacity, gamma):
        return jnp.full((len(lengths), capacity), -1, jnp.int32)

    def draft(self, models, state, config):
        rows = jnp.arange(len(state.lengths))[:, None]
        where = state.lengths[:, None] + jnp.arange(config.gamma, dtype=jnp.int32)[None]
        before = state.draft.at[rows, where].get(mode="fill", fill_value=-1)
        logits = -3.0 * jax.nn.one_hot(before, 3)
        tokens = draft_module.sample(logits, state.sampling, where, Role.DRAFT, filtered=False)
        lengths = jnp.full(state.lengths.shape, config.gamma, jnp.int32)
        own = state.draft.at[rows, where].set(tokens, mode="drop")
        return Drafted(tokens, lengths, logits), dataclasses.replace(state, draft=own)


SOURCES = {
    "haunted": Haunted(),
    "streaming": SelfDraft(Streaming(sinks=0, window=1)),
    "dense": SelfDraft(Dense()),
    "quest": SelfDraft(Quest(budget=2, page=2, sinks=0, recent=0, dense_layers=0)),
    # One position of the past, picked by its weight for a token of the step before: a bad draft.
    "vegas": GuidedDraft(Vegas(budget=1, least=0, score="weight")),
    "ngram": NgramDraft(min_match=1, max_match=3),
    "model": ModelDraft(),
    "plain": NoDraft(),
    "chain": Chain(NgramDraft(1, 3), SelfDraft(Streaming(sinks=0, window=1)), inner=2, rounds=2),
    "chain-of-models": Chain(
        ModelDraft(),
        SelfDraft(Quest(budget=2, page=2, sinks=0, recent=0, dense_layers=0)),
        inner=1,
        rounds=2,
    ),
}
# A view that the verification of tokens which may be rejected picked, in rounds of a chain.
SOURCES["chain-guided"] = Chain(NgramDraft(1, 3), SOURCES["vegas"], inner=2, rounds=2)
# Of one position each, where the model itself reads six to nine.
OTHER_POLICIES = {
    "exact_topk": ExactTopK(**ONE),
    "hata": Hata(**ONE, bits=32),
    "loki": Loki(**ONE, channels=2),
    "magicpig": MagicPIG(**ONE, bits=2, tables=4),
}


@functools.cache
def target():
    """A target that looks far back: with another context, its law is 0.4 away on average."""
    return make_decoder(THREE, seed=1, head=1.5)


@functools.cache
def second(vocabulary: int = 3):
    config = dataclasses.replace(THREE, vocab_size=vocabulary)
    return make_decoder(config, seed=5, embedding=30.0)


def enumerated(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The target's law of whole texts: all that ``max_new_tokens`` allow, ended by stop tokens."""
    new = params.max_new_tokens
    texts = list(itertools.product(range(3), repeat=new))
    tokens = jnp.asarray([[*PROMPT, *text] for text in texts])
    logits = np.asarray(full_logits(target(), tokens))[:, len(PROMPT) - 1 :]
    law: dict[tuple[int, ...], float] = {}
    for text, rows in zip(texts, logits, strict=True):
        end = next((i + 1 for i, t in enumerate(text) if t in params.stop_tokens), new)
        mass = [filtered_law(rows[i], params)[text[i]] for i in range(end)]
        law[text[:end]] = float(np.prod(mass))
    return law


@functools.cache
def seeded(params: SamplingParams, first: int, rows: int) -> list[SamplingParams]:
    return [SamplingParams(**{**vars(params), "seed": first + row}) for row in range(rows)]


def check_law(
    source: str,
    params: SamplingParams,
    gamma: Gamma = 2,
    seed: int = 0,
    vocabulary: int = 3,
    rule: Rule = "token",
    rows: int = ROWS,
) -> float:
    """Chi-square of 12,000 texts of one prompt, one seed each; returns the acceptance rate.

    Everything is traced anew, so that a patched internal is seen.
    """
    draft = SelfDraft(OTHER_POLICIES[source]) if source in OTHER_POLICIES else SOURCES[source]
    arrays = prepare(draft.keeps, target(), PROMPT) if draft.keeps.needs_arrays else None
    decode_chunk = step_module.decode_chunk.__wrapped__

    def chunk(*args, **settings):
        return decode_chunk(*args, **settings)

    fresh = jax.jit(chunk, static_argnames=("config", "steps"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "decode_chunk", fresh)
        patch.setattr(prefill, "CAPACITY_STEP", 2)
        patch.setattr(vocabulary_module, "TILE", 4)
        got = generate(
            target(),
            [PROMPT] * rows,
            seeded(params, seed * rows, rows),
            gamma=0 if source == "plain" else gamma,
            draft=draft,
            draft_model=second(vocabulary) if draft.needs_model else None,
            policy_arrays=arrays,
            rule=rule,
            steps_per_chunk=2,
        )
    check_counts(Counter(got.tokens), enumerated(params))
    return got.stats.acceptance_rate


@pytest.mark.parametrize(
    "source",
    [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("chain-")) for name in SOURCES],
)
def test_generated_texts_have_the_target_law(source):
    """Four tokens by gamma 2, so that every text takes several steps; fails below p = 1e-4."""
    rate = check_law(source, SAMPLED)
    if source == "dense":  # its drafts are drawn from the target's own law
        assert rate > 0.999
    else:
        assert source == "plain" or 0.2 < rate < 0.95


def test_texts_verified_by_blocks_have_the_target_law():
    assert check_law("model", SAMPLED, gamma=3, rule="block") > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("source", ["chain", "chain-of-models"])
def test_the_block_rule_gives_the_law_of_chains(source):
    """Their drafts end where their rounds do, which the tokens drawn so far decide."""
    assert check_law(source, SAMPLED, gamma=3, rule="block") > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_POLICIES)
def test_texts_by_drafts_of_every_policy_have_the_target_law(name):
    """Their own law is another one: a share of their tokens is rejected."""
    assert 0.2 < check_law(name, SAMPLED) < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [2, 5])
def test_texts_by_a_draft_of_another_padding_have_the_target_law(vocabulary):
    rate = check_law("model", SAMPLED, vocabulary=vocabulary)
    assert 0.1 < rate < 0.95


@pytest.mark.parametrize(
    "source", ["streaming", "ngram", pytest.param("chain", marks=pytest.mark.slow)]
)
def test_filtered_texts_that_may_stop_have_the_target_law(source):
    params = SamplingParams(max_new_tokens=4, temperature=1.4, top_p=0.6, stop_tokens=(2,))
    check_law(source, params, gamma=3)


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("source", SOURCES)
def test_generated_texts_have_the_target_law_in_more_rows(source, gamma, seed):
    check_law(source, SAMPLED, gamma, seed)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["streaming", "chain"])
def test_texts_of_changing_gammas_have_the_target_law(source, monkeypatch):
    """Plain steps and drafts of two lengths in turn, as ``gamma="auto"`` may choose them."""
    gammas = itertools.cycle((1, 0, 2))
    monkeypatch.setattr(GammaChoice, "choose", lambda self: next(gammas))
    check_law(source, SAMPLED, gamma="auto")


# --- mutants ---------------------------------------------------------------------------------

SOME_ROWS = 3_000  # what shows in them shows all the more in 12,000


def verify_with(change):
    """The step's verification with changed arguments."""
    right = step_module.verify_stochastic

    def verify(tokens, logits, lengths, stops, sampling, positions, *, draft_logits, **static):
        changed = {"positions": positions, "draft_logits": draft_logits, "target_logits": logits}
        changed |= change(**changed)
        return right(
            tokens,
            draft_lengths=lengths,
            stop_tokens=stops,
            sampling=sampling,
            **static,
            **changed,
        )

    return step_module, "verify_stochastic", verify


def draft_with(change):
    """The draft's sampling with changed arguments."""
    right = draft_module.sample

    def sample(logits, sampling, positions, role, **static):
        changed = {"logits": logits, "positions": positions} | change(logits, positions)
        return right(sampling=sampling, role=role, **static, **changed)

    return draft_module, "sample", sample


MUTANTS = {
    "numbers of verification reused in every step": verify_with(
        lambda positions, **_: {"positions": jnp.zeros_like(positions)}
    ),
    "one number for all tokens of a draft": draft_with(
        lambda logits, positions: {"positions": jnp.zeros_like(positions)}
    ),
    "q of the position before": verify_with(
        lambda draft_logits, **_: {"draft_logits": jnp.roll(draft_logits, 1, axis=1)}
    ),
    "draft drawn at another temperature": draft_with(
        lambda logits, positions: {"logits": logits * 1.5}
    ),
}


@pytest.mark.parametrize(("owner", "name", "mutant"), MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_is_caught(owner, name, mutant, monkeypatch):
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("streaming", SAMPLED, rows=SOME_ROWS)


def test_numbers_of_rejected_tokens_are_not_used_again(monkeypatch):
    monkeypatch.setattr(Haunted, "learns_from_rejected", False)
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("haunted", SAMPLED, rows=SOME_ROWS)


def chain_with(change):
    """The middle level's sampling with changed arguments."""
    right = chain_module.sample

    def sample(logits, sampling, positions, role, **static):
        changed = {"positions": positions, "role": role} | change(positions, role)
        return right(logits, sampling, **static, **changed)

    return "sample", sample


CHAIN_MUTANTS = {
    "numbers of acceptance shared by two levels": chain_with(
        lambda positions, role: {"role": Role.ACCEPT}
    ),
    "logits of another position": (
        "_put",
        lambda into, rows, begin, counts: PUT(into, jnp.roll(rows, 1, axis=1), begin, counts),
    ),
}
PUT = chain_module._put


@pytest.mark.parametrize(("name", "mutant"), CHAIN_MUTANTS.values(), ids=CHAIN_MUTANTS)
def test_a_mutant_of_a_chain_is_caught(name, mutant, monkeypatch):
    monkeypatch.setattr(chain_module, name, mutant)
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("chain", SAMPLED, rows=SOME_ROWS)


# --- numbers of a block ------------------------------------------------------------------------


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

    Verification gets the same seeds; under the block rule it makes them itself.
    """
    seen, judged = [], []
    verify = step_module.verify_stochastic

    def listening(tokens, logits, lengths, stops, sampling, *rest, **settings):
        judged.append(sampling.seeds)
        return verify(tokens, logits, lengths, stops, sampling, *rest, **settings)

    class Listening(NoDraft):
        learns_from_rejected = learns

        def draft(self, models, state, config):
            seen.append(state.sampling.seeds)
            return super().draft(models, state, config)

    config = StepConfig(2, Listening(), rule=rule)
    hot = SamplingParams(temperature=1.0, seed=9, max_new_tokens=4)
    state = prefill.start_decoding(sharp, [[1, 2, 3], [4]], [hot, hot], config)
    _, after = step_module.draft(Models(sharp), state, config)
    np.testing.assert_array_equal(seen[0], expected)
    np.testing.assert_array_equal(after.sampling.seeds, [9, 9])
    monkeypatch.setattr(step_module, "verify_stochastic", listening)
    step_module.step(Models(sharp), after, config)
    np.testing.assert_array_equal(judged[0], expected if learns else [9, 9])
