"""The law of sampled texts is the target's, over the whole pipeline.

The mutants at the end show that the check sees what may go wrong between steps.
"""

import itertools

import jax.numpy as jnp
import pytest

from jspec.config import SamplingParams
from jspec.decode import step as step_module
from jspec.decode.auto import GammaChoice
from jspec.decode.draft import DrafterTraits
from jspec.decode.draft import autoregressive as draft_module
from jspec.decode.draft import chain as chain_module
from jspec.ops.sample import Role, sample
from tests.decode.text_laws import OTHER_POLICIES, SAMPLED, SOURCES, Haunted, check_law
from tests.parameters import default_run

# Quest drafts as the dense policy does, in the cache; Vegas as it does where it is refreshed. Dense
# drafts and plain decoding draw as other sources do, from the target's law.
MORE = (
    "dense",
    "plain",
    "quest",
    "vegas",
    *(name for name in SOURCES if name.startswith("chain-")),
)

MUTANT_ROWS = 3_000  # half of the rows of the checks, so that these have a margin


@pytest.mark.parametrize("source", default_run(list(SOURCES), "streaming", "chain", slow=MORE))
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
    "source", ["streaming", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ngram", "chain"))]
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
    monkeypatch.setattr(GammaChoice, "choose", lambda *_: next(gammas))
    check_law(source, SAMPLED, gamma="auto")


# --- mutants ---------------------------------------------------------------------------------


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


FIRST = "numbers of verification reused in every step"
# The others show each check by one.
REPEATED = (
    "one number for all tokens of a draft",
    "draft drawn at another temperature",
    "logits of another position",
)


def marked(mutants: dict[str, tuple]) -> list:
    return default_run(
        mutants,
        *({FIRST} & mutants.keys()),
        slow=[name for name in REPEATED if name in mutants],
    )


@pytest.mark.parametrize(("module", "name", "mutant"), marked(MUTANTS))
def test_a_mutant_is_caught(module, name, mutant, monkeypatch):
    monkeypatch.setattr(module, name, mutant)
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("streaming", SAMPLED, rows=MUTANT_ROWS)


def test_numbers_of_rejected_tokens_are_not_used_again(monkeypatch):
    monkeypatch.setattr(Haunted, "traits", DrafterTraits())
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("haunted", SAMPLED, rows=MUTANT_ROWS)


CHAIN_MUTANTS = {
    "numbers of acceptance shared by two levels": (
        "drawn",
        lambda state, logits, positions, axes: sample(
            logits, state.sampling, positions, Role.ACCEPT, filtered=state.mode == "filtered"
        ),
    ),
    "logits of another position": (
        "_put",
        lambda into, rows, begin, counts: PUT(into, jnp.roll(rows, 1, axis=1), begin, counts),
    ),
}
PUT = chain_module._put


@pytest.mark.parametrize(("name", "mutant"), marked(CHAIN_MUTANTS))
def test_a_mutant_of_a_chain_is_caught(name, mutant, monkeypatch):
    monkeypatch.setattr(chain_module, name, mutant)
    with pytest.raises(AssertionError, match=r"p-value|seldom"):
        check_law("chain", SAMPLED, rows=MUTANT_ROWS)
