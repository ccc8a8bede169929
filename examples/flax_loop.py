"""A Flax model of your own in a jitted speculative loop: give it `attend` and four members.

Run: python examples/flax_loop.py
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

import jspec


@dataclasses.dataclass(frozen=True)
class Shape:
    """What jspec must know of a model."""

    vocab_size: int = 256
    layers: tuple[jspec.LayerSpec, ...] = (jspec.LayerSpec(2, key_size=32, value_size=32),) * 2
    max_context: int = 1024
    stop_tokens: tuple[int, ...] = ()


class MyModel(nnx.Module):
    """Two layers of attention with learned positions: nothing of it comes from jspec."""

    dtype = jnp.float32

    def __init__(self, rngs: nnx.Rngs):
        self.config = Shape()
        width = 64
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.place = nnx.Embed(self.config.max_context, width, rngs=rngs)
        self.qkv = nnx.List([nnx.Linear(width, 6 * 32, rngs=rngs) for _ in range(2)])
        self.out = nnx.List([nnx.Linear(2 * 32, width, rngs=rngs) for _ in range(2)])

    def __call__(self, tokens, positions, attend, cache):
        x = self.embed(jnp.maximum(tokens, 0)) + self.place(jnp.maximum(positions, 0))
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = jnp.split(qkv(x).reshape(*x.shape[:2], 6, 32), 3, axis=2)
            y, cache = attend(layer, q, k, v, cache)
            x = x + out(y.reshape(*x.shape[:2], -1))
        return x, cache

    def logits(self, hidden):
        return (hidden @ self.embed.embedding[...].T).astype(jnp.float32)


def main() -> None:
    model = MyModel(nnx.Rngs(0))
    prompts = [list(b"a ragged batch"), list(b"of two prompts of different lengths")]
    params = jspec.SamplingParams(max_new_tokens=40)

    config = jspec.StepConfig(gamma=4, draft=jspec.NgramDraft())
    state = jspec.start_decoding(model, prompts, params, config)
    steps = 0
    while not bool(state.done.all()):
        state = jspec.speculative_step(model, state, config)
        steps += 1

    plain = jspec.generate(model, prompts, params, draft=None)
    for row, (prompt, tokens) in enumerate(zip(prompts, plain.tokens, strict=True)):
        ours = jax.device_get(state.tokens[row, len(prompt) : len(prompt) + 40]).tolist()
        print(f"row {row}: identical to plain decoding: {ours == list(tokens)}")
    print(f"{steps} speculative steps for 40 tokens a row")


if __name__ == "__main__":
    main()
