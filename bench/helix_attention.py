"""A layer's attention shared by KVP x TPA devices, with its exchange, against what rivals Helix."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from bench import cases, point, table, workload
from bench.caches import DTYPE
from bench.cases import Case, heads
from bench.mesh import marginal, on_mesh
from bench.program import Absent, Program
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.cache import Cache
from jspec.config import LayerSpec
from jspec.helix import HelixConfig, cache_specs, layouts_on, part_of
from jspec.helix.cache import column_spec
from jspec.helix.mesh import TPA
from jspec.ops.attention.dense import attention
from jspec.policies.read import read_whole
from jspec.typing import Array

COLUMNS = ("B", "S", "heads", "T", "kvp", "tpa")
DEFAULT: Case = {"B": 1, "S": 32768, "heads": "128/8", "H": 128, "T": 1, "kvp": 1, "tpa": 1}
DEFAULT |= {"strategy": "helix"}
CHECKED = 4096  # positions; a check of more would need memory for another copy of them


def case(text: str) -> Case:
    """A case of ``--case``; `ValueError` where it is none."""
    found = cases.parse(text, DEFAULT)
    helix, (query_heads, kv_heads) = helix_of(found), heads(found)
    helix.check_layer(0, query_heads, LayerSpec(kv_heads, found["H"], found["H"]))
    return found


def helix_of(here: Case) -> HelixConfig:
    return HelixConfig(kvp=here["kvp"], tpa=here["tpa"], strategy=here["strategy"])


def grid(settings: Settings) -> list[Case]:
    """The cases that were asked for, or those of two devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    shared = ("kvp=1", "kvp=2", *(f"kvp=2,strategy={name}" for name in ("gather", "medha")))
    if jax.default_backend() != "gpu":
        small = "S=2K,heads=8/2,H=32"
        return [case(f"{small},{how}") for how in (*shared, "tpa=2")]
    contexts = ("256K",) if settings.quick else ("32K", "256K", "1024K")
    kinds = {"128/8": (*shared, "tpa=2"), "128/1": (*shared, "kvp=2,strategy=tp")}
    rest = [
        f"S={slots},heads={kind},{how}"
        for slots in contexts
        for kind, ways in kinds.items()
        for how in ways
    ]
    return [case(text) for text in rest + [f"B=8,T=10,S=32K,{how}" for how in shared]]


def run(settings: Settings) -> dict[str, Any]:
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("helix-attention", len(grid(settings))) as advance:
        for here in grid(settings):
            yield from _measured(here, settings)
            advance()


def attended(here: Case, q: Array, cache: Cache) -> Array:
    """On a device: attention of the last T tokens to all keys, for its part of the heads."""
    index = jnp.arange(here["T"], dtype=jnp.int32)[None] + here["S"] - here["T"]
    positions = jnp.broadcast_to(index, q.shape[:2])
    return read_whole(part_of(helix_of(here), cache), 0, q, positions)


def following(here: Case, q: Array, cache: Cache) -> Array:
    """Queries of the next step of a loop, which depend on the output of this one."""
    out = attended(here, q, cache)
    return q + jnp.tile(out, (1, 1, q.shape[2] // out.shape[2], 1)) / 1024


def operands(here: Case) -> tuple[Array, Cache]:
    """Random queries, and a full cache of random keys and values on their devices."""
    helix, (query_heads, kv_heads) = helix_of(here), heads(here)
    spec, size = (LayerSpec(kv_heads, here["H"], here["H"]),), here["H"]
    layouts = layouts_on(helix, spec, here["S"])
    shapes = [(here["B"], here["T"], query_heads, size)]
    shapes += [(here["B"], layouts[0].size, kv_heads, size)] * 2
    places = [helix.sharding(None, None, TPA), *[helix.sharding(*column_spec(helix))] * 2]

    def drawn() -> list[Array]:
        keys = jax.random.split(jax.random.key(workload.SEED), 3)
        return [jax.random.normal(key, x, DTYPE) for key, x in zip(keys, shapes, strict=True)]

    q, k, v = jax.jit(drawn, out_shardings=places)()
    lengths = jax.device_put(jnp.full(here["B"], here["S"], jnp.int32), helix.sharding())
    return q, Cache(({"keys": k, "values": v},), lengths, spec, layouts)


def is_right(here: Case) -> bool:
    """Whether the program gives, over `CHECKED` positions at most, what one device computes."""
    here = here | {"S": min(here["S"], CHECKED)}
    helix, (q, cache) = helix_of(here), operands(here)
    specs = (P(None, None, TPA), cache_specs(helix, cache))
    heads_of = P(None, None, helix.axes)
    found = on_mesh(helix, partial(attended, here), specs, out=heads_of)(q, cache)
    positions = np.arange(here["S"] - here["T"], here["S"], dtype=np.int32)
    queries, k, v = map(jnp.asarray, jax.device_get((q, cache.keys(0), cache.values(0))))
    right, _ = attention(
        *(queries, k, v),
        jnp.asarray(np.tile(positions, (here["B"], 1))),
        key_positions=cache.layouts[0].held(jnp.full(here["B"], here["S"] - 1, jnp.int32)),
        implementation="xla",
    )
    return np.allclose(*(np.asarray(x, np.float32) for x in (found, right)), atol=0.01, rtol=0.03)


def _measured(here: Case, settings: Settings) -> list[point.Row]:
    helix, name = helix_of(here), here["strategy"]
    if jax.device_count() < helix.devices:
        reason = f"it needs {helix.devices} devices, and {jax.device_count()} are here"
        return point.measure("attend", here, [Absent(name, reason)], settings)
    q, cache = operands(here)
    body, specs = partial(following, here), (P(None, None, TPA), cache_specs(helix, cache))
    compiled = on_mesh(helix, body, specs).lower(q, cache).compile()
    program = Program(name, lambda: compiled(q, cache), lambda out: is_right(here))
    shared = helix.stripes * helix.tpa
    rows = point.measure(
        *("attend", here, [program], settings), clocks=("wall",), moved=cache.nbytes // shared
    )
    for own in rows:
        if own["checked"]:
            own["step_ns"] = marginal(helix, body, specs, (q, cache), settings)
    return rows


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS)


SUITE = Suite(
    "helix-attention",
    "a layer's attention by KVP x TPA devices with its exchange, beside tensor parallelism, Medha "
    "and gathered queries",
    run,
    show,
    own_clocks=True,
    case=case,
)
