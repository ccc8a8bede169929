"""GRPO on the bundled model, with a reward by a rule: `jspec.Engine` makes the rollouts.

The rule: the share of an answer's characters that are lowercase letters. Each step, the engine
samples a group of answers to each prompt. The trainer raises the probability of tokens of answers
that are better than their group (Shao et al. 2024, equation 3, without the KL term), and the engine
goes on with its weights.

On several GPUs each has an engine with its share of the prompts and of the trainer's batch.

Run: python examples/grpo.py
On four GPUs: python examples/grpo.py --devices 4
Without GPUs: XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/grpo.py --devices 4
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jspec

PROMPTS = ("def ", "import os\n", "class A:\n", "# ")
CLIP = 0.2
# Of weights and tokens, as `log_probabilities` without its graph.
LogProbabilities = Callable[[Any, jax.Array], jax.Array]


def reward(text: str) -> float:
    """The share of lowercase letters."""
    return sum(letter.islower() for letter in text) / max(len(text), 1)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """How much better each answer is than its group, ``[prompts, answers]``, in deviations."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, keepdims=True) + 1e-6)


def log_probabilities(graph: Any, weights: Any, tokens: jax.Array) -> jax.Array:
    """Of each of ``tokens [N, S]`` but the first, ``[N, S - 1]``: the trainer's own forward."""
    model = nnx.merge(graph, weights)

    def attend(layer, q, k, v, cache):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), cache

    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _ = model(tokens, positions, attend, None)
    return of_next(model.logits(hidden), tokens)


def of_next(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-probabilities of the next tokens under ``logits [N, S, V]``, float32 ``[N, S - 1]``."""
    law = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return jnp.take_along_axis(law, tokens[:, 1:, None], axis=2)[..., 0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """The answers of a step.

    Attributes:
        tokens: int32 ``[N, S]``, prompts and answers, padded with 0.
        is_answer: bool ``[N, S - 1]``, whether the next token is of the answer.
        logprobs: float32 ``[N, S - 1]``, of the next token, from the rollout.
        advantages: float32 ``[N]``.
    """

    tokens: Any
    is_answer: Any
    logprobs: Any
    advantages: Any


def batch_of(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Any],
    rewards: np.ndarray,
    size: int,
) -> Batch:
    """A step's ``answers`` and their ``logprobs``, group by group, padded to ``size`` tokens."""
    count, group = len(answers), len(answers) // len(prompts)
    tokens = np.zeros((count, size), np.int32)
    is_answer, scores = np.zeros((count, size - 1), bool), np.zeros((count, size - 1), np.float32)
    for row, answer in enumerate(answers):
        prompt = prompts[row // group]
        begin, end = len(prompt), len(prompt) + len(answer)
        tokens[row, :end] = [*prompt, *answer]
        is_answer[row, begin - 1 : end - 1] = True
        scores[row, begin - 1 : end - 1] = logprobs[row]
    return Batch(tokens, is_answer, scores, advantages(rewards).ravel().astype(np.float32))


def loss(weights: Any, of_tokens: LogProbabilities, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """The clipped objective, negated; and the largest difference from the rollout's numbers."""
    difference = of_tokens(weights, batch.tokens) - batch.logprobs
    ratio, advantage = jnp.exp(difference), batch.advantages[:, None]
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return -jnp.mean(gain, where=batch.is_answer), jnp.where(
        batch.is_answer, jnp.abs(difference), 0
    ).max()


def train_step_of(
    of_tokens: LogProbabilities, optimizer: optax.GradientTransformation
) -> Callable[..., Any]:
    """A jitted step: new weights, state of the optimiser, and the difference that `loss` gives."""

    @jax.jit
    def train_step(weights: Any, state: Any, batch: Batch):
        gradient, difference = jax.grad(loss, has_aux=True)(weights, of_tokens, batch)
        updates, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, updates), state, difference

    return train_step


@dataclasses.dataclass
class Compilations:
    """Programs that XLA compiled since it was made."""

    count: int = 0

    def __post_init__(self) -> None:
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


def tokens_and_logprobs(groups: Sequence[Sequence[jspec.Request]]) -> tuple[list[Any], list[Any]]:
    """The tokens of all answers, and their log-probabilities."""
    answers = [answer for group in groups for answer in group]
    scores = [answer.logprobs for answer in answers]
    return [x.tokens for x in answers], [x.sampling.logprobs for x in scores if x is not None]


def run(engines: Sequence[jspec.Engine]) -> None:
    """Decode all requests; each engine has a thread, which waits for its device."""
    with ThreadPoolExecutor(len(engines)) as threads:
        list(threads.map(jspec.Engine.run, engines))


def params_of(new: int, seed: int) -> jspec.SamplingParams:
    return jspec.SamplingParams(new, temperature=1, seed=seed, logprobs=0, ignore_eos=True)


def draw(rewards: Sequence[float], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), dpi=110, layout="tight")
    axes = figure.subplots()
    axes.plot(range(1, len(rewards) + 1), rewards)
    axes.set(xlabel="step", ylabel="mean reward", title="GRPO on the bundled model", ylim=(0, 1))
    figure.savefig(picture)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1, choices=(1, 2, 4))  # divide the prompts
    parser.add_argument("--picture", type=Path, help="draw the rewards; needs matplotlib")
    asked = parser.parse_args(arguments)
    if asked.devices > jax.device_count():
        parser.error(
            f"--devices {asked.devices} must be at most {jax.device_count()}, the devices that JAX "
            "has here; without GPUs set XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{asked.devices}"
        )
    if asked.picture is not None and find_spec("matplotlib") is None:
        parser.error("--picture needs matplotlib; pip install matplotlib")
    return asked


def main(arguments: Sequence[str] | None = None) -> list[float]:
    asked = parsed(arguments)
    devices = jax.devices()[: asked.devices]
    mesh = Mesh(np.array(devices), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    model, tokenizer = jspec.load_bundled(dtype="float32")
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    size = max(map(len, prompts)) + asked.new
    engines = [
        jspec.Engine(
            jax.device_put(model, device),
            slots=len(prompts) * asked.answers // len(devices),
            capacity=size,
            draft=jspec.SuffixDraft(other_rows=True),
            gamma=4,
            logprobs=0,
        )
        for device in devices
    ]
    graph, weights = nnx.split(jax.device_put(model, everywhere))
    optimizer = optax.adam(1e-4)
    state = jax.device_put(optimizer.init(weights), everywhere)
    train_step = train_step_of(partial(log_probabilities, graph), optimizer)
    means, compiled, compilations = [], [], Compilations()
    for step in range(asked.steps):
        begin = time.perf_counter()
        first = asked.seed + step * len(prompts) * asked.answers
        groups = [
            engines[index % len(engines)].submit_group(
                prompt, params_of(asked.new, first + index * asked.answers), n=asked.answers
            )
            for index, prompt in enumerate(prompts)
        ]
        run(engines)
        rewards = np.array([[reward(tokenizer.decode(x.tokens)) for x in g] for g in groups])
        decoded = time.perf_counter()
        batch = batch_of(prompts, *tokens_and_logprobs(groups), rewards, size)
        weights, state, difference = train_step(weights, state, jax.device_put(batch, by_rows))
        difference = float(difference)  # waits for the step
        trained = time.perf_counter()
        for engine in engines:
            engine.update(weights)
        updated = time.perf_counter()
        compiled.append(compilations.count - sum(compiled))
        means.append(float(rewards.mean()))
        print(
            f"step {step + 1}: reward {means[-1]:.3f}, log-probabilities differ by at most "
            f"{difference:.1e}; rollouts {decoded - begin:.2f} s, training {trained - decoded:.2f} "
            f"s, update {1e3 * (updated - trained):.1f} ms"
        )
    print(f"programs compiled after the first step: {sum(compiled[1:])}")
    if asked.picture is not None:
        draw(means, asked.picture)
    return means


if __name__ == "__main__":
    main()
