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

CONFIG = jspec.StepConfig(gamma=4, draft=jspec.NgramDraft())


def by_rows(model, prompts, params):
    """Each device decodes rows of its own, and goes on until they are done."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    model = jax.device_put(model, NamedSharding(mesh, P()))
    rows = NamedSharding(mesh, P("rows"))
    state = jspec.start_decoding(model, prompts, params, CONFIG, sharding=rows)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P("rows"))
    def decode(model, state):
        return jax.lax.while_loop(
            lambda state: ~state.done.all(),  # of this device's rows
            lambda state: jspec.speculative_step(model, state, CONFIG),
            state,
        )

    return decode(model, state)


def by_sharding(model, prompts, params):
    """Rows over one axis, heads and columns of the weights over the other; XLA does the rest."""
    mesh = jax.make_mesh(
        (max(jax.device_count() // 2, 1), min(jax.device_count(), 2)), ("data", "model")
    )

    def of_weight(path, x):
        # KV heads where queries, keys and values are joined, [in, K, columns]; else the last axis.
        axis = x.ndim - (2 if "qkv" in jax.tree_util.keystr(path) else 1)
        divides = x.ndim > 1 and x.shape[axis] % mesh.shape["model"] == 0
        return NamedSharding(mesh, P(*[None] * axis, "model") if divides else P())

    def of_state(name, shape):
        cache = name.startswith("cache.columns")  # [B, S, K, H]
        return NamedSharding(mesh, P("data", None, "model") if cache else P("data"))

    model = jax.device_put(model, jax.tree.map_with_path(of_weight, model))
    state = jspec.start_decoding(model, prompts, params, CONFIG, sharding=of_state)
    while not bool(state.done.all()):
        state = jspec.speculative_step(model, state, CONFIG)
    return state


def main() -> None:
    model, tokenizer = jspec.load_bundled()
    prompts = [tokenizer.encode(f"def add{row}(a, b):\n") for row in range(jax.device_count())]
    params = jspec.SamplingParams(max_new_tokens=12)
    plain = jspec.generate(model, prompts, params, draft=None)
    for decode in (by_rows, by_sharding):
        state = jax.device_get(decode(model, prompts, params))
        ends = [row[row >= 0][-12:].tolist() for row in state.tokens]
        same = np.array_equal(ends, plain.tokens)
        print(f"{decode.__name__}: {jax.device_count()} devices, identical to one device: {same}")


if __name__ == "__main__":
    main()
