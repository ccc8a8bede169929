"""The example of GRPO: its numbers, and a step of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from examples import grpo
from tests.conftest import OF_BYTES, make_decoder
from tests.decode.common import full_logits


def test_advantages_are_deviations_from_the_group():
    rewards = np.array([[0.0, 1.0, 1.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    np.testing.assert_allclose(grpo.advantages(rewards), [[-1, 1, 1, -1], [0] * 4], atol=1e-5)
    assert (grpo.reward("abC1"), grpo.reward("")) == (0.5, 0)


def test_the_first_gradient_is_that_of_the_policy_gradient(tiny):
    """Where the ratio is 1, that of the mean advantage times the log-probability; then clipped."""
    prompts, rewards = [[1, 2, 3], [4]], np.array([[0.0, 1.0], [3.0, 1.0]])
    engine = jspec.Engine(tiny, slots=4, capacity=12, draft=None, logprobs=0)
    groups = [engine.submit_group(x, grpo.params_of(6, 5), n=2) for x in prompts]
    engine.run()
    batch = grpo.batch_of(prompts, *grpo.tokens_and_logprobs(groups), rewards, 10)
    graph, weights = nnx.split(tiny)
    loss = jax.jit(
        lambda weights, batch: jax.value_and_grad(grpo.loss, has_aux=True)(
            weights, partial(grpo.log_probabilities, graph), batch
        )
    )
    (value, difference), gradient = loss(weights, batch)
    assert float(difference) < 1e-4
    assert float(value) == pytest.approx(0, abs=1e-4)  # advantages of a group cancel out

    def expected(weights):
        logits = full_logits(nnx.merge(graph, weights), jnp.array(batch.tokens))
        total = 0
        for row, (start, sign) in enumerate(((3, -1), (3, 1), (1, 1), (1, -1))):
            law = jax.nn.log_softmax(logits[row, start - 1 : start + 5])
            total -= sign * law[jnp.arange(6), batch.tokens[row, start : start + 6]].sum()
        return total / 24

    theirs = jax.jit(jax.grad(expected))(weights)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    # Good tokens that have become likelier by more than the clip have no gradient.
    far = grpo.Batch(batch.tokens, batch.is_answer, batch.logprobs - 1, np.abs(batch.advantages))
    (value, _), gradient = loss(weights, far)
    assert float(value) == pytest.approx(-(1 + grpo.CLIP), abs=1e-4)
    assert all(not x.any() for x in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_a_small_model_learns_the_rule(monkeypatch, capsys, tmp_path):
    model, (_, tokenizer) = make_decoder(OF_BYTES, seed=1), jspec.load_bundled()
    monkeypatch.setattr(jspec, "load_bundled", lambda dtype: (model, tokenizer))
    monkeypatch.setattr(grpo.optax, "adam", lambda rate, adam=grpo.optax.adam: adam(3e-3))
    picture = tmp_path / "reward.png"
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        rewards = grpo.main(["--steps", "30", "--picture", str(picture)])
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert picture.stat().st_size > 1000
    assert capsys.readouterr().out.splitlines()[-1].endswith("after the first step: 0")
