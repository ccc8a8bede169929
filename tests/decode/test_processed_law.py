"""The law of sampled texts with logits processors, over the whole pipeline, by enumeration.

Each token's law depends on the tokens before it, also on those of the same draft. The mutants at
the end give positions of a draft the history of others.
"""

import dataclasses
from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import NgramDraft
from jspec.decode.engine import Engine
from jspec.decode.processors import LogitBias, LogitsFunction, MinNewTokens, Penalties, Processing
from tests.decode.test_text_law import MUTANT_ROWS
from tests.decode.text_laws import PROMPT, SOURCES, check_law, enumerated, seeded, target
from tests.ops.laws import check_counts
from tests.parameters import default_run

# Two of three tokens are in the prompt more than once, and each may end the text or not.
PENALISED = SamplingParams(
    max_new_tokens=4,
    temperature=1.0,
    repetition_penalty=1.6,
    frequency_penalty=1.5,
    presence_penalty=-0.7,
    logit_bias={1: 0.4},
    min_new_tokens=3,
    stop_tokens=(2,),
)
BANNED = SamplingParams(max_new_tokens=4, temperature=1.2, top_p=0.9, banned_tokens=(0,))
QUICK = ("streaming", "ngram")


def in_order(logits, tokens, length):
    """Raises the logit of the token after the last one, as in 0, 1, 2, 0, and lowers another."""
    index, last = jnp.arange(3, dtype=jnp.int32), tokens[length - 1]
    is_next, is_other = index == (last + 1) % 3, index == (last + 2) % 3
    return logits + 1.2 * (is_next.astype(jnp.float32) - is_other.astype(jnp.float32))


def ordered(logits, text):
    changed = np.array(logits, np.float64)
    changed[(text[-1] + 1) % 3] += 1.2
    changed[(text[-1] + 2) % 3] -= 1.2
    return changed


ORDER = LogitsFunction(in_order), ordered


@pytest.mark.parametrize(
    "source",
    default_run(list(SOURCES), "streaming", slow=[x for x in SOURCES if x not in QUICK]),
)
def test_penalised_texts_have_their_law(source):
    rate = check_law(source, PENALISED)
    if source == "dense":  # its drafts are drawn from the processed law of the target
        assert rate > 0.999
    else:
        assert source == "plain" or rate > 0.2


@pytest.mark.parametrize("source", default_run(["chain", "model"], slow=["chain"]))
def test_penalised_texts_verified_by_blocks_have_their_law(source):
    assert check_law(source, PENALISED, gamma=3, rule="block") > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("kind", ["penalised", "banned", "function"])
def test_processed_texts_have_their_law_by_every_drafter_and_rule(kind, source, rule):
    params = BANNED if kind == "banned" else PENALISED
    processor = ORDER if kind == "function" else None
    check_law(source, params, gamma=3, seed=1, rule=rule, processor=processor)


@pytest.mark.parametrize("source", default_run(["ngram", "model"], slow=["model"]))
def test_texts_of_a_function_have_their_law(source):
    params = dataclasses.replace(BANNED, top_p=1.0, banned_tokens=(), logit_bias={2: -0.5})
    check_law(source, params, gamma=3, processor=ORDER)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [2, 5])
def test_texts_by_a_draft_of_another_padding_have_their_law(vocabulary):
    assert check_law("model", PENALISED, vocabulary=vocabulary) > 0.1


@pytest.mark.slow
def test_texts_of_an_engine_have_their_law():
    needed = [LogitBias(), MinNewTokens(), Penalties()]
    draft = NgramDraft(min_match=1, max_match=3)
    engine = Engine(target(), slots=500, capacity=16, draft=draft, gamma=2, processors=needed)
    rows = seeded(PENALISED, 7_000, 3_000)
    requests = [engine.submit(PROMPT, row) for row in rows]
    engine.run()
    check_counts(Counter(x.tokens for x in requests), enumerated(PENALISED))


# --- mutants ---------------------------------------------------------------------------------

EXTENDED, PROCESS = Processing.extended, Processing.process
MUTANTS = {
    "positions of a draft without its tokens": (
        "process",
        lambda self, logits, draft, axis=None: PROCESS(self, logits, draft[:, :0], axis),
    ),
    "positions of a draft with its tokens in another order": (
        "process",
        lambda self, logits, draft, axis=None: PROCESS(self, logits, draft[:, ::-1], axis),
    ),
    "nothing is committed": ("extended", lambda self, tokens: self),
    "the last token of a step is not committed": (
        "extended",
        lambda self, tokens: EXTENDED(self, tokens[:, : max(tokens.shape[1] - 1, 1)]),
    ),
}


REPEATED = tuple(MUTANTS)[1::2]  # the others show each check by one


@pytest.mark.parametrize("name", default_run(list(MUTANTS), slow=REPEATED))
def test_a_mutant_is_caught(name, monkeypatch):
    monkeypatch.setattr(Processing, *MUTANTS[name])
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("streaming", PENALISED, rows=MUTANT_ROWS)
