"""A layer's attention on KVP x TPA devices with its exchange: Helix and its rivals."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bench import workload
from bench.caches import DTYPE
from bench.cases import Case, heads
from bench.drafters import BACKENDS, DEFAULT_BACKENDS
from bench.helix.mesh import Sharded
from bench.point import Row
from bench.settings import Settings
from bench.suite import Benchmark
from jspec.cache import Cache
from jspec.config import LayerSpec
from jspec.dispatch import use_backends
from jspec.helix import HelixConfig, cache_specs, layouts_on, part_of
from jspec.helix.cache import column_spec
from jspec.helix.mesh import TPA
from jspec.ops.attention.dense import attention
from jspec.policies.read import projected, read_whole
from jspec.typing import Array

DEFAULT: Case = {"B": 1, "S": 32768, "heads": "128/8", "H": 128, "T": 1, "kvp": 1, "tpa": 1}
DEFAULT |= {"strategy": "helix", "overlap": 1, "latent": 0, "up": "auto"}
DEFAULT |= {"exchange": "xla", "kernel": DEFAULT_BACKENDS}
CHOICES = {
    "kernel": BACKENDS,
    "strategy": ("helix", "gather", "medha", "tp"),
    "up": ("auto", "before", "after"),
    "exchange": ("xla", "pallas", "cuda"),
}
LATENT = "heads=128/1,H=576,latent=512"  # DeepSeek-R1's
# Relative to the norm of a head's output: rounding to bfloat16 causes a fifth of this error,
# leaving out one of a hundred positions five times as much.
NEAR = 0.02


def checked(case: Case) -> Case:
    """The case; raises `ValueError` for one that no mesh can have."""
    if case["latent"] > case["H"]:
        raise ValueError(f"latent={case['latent']} must be at most H={case['H']}")
    if not case["latent"] and case["up"] != "auto":
        raise ValueError(f"up={case['up']} projects latents; give latent, as in {LATENT}")
    helix_of(case).check_layer(0, heads(case)[0], spec_of(case))
    return case


def spec_of(case: Case) -> LayerSpec:
    """The layer; with ``latent``, its values are the first ``latent`` channels of its keys."""
    size, latent = case["H"], case["latent"]
    return LayerSpec(heads(case)[1], size, latent or size, values_in_keys=latent > 0)


def helix_of(case: Case) -> HelixConfig:
    return HelixConfig(
        kvp=case["kvp"],
        tpa=case["tpa"],
        strategy=case["strategy"],
        overlap=case["overlap"],
        up_projection=case["up"],
        exchange=case["exchange"],
    )


def defaults() -> list[str]:
    """The cases of two GPUs. 128/8 are the heads of Llama 405B; with 32/1, devices share a head."""
    kvp, tp = ("kvp=1", "kvp=2"), "kvp=2,strategy=tp"
    rivals = ("tpa=2", "kvp=2,strategy=gather", "kvp=2,strategy=medha")
    projected = ("kvp=1", "kvp=2,up=before", "kvp=2,up=after", tp)
    kinds = {"128/8": (*kvp, *rivals), "32/1": (*kvp, tp)}
    chunks = [f"kvp=2,overlap={count}" for count in (2, 4, 8)]
    one_sided = [f"kvp=2,exchange={by}" for by in ("pallas", "cuda")]
    kernels = [f"kvp=2,kernel={name}" for name in BACKENDS[1:]]
    texts = [
        f"S={slots},heads={kind},{how}"
        for slots in ("1024K", "256K")
        for kind, ways in kinds.items()
        for how in ways
    ]
    for size in ("B=1,S=1024K", "B=8,S=256K"):
        texts += [f"{size},{LATENT},{how}" for how in projected]
    texts += [f"B=8,S=128K,{how}" for how in (*kvp, *chunks, *one_sided, *kernels)]
    texts += [f"S=32K,{how}" for how in kinds["128/8"]]
    return texts + [f"B=8,T=10,S=32K,heads=32/8,{how}" for how in kinds["128/8"]]


SMALL = "S=2K,heads=8/2,H=32"


def rows(case: Case, settings: Settings) -> list[Row]:
    """A layer's attention on KVP x TPA devices with its exchange, by the strategy of a case."""
    return [_sharded(case).row(settings)]


def _sharded(case: Case) -> Sharded:
    helix = helix_of(case)
    return Sharded(
        *("attend", case, case["strategy"], helix),
        partial(attended, case),
        partial(following, case),
        partial(operands, case),
        partial(specs_of, case),
        P(None, None, helix.axes),
        partial(is_right, case),
        moved=lambda arguments: arguments[1].nbytes // (helix.stripes * helix.tpa),
    )


def attended(case: Case, q: Array, cache: Cache, up: Array | None = None) -> Array:
    """On a device: attention of the last T tokens to all keys, for its part of the heads."""
    kernel = case["kernel"]
    with use_backends({} if kernel == DEFAULT_BACKENDS else {"attention": kernel}):
        return read_whole(part_of(helix_of(case), cache), 0, q, positions_of(case), up=up)


def positions_of(case: Case) -> Array:
    """Positions of the last T tokens, int32 ``[B, T]``."""
    index = jnp.arange(case["S"] - case["T"], case["S"], dtype=jnp.int32)[None]
    return jnp.broadcast_to(index, (case["B"], case["T"]))


def following(case: Case, q: Array, cache: Cache, up: Array | None = None) -> Array:
    """Queries of a loop's next step, which depend on the output of this one."""
    return q + as_queries(attended(case, q, cache, up), q) / 1024


def as_queries(out: Array, q: Array) -> Array:
    """Outputs ``[B, T, n, H']`` in the shape of queries, of more heads and channels."""
    padded = jnp.pad(out, ((0, 0),) * 3 + ((0, q.shape[3] - out.shape[3]),))
    return jnp.tile(padded, (1, 1, q.shape[2] // out.shape[2], 1))


def operands(case: Case) -> tuple[Any, ...]:
    """Random queries, and a full cache of random keys and values on their devices.

    With latents, also the map of the values ``[N, latent, latent / 4]``, which keeps their scale.
    """
    helix, (query_heads, kv_heads) = helix_of(case), heads(case)
    spec, size, latent = (spec_of(case),), case["H"], case["latent"]
    layouts = layouts_on(helix, spec, case["S"], case["T"] - 1)
    shapes: list[tuple[int, ...]] = [(case["B"], case["T"], query_heads, size)]
    shapes += [(case["B"], layouts[0].size, kv_heads, size)] * (1 if latent else 2)
    places = [helix.sharding(None, None, TPA)]
    places += [helix.sharding(*column_spec(helix))] * (1 if latent else 2)
    if latent:
        shapes.append((query_heads, latent, latent // 4))
        places.append(helix.sharding(TPA))

    q, k, last = _drawing(tuple(shapes), tuple(places))()
    lengths = jax.device_put(jnp.full(case["B"], case["S"], jnp.int32), helix.sharding())
    columns = {"keys": k} if latent else {"keys": k, "values": last}
    filled = Cache((columns,), lengths, spec, layouts)
    return (q, filled, last * latent**-0.5) if latent else (q, filled)


@cache
def _drawing(shapes: tuple[tuple[int, ...], ...], places: tuple[Any, ...]) -> Any:
    """A function that draws random arrays on their devices, compiled once for equal shapes."""

    def drawn() -> list[Array]:
        keys = jax.random.split(jax.random.key(workload.SEED), len(shapes))
        return [jax.random.normal(key, x, DTYPE) for key, x in zip(keys, shapes, strict=True)]

    return jax.jit(drawn, out_shardings=list(places))


def specs_of(case: Case, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """How `operands` are sharded."""
    helix = helix_of(case)
    return P(None, None, TPA), cache_specs(helix, arguments[1]), *[P(TPA)] * len(arguments[2:])


def is_right(case: Case, out: Array, arguments: tuple[Any, ...]) -> bool:
    """Whether ``out [B, T, N, H']`` is what one device computes from the ``arguments``."""
    return is_near(np.asarray(out), on_one_device(case, arguments))


def is_near(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Whether every head's output ``[..., H']`` is within `NEAR` of the right one's length."""
    actual, expected = (x.astype(np.float32) for x in (actual, expected))
    length = np.linalg.norm(expected, axis=-1)
    return bool(np.all(np.linalg.norm(actual - expected, axis=-1) <= NEAR * length))


def on_one_device(case: Case, arguments: tuple[Any, ...]) -> np.ndarray:
    """The output ``[B, T, N, H']`` by XLA on the first device."""
    whole = jax.device_put(arguments, helix_of(case).sharding())
    q, cache, *up = jax.tree.map(lambda x: x.addressable_data(0), whole)
    key_positions = cache.layouts[0].slot_positions(jnp.full(case["B"], case["S"] - 1, jnp.int32))
    values = None if case["latent"] else cache.values(0)
    positions, size = positions_of(case), case["latent"] or None
    return np.asarray(
        _by_xla(q, cache.keys(0), values, positions, key_positions, *up, value_size=size)
    )


@partial(jax.jit, static_argnames="value_size")
def _by_xla(
    q: Array,
    k: Array,
    v: Array | None,
    positions: Array,
    key_positions: Array,
    up: Array | None = None,
    *,
    value_size: int | None,
) -> Array:
    out, _ = attention(
        *(q, k, v, positions),
        key_positions=key_positions,
        value_size=value_size,
        implementation="xla_blocked",
    )
    return projected(out, up)


LAYER = Benchmark(
    name="layer",
    rows=rows,
    default=DEFAULT,
    choices=CHOICES,
    complete=checked,
    gpu=defaults(),
    quick=[f"S=256K,{how}" for how in ("kvp=1", "kvp=2", "tpa=2", "kvp=2,strategy=medha")],
    cpu=[
        *(f"{SMALL},{how}" for how in ("kvp=2", "kvp=1", "tpa=2")),
        "S=2K,heads=8/1,H=40,latent=32,kvp=2,up=after",
    ],
)
