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
from bench.mesh import measured, on_mesh
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
DEFAULT |= {"strategy": "helix", "overlap": 1, "latent": 0, "up": "auto"}
LATENT = "heads=128/1,H=576,latent=512"  # DeepSeek-R1's
CHECKED = 4096  # positions; a check of more would need memory for another copy of them


def case(text: str) -> Case:
    """A case of ``--case``; `ValueError` where it is none."""
    found = cases.parse(text, DEFAULT)
    if found["latent"] > found["H"]:
        raise ValueError(f"latent={found['latent']} must be at most H={found['H']}")
    helix_of(found).check_layer(0, heads(found)[0], spec_of(found))
    return found


def spec_of(here: Case) -> LayerSpec:
    """The layer; with ``latent`` its values are so many channels of its keys."""
    size, latent = here["H"], here["latent"]
    return LayerSpec(heads(here)[1], size, latent or size, values_in_keys=latent > 0)


def helix_of(here: Case) -> HelixConfig:
    return HelixConfig(
        kvp=here["kvp"],
        tpa=here["tpa"],
        strategy=here["strategy"],
        overlap=here["overlap"],
        up_projection=here["up"],
    )


def grid(settings: Settings) -> list[Case]:
    """The cases that were asked for, or those of two devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    shared = ("kvp=1", "kvp=2", *(f"kvp=2,strategy={name}" for name in ("gather", "medha")))
    projected = ("kvp=1", "kvp=2,up=before", "kvp=2,up=after")
    if jax.default_backend() != "gpu":
        small, latent = "S=2K,heads=8/2,H=32", "S=2K,heads=8/1,H=40,latent=32"
        every = [f"{small},{how}" for how in (*shared, "tpa=2")]
        return [case(text) for text in every + [f"{latent},{how}" for how in projected]]
    contexts = ("256K",) if settings.quick else ("32K", "256K", "1024K")
    kinds = {"128/8": (*shared, "tpa=2"), "128/1": (*shared, "kvp=2,strategy=tp")}
    rest = [
        f"S={slots},heads={kind},{how}"
        for slots in contexts
        for kind, ways in kinds.items()
        for how in ways
    ]
    rest += [f"B=8,T=10,S=32K,{how}" for how in shared]
    rest += [f"B=8,S={slots},{LATENT},{how}" for slots in contexts[:2] for how in projected]
    return [case(text) for text in rest]


def run(settings: Settings) -> dict[str, Any]:
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("helix-attention", len(grid(settings))) as advance:
        for here in grid(settings):
            yield from _measured(here, settings)
            advance()


def attended(here: Case, q: Array, cache: Cache, up: Array | None = None) -> Array:
    """On a device: attention of the last T tokens to all keys, for its part of the heads."""
    return read_whole(part_of(helix_of(here), cache), 0, q, positions_of(here), up=up)


def positions_of(here: Case) -> Array:
    """Those of the last T tokens, int32 ``[B, T]``."""
    index = jnp.arange(here["S"] - here["T"], here["S"], dtype=jnp.int32)[None]
    return jnp.broadcast_to(index, (here["B"], here["T"]))


def following(here: Case, q: Array, cache: Cache, up: Array | None = None) -> Array:
    """Queries of the next step of a loop, which depend on the output of this one."""
    return q + as_queries(attended(here, q, cache, up), q) / 1024


def as_queries(out: Array, q: Array) -> Array:
    """Outputs ``[B, T, n, H']`` in the shape of queries, of more heads and channels."""
    wide = jnp.pad(out, ((0, 0),) * 3 + ((0, q.shape[3] - out.shape[3]),))
    return jnp.tile(wide, (1, 1, q.shape[2] // out.shape[2], 1))


def operands(here: Case) -> tuple[Any, ...]:
    """Random queries, and a full cache of random keys and values on their devices.

    Of latents also the map of the values ``[N, latent, latent / 4]``, which keeps their size.
    """
    helix, (query_heads, kv_heads) = helix_of(here), heads(here)
    spec, size, latent = (spec_of(here),), here["H"], here["latent"]
    layouts = layouts_on(helix, spec, here["S"], here["T"] - 1)
    shapes: list[tuple[int, ...]] = [(here["B"], here["T"], query_heads, size)]
    shapes += [(here["B"], layouts[0].size, kv_heads, size)] * (1 if latent else 2)
    places = [helix.sharding(None, None, TPA)]
    places += [helix.sharding(*column_spec(helix))] * (1 if latent else 2)
    if latent:
        shapes.append((query_heads, latent, latent // 4))
        places.append(helix.sharding(TPA))

    def drawn() -> list[Array]:
        keys = jax.random.split(jax.random.key(workload.SEED), 3)
        return [jax.random.normal(key, x, DTYPE) for key, x in zip(keys, shapes, strict=True)]

    q, k, last = jax.jit(drawn, out_shardings=places)()
    lengths = jax.device_put(jnp.full(here["B"], here["S"], jnp.int32), helix.sharding())
    columns = {"keys": k} if latent else {"keys": k, "values": last}
    cache = Cache((columns,), lengths, spec, layouts)
    return (q, cache, last * latent**-0.5) if latent else (q, cache)


def specs_of(here: Case, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """How `operands` are sharded."""
    helix = helix_of(here)
    return P(None, None, TPA), cache_specs(helix, arguments[1]), *[P(TPA)] * len(arguments[2:])


def is_right(here: Case) -> bool:
    """Whether the program gives, over `CHECKED` positions at most, what one device computes."""
    return is_of_one_device(*shared_output(here))


def is_of_one_device(here: Case, found: np.ndarray, arguments: tuple[Any, ...]) -> bool:
    """Whether ``found`` is what one device computes of the ``arguments``, as `shared_output`."""
    q, cache, *up = arguments
    queries, k = map(jnp.asarray, jax.device_get((q, cache.keys(0))))
    values = None if here["latent"] else jnp.asarray(jax.device_get(cache.values(0)))
    right, _ = attention(
        *(queries, k, values, positions_of(here)),
        key_positions=cache.layouts[0].held(jnp.full(here["B"], here["S"] - 1, jnp.int32)),
        value_size=here["latent"] or None,
        implementation="xla",
    )
    if up:
        right = jnp.einsum("btnv,nvh->btnh", right, jnp.asarray(jax.device_get(up[0])))
    return np.allclose(*(np.asarray(x, np.float32) for x in (found, right)), atol=0.01, rtol=0.03)


def shared_output(here: Case) -> tuple[Case, np.ndarray, tuple[Any, ...]]:
    """The case with `CHECKED` positions at most, its output ``[B, T, N, H']``, its operands."""
    here = here | {"S": min(here["S"], CHECKED)}
    helix, arguments = helix_of(here), operands(here)
    heads_of = P(None, None, helix.axes)
    run = on_mesh(helix, partial(attended, here), specs_of(here, arguments), out=heads_of)
    return here, np.asarray(run(*arguments)), arguments


def _measured(here: Case, settings: Settings) -> list[point.Row]:
    helix, name = helix_of(here), here["strategy"]
    if here["latent"] and here["kvp"] > 1:
        name += f", up {here['up']}"
    shared = helix.stripes * helix.tpa
    return measured(
        *("attend", here, name, helix, partial(following, here)),
        *(partial(specs_of, here), partial(operands, here)),
        *(lambda _: is_right(here), settings),
        moved=lambda given: given[1].nbytes // shared,
    )


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
