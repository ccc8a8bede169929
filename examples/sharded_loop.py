"""Decoding on a mesh of devices: rows by `jax.shard_map`, then weights and cache by sharding alone.

Run: python examples/sharded_loop.py
Without GPUs: XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/sharded_loop.py
"""

import functools

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jspec

NEW = 24
CONFIG = jspec.StepConfig(gamma=4, draft=jspec.NgramDraft())


def by_rows(model, prompts, params):
    """Each device decodes rows of its own, and goes on until they are done, whoever else is not."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    rows, everywhere = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())
    model = jax.device_put(model, everywhere)
    state = jspec.start_decoding(model, prompts, params, CONFIG, sharding=rows)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P("rows"))
    def decode(model, state):
        return jax.lax.while_loop(
            lambda state: ~state.done.all(),
            lambda state: jspec.speculative_step(model, state, CONFIG),
            state,
        )

    return decode(model, state)


def by_sharding(model, prompts, params):
    """A mesh of data x model: rows over one axis, heads and columns of the weights over the other.

    XLA moves what has to be moved: the loop is that of one device.
    """
    count = jax.device_count()
    mesh = jax.make_mesh((max(count // 2, 1), min(count, 2)), ("data", "model"))

    def weight(x):
        columns = x.ndim == 2 and x.shape[1] % mesh.shape["model"] == 0
        return NamedSharding(mesh, P(None, "model") if columns else P())

    def of_state(name, shape):
        heads = name.startswith("cache.columns") and shape[2] % mesh.shape["model"] == 0
        return NamedSharding(mesh, P("data", None, "model") if heads else P("data"))

    model = jax.device_put(model, jax.tree.map(weight, model))
    state = jspec.start_decoding(model, prompts, params, CONFIG, sharding=of_state)
    while not bool(state.done.all()):
        state = jspec.speculative_step(model, state, CONFIG)
    return state


def main() -> None:
    model, tokenizer = jspec.load_bundled()
    text = "def add(a, b):\n    return a + b\n\n\ndef add{0}(a, b):\n"
    prompts = [tokenizer.encode(text.format(row)) for row in range(jax.device_count())]
    params = jspec.SamplingParams(max_new_tokens=NEW)
    expected = jspec.generate(model, prompts, params, draft=None).tokens
    for decode in (by_rows, by_sharding):
        state = jax.device_get(decode(model, prompts, params))
        tokens = [
            tuple(row[row >= 0][len(p) :]) for p, row in zip(prompts, state.tokens, strict=True)
        ]
        print(
            f"{decode.__name__}: {jax.device_count()} devices, "
            f"identical to one device: {np.array_equal(tokens, expected)}"
        )


if __name__ == "__main__":
    main()
