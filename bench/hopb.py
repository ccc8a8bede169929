"""HOP-B: how much of a layer's exchange is exposed, by the number of chunks that it goes in.

Rows are attention with its exchange, the same attention without it, and the message alone. The
exposed time of a number of chunks is its time above that of attention alone. One-sided exchanges
have one chunk.
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
from bench.caches import DTYPE
from bench.cases import Case, kilo
from bench.helix_attention import (
    LATENT,
    RANK_HEADS,
    as_queries,
    attended,
    following,
    helix_of,
    is_merged_right,
    is_near,
    operands,
    projects_first,
    rank_attended,
    rank_following,
    specs_of,
)
from bench.mesh import Shared, measure
from bench.settings import Settings, console
from bench.suite import Suite
from bench.table import number
from jspec.helix import HelixConfig
from jspec.helix.attention import all_to_all_merge
from jspec.helix.mesh import KVP, TPA
from jspec.ops.all_to_all import By, takes
from jspec.ops.attention.merge import merge_attention
from jspec.typing import Array

SIZES = ("B", "S", "heads", "H", "T", "kvp", "tpa", "latent", "up")
DEFAULT: Case = {name: helix_attention.DEFAULT[name] for name in SIZES} | {"B": 8, "kvp": 2}
COLUMNS = ("B", "S", "heads", "T", "kvp", "tpa", "latent")
ALONE, MESSAGE = "attention alone", "message alone"
ONE_SIDED: tuple[By, ...] = ("pallas", "cuda")


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT)
    if case["kvp"] < 2:
        raise ValueError(f"kvp={case['kvp']} must be 2 or more, for something to exchange")
    helix_attention.case(",".join(f"{key}={value}" for key, value in case.items() if value))
    return case


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or those of two devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        return [case("B=2,S=256,heads=8/2,H=32")]
    sizes = ("B=8,S=32K",) if settings.quick else ("B=8,S=128K", "B=32,S=32K")
    return [case(f"{size},{kind}") for size in sizes for kind in ("heads=128/8", LATENT)]


def chunks_of(case: Case) -> list[int]:
    """Numbers of chunks: 1, 2, 4, ... up to B."""
    return [2**i for i in range(case["B"].bit_length()) if 2**i <= case["B"]]


def run(settings: Settings) -> dict[str, Any]:
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    for rows in measure("hopb", [_group(case) for case in grid(settings)], settings):
        _add_exposed(rows)
        yield from rows


def _group(case: Case) -> list[Shared]:
    """The rows of a case."""
    whole = case | {"strategy": "helix", "part": "layer", "overlap": 1, "exchange": "xla"}
    alone = _shared(
        *(case, ALONE, whole, rank_attended, rank_following, is_merged_right),
        out=(RANK_HEADS, RANK_HEADS),
    )
    outputs: list[np.ndarray] = []  # output of one chunk, which runs before more chunks
    one_sided = {by: whole | {"exchange": by} for by in ONE_SIDED if takes(by, piece_bytes(whole))}
    ways = {"1 chunk" if n == 1 else f"{n} chunks": whole | {"overlap": n} for n in chunks_of(case)}
    ways |= {f"1 chunk, {by}": how for by, how in one_sided.items()}
    chunks = [
        _shared(
            *(case, name, how, attended, following, partial(are_chunks_right, outputs)),
            out=P(None, None, helix_of(whole).axes),
        )
        for name, how in ways.items()
    ]
    messages = [_message(case, f"{MESSAGE}, {by}", how) for by, how in one_sided.items()]
    return [alone, _message(case, MESSAGE, whole), *messages, *chunks]


def _shared(
    case: Case,
    name: str,
    whole: Case,
    body: Callable[..., Any],
    following: Callable[..., Any],
    is_right: Callable[..., bool],
    out: Any,
) -> Shared:
    """A row of the attention of ``whole``, the complete case of ``case``."""
    helix = helix_of(whole)
    return Shared(
        *("exchange", case, name, helix, partial(body, whole), partial(following, whole)),
        *(partial(specs_of, whole), partial(operands, whole), partial(is_right, whole)),
        out=out,
        moved=_moved(helix),
    )


def _message(case: Case, name: str, whole: Case) -> Shared:
    helix = helix_of(whole)
    return Shared(
        *("exchange", case, name, helix, partial(exchanged, helix)),
        partial(message_following, whole),
        lambda _: (RANK_HEADS,),
        partial(payload, whole),
        is_message_right,
        out=(P(None, None, helix.axes), P(None, None, helix.axes)),
        moved=_moved(helix),
    )


def _moved(helix: HelixConfig) -> Callable[[tuple[Any, ...]], int]:
    return lambda arguments: sum(x.nbytes for x in jax.tree.leaves(arguments[:2])) // helix.devices


def payload(case: Case) -> tuple[Array]:
    """Random messages of each rank of KVP: ``[KVP, B, T, N, H']``."""
    helix, (q, *rest) = helix_of(case), operands(case | {"S": case["kvp"] * 16})
    size = rest[0].specs[0].value_size
    if case["latent"] and projects_first(case):
        size = rest[1].shape[2]
    shape = (helix.kvp, *q.shape[:3], size)
    place = helix.sharding(KVP, None, None, TPA)
    draw = partial(jax.random.normal, shape=shape, dtype=q.dtype)
    return (jax.jit(draw, out_shardings=place)(jax.random.key(1)),)


def piece_bytes(case: Case) -> int:
    """Bytes that a rank sends to another: its heads, each with a float32 log-sum-exp."""
    size = case["latent"] // (4 if projects_first(case) else 1) or case["H"]
    share = cases.heads(case)[0] // helix_of(case).devices
    return case["B"] * case["T"] * share * (size * jnp.dtype(DTYPE).itemsize + 4)


def exchanged(helix: HelixConfig, x: Array) -> tuple[Array, Array]:
    """On a device: the exchange of ``x[0]``, with a number of each head as its log-sum-exp."""
    lse = x[0, ..., 0].astype(jnp.float32)
    return all_to_all_merge(x[0], lse, helix.kvp_axes, helix.exchange)


def message_following(case: Case, x: Array) -> Array:
    """A payload that depends on the one before."""
    return x + as_queries(exchanged(helix_of(case), x)[0], x[0])[None] / 1024


def is_message_right(outputs: tuple[Array, Array], arguments: tuple[Array]) -> bool:
    """Whether the exchange is the merge of the same parts on one device."""
    parts = jnp.asarray(jax.device_get(arguments[0]))
    right = jax.jit(merge_attention)(parts, parts[..., 0].astype(jnp.float32))
    return is_near(*(np.asarray(x[0]) for x in (outputs, right)))


def are_chunks_right(
    outputs: list[np.ndarray], case: Case, out: Array, arguments: tuple[Any, ...]
) -> bool:
    """Whether the output is right, or equal to that of one chunk, stored in ``outputs``."""
    actual = np.asarray(out)
    if case["overlap"] == 1:
        is_right = helix_attention.is_right(case, out, arguments)
        outputs[:] = [actual] if is_right else []
        return is_right
    return len(outputs) == 1 and is_near(actual, outputs[0])


def _add_exposed(rows: list[point.Row]) -> None:
    """Add the exposed nanoseconds and those of the message alone to the rows of chunks."""
    times = {row["name"]: point.spread(row, "step") for row in rows}
    alone = times.get(ALONE)
    for row in rows:
        step, name = times[row["name"]], row["name"]
        message = times.get(MESSAGE + name.removeprefix("1 chunk")) or times.get(MESSAGE)
        if alone and message and step and not name.startswith((ALONE, MESSAGE)):
            row["exposed_ns"] = round(1e3 * (step.median - alone.median))
            row["message_ns"] = round(1e3 * message.median)


def cells(row: point.Row) -> tuple[str, ...]:
    """Median and spread of the step, what is exposed, and that over the message alone."""
    step = point.spread(row, "step")
    if step is None:
        return row.get("reason") or "not timed", "", "", ""
    times = number(step.median), f"{number(step.low)}-{number(step.high)}"
    if "exposed_ns" not in row:
        return *times, "", ""
    exposed, message = row["exposed_ns"], row["message_ns"]
    return *times, number(exposed / 1e3), f"{exposed / message:.0%}" if message > 0 else ""


def place(row: point.Row) -> tuple[str, ...]:
    """The case of a row, and its name."""
    case = row["case"] | {"S": kilo(row["case"]["S"])}
    return *(str(case[key]) for key in COLUMNS), row["name"]


HEADINGS = (*COLUMNS, "name", "step us", "p10-p90", "exposed us", "of message")


def show(result: dict[str, Any]) -> None:
    table = Table(title=f"{result['machine']['device']}; marginal time in a jitted loop", box=None)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "name" else "right")
    for row in result["rows"]:
        table.add_row(*place(row), *cells(row))
    console().print(table)


SUITE = Suite(
    "hopb",
    "what of a layer's exchange is exposed, by the number of chunks, against the message alone",
    run,
    show,
    custom_clocks=True,
    case=case,
)
