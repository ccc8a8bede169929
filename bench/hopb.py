"""HOP-B: how much of a layer's exchange is exposed, by the number of chunks that it goes in.

Beside attention with its exchange stand the same attention without one, and the message alone. What
a number of chunks exposes is its time above that of the attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from rich.table import Table

from bench import cases, helix_attention, point
from bench.cases import Case, kilo
from bench.helix_attention import LATENT, as_queries, helix_of, operands, positions_of, specs_of
from bench.mesh import measured, on_mesh
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import number
from jspec.cache import Cache
from jspec.helix import HelixConfig, part_of
from jspec.helix.attention import all_to_all
from jspec.helix.mesh import KVP, TPA
from jspec.ops.attention.dense import attention
from jspec.ops.attention.merge import merge_attention
from jspec.policies.read import in_slots, projected, settings_of
from jspec.typing import Array

SIZES = ("B", "S", "heads", "H", "T", "kvp", "tpa", "latent", "up")
DEFAULT: Case = {name: helix_attention.DEFAULT[name] for name in SIZES} | {"B": 8, "kvp": 2}
COLUMNS = ("B", "S", "heads", "T", "kvp", "tpa", "latent")
ALONE, MESSAGE = "attention alone", "message alone"


def case(text: str) -> Case:
    """A case of ``--case``; `ValueError` where it is none."""
    found = cases.parse(text, DEFAULT)
    if found["kvp"] < 2:
        raise ValueError(f"kvp={found['kvp']} must be 2 or more, for something to exchange")
    helix_attention.case(",".join(f"{key}={value}" for key, value in found.items() if value))
    return found


def grid(settings: Settings) -> list[Case]:
    """The cases that were asked for, or those of two devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        return [case("B=2,S=256,heads=8/2,H=32")]
    batches, contexts = (8,) if settings.quick else (8, 32), ("32K", "128K")
    sizes = [f"B={batch},S={slots}" for batch in batches for slots in contexts]
    return [case(f"{size},{kind}") for size in sizes for kind in ("heads=128/8", LATENT)]


def chunks_of(here: Case) -> list[int]:
    """1, 2, 4, ... up to a chunk a row."""
    return [2**i for i in range(here["B"].bit_length()) if 2**i <= here["B"]]


def run(settings: Settings) -> dict[str, Any]:
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("hopb", len(grid(settings))) as advance:
        for here in grid(settings):
            rows = [row for step in _steps(here) for row in step(settings)]
            _add_exposed(rows)
            yield from rows
            advance()


def _steps(here: Case) -> list[Callable[[Settings], list[point.Row]]]:
    """What measures each row of a case."""
    whole = here | {"strategy": "helix"}
    alone, message = (_measured(whole, here, name) for name in (ALONE, MESSAGE))
    return [alone, message, *(_measured(whole | {"overlap": n}, here, n) for n in chunks_of(here))]


def _measured(whole: Case, here: Case, what: str | int) -> Callable[[Settings], list[point.Row]]:
    """What measures the attention or the message alone, or a number of chunks."""
    if what == ALONE:
        whole = whole | {"overlap": 1}
        body, right = partial(own_following, whole), partial(is_attention_right, whole)
        given, specs = partial(operands, whole), partial(specs_of, whole)
    elif what == MESSAGE:
        whole = whole | {"overlap": 1}
        body, right = partial(message_following, whole), partial(is_message_right, whole)
        given, specs = partial(payload, whole), lambda _: (P(KVP, None, None, TPA),)
    else:
        body, right = partial(helix_attention.following, whole), partial(are_chunks_right, whole)
        given, specs = partial(operands, whole), partial(specs_of, whole)
    name = what if isinstance(what, str) else "1 chunk" if what == 1 else f"{what} chunks"
    helix = helix_of(whole)

    def measure(settings: Settings) -> list[point.Row]:
        return measured(
            *("exchange", here, name, helix, body, specs, given),
            *(lambda _: right(), settings),
            moved=lambda given: sum(x.nbytes for x in jax.tree.leaves(given[:2])) // helix.devices,
        )

    return measure


def own_attention(here: Case, q: Array, cache: Cache, up: Array | None = None) -> Any:
    """On a device: output and log-sum-exp of all its queries over its own keys."""
    part = part_of(helix_of(here), cache)
    positions, where = in_slots(part, 0, positions_of(here))
    columns = part.columns[0]
    return attention(
        *(q, columns["keys"], columns.get("values"), positions),
        key_positions=where,
        **settings_of(part.specs[0]),
    )


def own_following(here: Case, q: Array, cache: Cache, up: Array | None = None) -> Array:
    """Queries that depend on the output of `own_attention`, behind the map of the values."""
    out = own_attention(here, q, cache)[0]
    if up is not None:
        mapped = len(up) if projects_first(here) else len(up) // here["kvp"]
        out = projected(out[:, :, :mapped], up[:mapped])
    return q + as_queries(out, q) / 1024


def projects_first(here: Case) -> bool:
    """Whether the map of the values is applied before the exchange; it makes them smaller."""
    return here["up"] != "after"


def is_attention_right(here: Case) -> bool:
    """Whether the devices' outputs, merged on one of them, are those of helix attention."""
    here, found, arguments = helix_attention.shared_output(here)
    helix, (q, cache) = helix_of(here), arguments[:2]
    heads = P(KVP, None, None, TPA), P(KVP, None, None, TPA)

    def body(q: Array, cache: Cache) -> tuple[Array, Array]:
        return jax.tree.map(lambda x: x[None], own_attention(here, q, cache))

    outs, lses = on_mesh(helix, body, specs_of(here, (q, cache)), out=heads)(q, cache)
    whole, _ = merge_attention(*map(jnp.asarray, jax.device_get((outs, lses))))
    for up in jax.device_get(arguments[2:]):
        whole = jnp.einsum("btnv,nvh->btnh", whole, jnp.asarray(up))
    return np.allclose(*(np.asarray(x, np.float32) for x in (found, whole)), atol=0.01, rtol=0.03)


def payload(here: Case) -> tuple[Array]:
    """What each rank of KVP has for the others, random: ``[KVP, B, T, N, H']``."""
    helix, (q, *rest) = helix_of(here), operands(here | {"S": here["kvp"] * 16})
    size = rest[0].specs[0].value_size
    if here["latent"] and projects_first(here):
        size = rest[1].shape[2]
    shape = (helix.kvp, *q.shape[:3], size)
    place = helix.sharding(KVP, None, None, TPA)
    draw = partial(jax.random.normal, shape=shape, dtype=q.dtype)
    return (jax.jit(draw, out_shardings=place)(jax.random.key(1)),)


def exchanged(helix: HelixConfig, x: Array) -> tuple[Array, Array]:
    """On a device: the exchange of ``x[0]``, with a number of each head as its log-sum-exp."""
    return all_to_all(x[0], x[0, ..., 0].astype(jnp.float32), helix.kvp_axes)


def message_following(here: Case, x: Array) -> Array:
    """A payload that depends on the one before."""
    return x + as_queries(exchanged(helix_of(here), x)[0], x[0])[None] / 1024


def is_message_right(here: Case) -> bool:
    """Whether the exchange is to the bit the merge of the same parts on one device."""
    helix, (x,) = helix_of(here), payload(here)
    heads = P(None, None, helix.axes)
    run = on_mesh(helix, partial(exchanged, helix), (P(KVP, None, None, TPA),), out=(heads, heads))
    parts = jnp.asarray(jax.device_get(x))
    right = jax.jit(merge_attention)(parts, parts[..., 0].astype(jnp.float32))
    return all(map(np.array_equal, jax.device_get(run(x)), jax.device_get(right)))


def are_chunks_right(here: Case) -> bool:
    """Whether the output is right, and to the bit that of one chunk."""
    small, found, arguments = helix_attention.shared_output(here)
    if not helix_attention.is_of_one_device(small, found, arguments):
        return False
    if here["overlap"] == 1:
        return True
    return np.array_equal(found, helix_attention.shared_output(here | {"overlap": 1})[1])


def _add_exposed(rows: list[point.Row]) -> None:
    """Give the rows of chunks the nanoseconds of the message that they expose, and its share."""
    times = {own["name"]: point.spread(own, "step") for own in rows}
    alone, message = times.get(ALONE), times.get(MESSAGE)
    for own in rows:
        found = times[own["name"]]
        if alone and message and found and own["name"] not in (ALONE, MESSAGE):
            own["exposed_ns"] = round(1e3 * (found.median - alone.median))
            own["message_ns"] = round(1e3 * message.median)


def cells(own: point.Row) -> tuple[str, ...]:
    """Median and spread of the step, what is exposed, and that over the message alone."""
    found = point.spread(own, "step")
    if found is None:
        return own.get("reason") or "not timed", "", "", ""
    times = number(found.median), f"{number(found.low)}-{number(found.high)}"
    if "exposed_ns" not in own:
        return *times, "", ""
    exposed, message = own["exposed_ns"], own["message_ns"]
    return *times, number(exposed / 1e3), f"{exposed / message:.0%}" if message > 0 else ""


def place(own: point.Row) -> tuple[str, ...]:
    """The case of a row, and its name."""
    case = own["case"] | {"S": kilo(own["case"]["S"])}
    return *(str(case[key]) for key in COLUMNS), own["name"]


HEADINGS = (*COLUMNS, "name", "step us", "p10-p90", "exposed us", "of message")


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['machine']['device']}; marginal time in a jitted loop", box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for own in result["rows"]:
        table.add_row(*place(own), *cells(own))
    console().print(table)


SUITE = Suite(
    "hopb",
    "what of a layer's exchange is exposed, by the number of chunks, beside the message alone",
    run,
    show,
    own_clocks=True,
    case=case,
)
