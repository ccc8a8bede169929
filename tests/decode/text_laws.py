"""The law of whole texts: a model of three tokens whose every text can be enumerated."""

import dataclasses
import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import ModelConfig, SamplingParams
from jspec.decode import chunks, prefill
from jspec.decode import step as step_module
from jspec.decode.draft import (
    Chain,
    Drafted,
    Drafter,
    DrafterTraits,
    GuidedDraft,
    ModelDraft,
    NgramDraft,
    NoDraft,
    SelfDraft,
)
from jspec.decode.draft import autoregressive as draft_module
from jspec.decode.generation import generate
from jspec.decode.options import Gamma
from jspec.decode.processors import LogitsProcessor
from jspec.ops import vocabulary as vocabulary_module
from jspec.ops.sample import Role
from jspec.ops.stochastic import Rule
from jspec.policies import Dense, ExactTopK, Hata, Loki, MagicPIG, Quest, Streaming, Vegas
from jspec.policies.prepare import prepare_params
from tests.conftest import make_decoder
from tests.decode.common import full_logits
from tests.decode.processed import Change, processed
from tests.ops.laws import check_counts, filtered_law

ROWS = 6_000
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

    traits = DrafterTraits(learns_from_rejected=True)

    def init(self, models, batch, capacity, max_gamma):
        return jnp.full((batch, capacity), -1, jnp.int32)

    def draft(self, models, state, gamma):
        rows = jnp.arange(len(state.lengths))[:, None]
        where = state.lengths[:, None] + jnp.arange(gamma, dtype=jnp.int32)[None]
        before = state.draft.at[rows, where].get(mode="fill", fill_value=-1)
        logits = -3.0 * jax.nn.one_hot(before, 3)
        tokens = draft_module.sample(logits, state.sampling, where, Role.DRAFT, filtered=False)
        lengths = jnp.full(state.lengths.shape, gamma, jnp.int32)
        tokens_drafted = state.draft.at[rows, where].set(tokens, mode="drop")
        return Drafted(tokens, lengths, logits), dataclasses.replace(state, draft=tokens_drafted)


SOURCES = {
    "haunted": Haunted(),
    "streaming": SelfDraft(Streaming(sinks=0, window=1)),
    "dense": SelfDraft(Dense()),
    "quest": SelfDraft(Quest(budget=2, page=2, sinks=0, recent=0, dense_layers=0)),
    # One position of the past, picked by its weight for a token of the step before: a bad draft.
    "vegas": GuidedDraft(Vegas(budget=1, least=0, score="weight")),
    "refreshed": GuidedDraft(Vegas(budget=1, least=0, score="weight", refresh=1)),
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
SOURCES["chain-refreshed"] = Chain(NgramDraft(1, 3), SOURCES["refreshed"], inner=1, rounds=2)
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


def enumerated(
    params: SamplingParams, change: Change = lambda logits, text: logits
) -> dict[tuple[int, ...], float]:
    """The target's law of whole texts: all that ``max_new_tokens`` allow, ended by stop tokens.

    ``change``: what a processor of the caller's own does.
    """
    new = params.max_new_tokens
    texts = list(itertools.product(range(3), repeat=new))
    tokens = jnp.asarray([[*PROMPT, *text] for text in texts])
    logits = np.asarray(full_logits(target(), tokens))[:, len(PROMPT) - 1 :]
    law: dict[tuple[int, ...], float] = {}
    for text, rows in zip(texts, logits, strict=True):
        end = next((i + 1 for i, t in enumerate(text) if t in params.stop_tokens), new)
        of_params = [processed(rows[i], PROMPT, text[:i], params) for i in range(end)]
        final = [change(x, (*PROMPT, *text[:i])) for i, x in enumerate(of_params)]
        mass = [filtered_law(x, params)[text[i]] for i, x in enumerate(final)]
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
    processor: tuple[LogitsProcessor, Change] | None = None,
) -> float:
    """Chi-square of ``rows`` texts of one prompt, one seed each; returns the acceptance rate.

    Everything is traced again, so that a patched internal takes effect.
    """
    draft = SelfDraft(OTHER_POLICIES[source]) if source in OTHER_POLICIES else SOURCES[source]
    arrays = prepare_params(draft.cache_policy, target(), PROMPT)
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
            draft_model=second(vocabulary) if draft.traits.needs_model else None,
            policy_params=arrays,
            rule=rule,
            steps_per_chunk=2,
            processors=[processor[0]] if processor else [],
        )
    check_counts(Counter(got.tokens), enumerated(params, *(processor or ())[1:]))
    return got.stats.acceptance_rate
