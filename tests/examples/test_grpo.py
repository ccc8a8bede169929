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


@pytest.fixture
def small_model(monkeypatch):
    """In place of the bundled one, and trained with larger steps."""
    model, (_, tokenizer) = make_decoder(OF_BYTES, seed=1), jspec.load_bundled()
    monkeypatch.setattr(jspec, "load_bundled", lambda dtype: (model, tokenizer))
    monkeypatch.setattr(grpo.optax, "adam", lambda rate, adam=grpo.optax.adam: adam(3e-3))


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 4, reason="the example runs on four devices")
def test_four_devices_give_the_answers_of_one(small_model, monkeypatch, capsys):
    """Of all steps, so that each engine has the weights of the step before."""
    batches, engines, train_step_of, run = [], [], grpo.train_step_of, grpo.run

    def recorded(*args):
        step = train_step_of(*args)
        return lambda weights, state, batch: (batches.append(batch), step(weights, state, batch))[1]

    monkeypatch.setattr(grpo, "train_step_of", recorded)
    monkeypatch.setattr(grpo, "run", lambda x: (engines.append(x), run(x)))
    rewards = []
    for devices in ("1", "4"):
        arguments = ["--steps", "3", "--answers", "2", "--new", "8", "--devices", devices]
        with jax.numpy_dtype_promotion("standard"):  # which optax needs
            rewards.append(grpo.main(arguments))
        assert capsys.readouterr().out.splitlines()[-1].endswith("after the first step: 0")
    for one, four in zip(batches[:3], batches[3:], strict=True):
        np.testing.assert_array_equal(one.tokens, four.tokens)
        assert one.is_answer.sum() == 8 * 8
        assert [x.data.shape[0] for x in four.tokens.addressable_shards] == [2] * 4
    assert rewards[0] == rewards[1]
    for count, group in ((1, engines[2]), (4, engines[5])):
        places = [{d for x in jax.tree.leaves(e.model) for d in x.devices()} for e in group]
        assert places == [{device} for device in jax.devices()[:count]]
        assert [engine.stats.rows for engine in group] == [24 // count] * count


def test_more_devices_than_there_are_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        grpo.main(["--devices", "4"])
    assert "--devices 4 must be at most 2" in capsys.readouterr().err


def test_a_picture_needs_matplotlib_before_anything_trains(monkeypatch, capsys):
    monkeypatch.setattr(grpo, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        grpo.main(["--picture", "reward.png"])
    assert "--picture needs matplotlib; pip install matplotlib" in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_model_learns_the_rule(small_model, capsys, tmp_path):
    picture = tmp_path / "reward.png"
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        rewards = grpo.main(["--steps", "30", "--picture", str(picture)])
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
    assert picture.stat().st_size > 1000
    assert capsys.readouterr().out.splitlines()[-1].endswith("after the first step: 0")
