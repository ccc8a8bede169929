"""Logits that are no numbers: one law for all machinery, and no draft that is always accepted."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.config import SamplingParams
from jspec.decode.draft import ModelDraft, NgramDraft
from jspec.decode.generation import generate
from tests.decode.common import prompts, requests
from tests.parameters import default_run


class Broken(nnx.Module):
    """A model with NaN for token 5, infinity for token 9 now and then, and rows of NaN alone."""

    def __init__(self, model, whole: bool = False):
        self.model, self.config, self.dtype, self.whole = model, model.config, model.dtype, whole

    def __call__(self, tokens, positions, attend, cache):
        return self.model(tokens, positions, attend, cache)

    def logits(self, hidden):
        logits = self.model.logits(hidden)
        if self.whole:
            return jnp.full_like(logits, jnp.nan)
        best = jnp.argmax(logits, axis=-1, keepdims=True)
        ids = jnp.arange(logits.shape[-1]).reshape((1,) * (logits.ndim - 1) + (-1,))
        logits = jnp.where(ids == 5, jnp.nan, logits)
        logits = jnp.where((ids == 9) & (best % 4 == 1), jnp.inf, logits)
        return jnp.where(best % 7 == 3, jnp.nan, logits)


NEIGHBOURS = {
    "greedy": SamplingParams(max_new_tokens=30),
    "sampled": SamplingParams(max_new_tokens=30, temperature=1.0, seed=1),
    "filtered": SamplingParams(max_new_tokens=30, temperature=1.0, top_k=3, seed=1),
}


@pytest.mark.parametrize(
    ("neighbour", "draft"),
    default_run(
        {
            "greedy": ("greedy", NgramDraft(1, 4)),
            "sampled": ("sampled", NgramDraft(1, 4)),
            "filtered": ("filtered", None),
        },
        *("sampled", "filtered"),
    ),
)
def test_a_greedy_row_does_not_depend_on_what_its_neighbours_need(neighbour, draft, tiny):
    model = Broken(tiny)
    request = SamplingParams(max_new_tokens=30)
    (alone,) = generate(model, prompts()[:1], request, draft=None).tokens
    assert {0, 9} <= set(alone)  # a row without a finite logit, and one with infinity
    assert 5 not in alone
    params = [request, NEIGHBOURS[neighbour]]
    assert generate(model, prompts()[:2], params, draft=draft).tokens[0] == alone


@pytest.mark.exhaustive
def test_greedy_drafts_leave_such_a_model_as_it_is(tiny):
    model = Broken(tiny)
    plain = generate(model, prompts(), requests(), draft=None).tokens
    for second in (model, tiny):
        draft = {"draft": ModelDraft(), "draft_model": second}
        assert generate(model, prompts(), requests(), **draft).tokens == plain


@pytest.mark.exhaustive
def test_a_draft_model_without_a_finite_logit_is_mostly_rejected(tiny):
    """It drafts token 0 with certainty, which the target accepts as often as it likes token 0."""
    params = [SamplingParams(max_new_tokens=60, temperature=1.0, seed=seed) for seed in range(8)]
    draft = {"draft": ModelDraft(), "draft_model": Broken(tiny, whole=True)}
    got = generate(tiny, [[1, 2, 3]] * 8, params, **draft)
    plain = generate(tiny, [[1, 2, 3]] * 8, params, draft=None)
    share, usual = ((np.concatenate(g.tokens) == 0).mean() for g in (got, plain))
    assert got.stats.acceptance_rate < 0.2
    assert abs(share - usual) < 0.08
