"""A model of your own on KVP x TPA devices: its weights, its sums, and jspec's attention.

Run: python examples/shard_map_experiment.py
Without GPUs, set XLA_FLAGS=--xla_force_host_platform_device_count=8 before.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jspec
from jspec import helix

MESHES = ((2, 1), (1, 2), (2, 2), (4, 2))  # KVP, TPA
LAYER = jspec.LayerSpec(kv_heads=2, key_size=16, value_size=16)
SHAPES = {"query": (32, 8, 16), "key": (32, 2, 16), "value": (32, 2, 16)}
SHAPES |= {"out": (8, 16, 32), "up": (32, 64), "down": (64, 32)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Model:
    """Attention and a feed-forward by turns; ``axes``: of the mesh, where it is on one."""

    weights: dict[str, Any]
    axes: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    config = jspec.ModelConfig(96, 32, 64, 8, (LAYER, LAYER))
    dtype = jnp.float32

    def __call__(self, tokens, positions, attend, cache):
        x = self.weights["embedding"][tokens]
        for layer, w in enumerate(self.weights["layers"]):
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[n]) for n in ("query", "key", "value"))
            out, cache = attend(layer, q, k, v, cache)  # of all keys, and of fewer heads
            x = x + self.summed(jnp.einsum("btnh,nhd->btd", out, w["out"]))
            x = x + self.summed(jax.nn.gelu(x @ w["up"]) @ w["down"])
        return x, cache

    def logits(self, hidden):
        return hidden @ self.weights["embedding"].T

    def summed(self, x):
        return jax.lax.psum(x, self.axes) if self.axes else x


def spec(config: helix.HelixConfig, name: str, shape: tuple[int, ...]) -> P:
    """Heads of q, k and v over TPA; what follows attention over all devices."""
    match name.rpartition(".")[2]:
        case "query" | "key" | "value":
            return P(None, "tpa")
        case "out" | "down":
            return P(config.axes)
        case "up":
            return P(None, config.axes)
    return P()


def main() -> None:
    keys = iter(jax.random.split(jax.random.key(0), 13))
    layers = [{n: jax.random.normal(next(keys), s) / 4 for n, s in SHAPES.items()} for _ in "12"]
    weights = {"embedding": jax.random.normal(next(keys), (96, 32)), "layers": layers}
    prompts, params = [[5, 7, 11] * 9, [3]], jspec.SamplingParams(max_new_tokens=24)
    alone = jspec.generate(Model(weights), prompts, params, draft=None)
    for kvp, tpa in MESHES:
        config = helix.HelixConfig(kvp=kvp, tpa=tpa)
        model = helix.Sharded(Model(weights, config.axes), config, spec)
        sharded = jspec.generate(model, prompts, params, draft=jspec.NgramDraft())
        print(f"kvp={kvp} tpa={tpa}: as on one device: {sharded.tokens == alone.tokens}")


if __name__ == "__main__":
    main()
