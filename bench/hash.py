"""Hash codes of a decoding step: encoding, encoding with the cache update, scores, and selection.

Also the scores of another kind of code, buckets in hash tables (MagicPIG).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import attention, cases, ceilings, point, regret, table, workload
from bench.cases import Case, heads
from bench.program import bound, chosen, compile_all, shapes, sources
from bench.select import expected
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.dispatch import Operation
from jspec.ops.append import APPEND_ENCODE, QKRope
from jspec.ops.collisions import COLLISION_SCORES, LEAST, code_words
from jspec.ops.hash import HAMMING_SCORES, HASH_ENCODE
from jspec.ops.hash_selection import HASH_SELECT
from jspec.policies import MagicPIG

COLUMNS = ("B", "S", "n", "heads", "T", "R", "part")
DEFAULT: Case = {"B": 8, "S": 32768, "n": 512, "heads": "32/32", "H": 128, "T": 1, "R": 128}
BYTES = (
    "of encoding, also into the column, the weights; of scoring the codes and 4 bytes a score; of "
    "selecting the codes and 4 bytes a slot; of collisions the codes and 4 bytes a score"
)
Check = Callable[[Any], bool]


def case(text: str) -> Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    case = cases.parse(text, DEFAULT)
    if case["R"] not in (32, 64, 128, 256) or case["n"] > case["S"]:
        raise ValueError(f"{text}: R must be 32, 64, 128 or 256, and n at most S")
    return case


def grid(settings: Settings) -> list[Case]:
    """The requested cases, or the suite's defaults."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    if jax.default_backend() != "gpu":
        return [case("B=1,S=8K,n=128,heads=8/2")]
    some = ("S=32K", "S=32K,heads=32/8")
    whole = (*some, "B=1,S=256K,n=4K", "B=1,S=128K,n=2K,heads=32/8", "S=32K,R=256")
    return [case(text) for text in (some if settings.quick else whole)]


def run(settings: Settings) -> dict[str, Any]:
    return {"ceilings": ceilings.rows(settings), "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    policy, collided = MagicPIG(), []
    with bar("hash", len(grid(settings))) as advance:
        for case in grid(settings):
            yield from _encoded(case, settings)
            yield from _appended(case, settings)
            yield from _scored(case, settings)
            case_of_tables = {**case, "R": policy.tables * policy.bits}
            if case_of_tables not in collided:  # cases that differ only in R are the same here
                yield from _collided(case_of_tables, policy, settings)
                collided.append(case_of_tables)
            advance()


def _vectors(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and matrices of small whole numbers: sums are exact in any order."""
    query_heads, kv_heads = heads(case)
    rng = np.random.default_rng([workload.SEED, case["B"], query_heads])
    lead, size = (case["B"], case["T"]), case["H"]
    sizes = (*lead, query_heads, size), (*lead, kv_heads, size), (kv_heads, size, case["R"])
    q, k, w = (rng.integers(-3, 4, shape).astype(np.float32) for shape in sizes)
    return q, k, w


def _codes(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The codes of ``x [B, T, N, H]``, uint32 ``[B, T, N, R // 32]``."""
    sums = np.einsum("btnh,nhr->btnr", x, np.repeat(w, x.shape[2] // len(w), axis=0))
    return np.packbits(sums > 0, axis=-1, bitorder="little").view("<u4")


def _encoded(case: Case, settings: Settings) -> list[point.Row]:
    q, k, w = _vectors(case)
    want = _codes(q, w), _codes(k, w)
    arguments = tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, w))
    return _measured(
        "encode",
        HASH_ENCODE,
        case,
        arguments,
        lambda out: all(map(np.array_equal, out, want)),
        arguments[2].nbytes,
        settings,
    )


def _appended(case: Case, settings: Settings) -> list[point.Row]:
    """Rows of encoding new keys while they are written into a cache that they fill.

    Its columns are not donated: each run copies them first.
    """
    q, k, w = _vectors(case)
    batch, tokens, kv_heads, size = k.shape
    key_codes = _codes(k, w)
    # Matrices are float32 in a policy.
    half, codes = jnp.bfloat16, jnp.zeros((batch, tokens, kv_heads, case["R"] // 32), jnp.uint32)
    parts = [x.reshape(batch, tokens, kv_heads, -1) for x in (q, k, k)]
    joined = jnp.asarray(np.concatenate(parts, axis=-1), half)
    straight = jnp.ones((batch, tokens, 1, size // 2), jnp.float32)
    qk_rope = QKRope(straight, jnp.zeros_like(straight), joined=joined)
    q, k = jnp.asarray(q, half), jnp.asarray(k, half)
    empty, slots = jnp.zeros_like(k), jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    want = (*map(np.asarray, (q, k, k)), key_codes)
    return _measured(
        "append",
        APPEND_ENCODE,
        case,
        (q, k, k, qk_rope, empty, empty, codes, jnp.asarray(w), slots),
        lambda out: all(map(np.array_equal, out, want)),
        w.nbytes,
        settings,
    )


def _scored(case: Case, settings: Settings) -> Iterator[point.Row]:
    (query_heads, kv_heads), batch, slots = heads(case), case["B"], case["S"]
    words, keys = case["R"] // 32, jax.random.split(jax.random.key(workload.SEED))
    q = jax.random.bits(keys[0], (batch, case["T"], query_heads, words), jnp.uint32)
    k = jax.random.bits(keys[1], (batch, slots, kv_heads, words), jnp.uint32)
    want = scores_of(np.asarray(q), np.asarray(k))
    lengths = jnp.full((batch,), slots, jnp.int32)
    yield from _measured(
        "score",
        HAMMING_SCORES,
        case,
        (q, k, lengths, None),
        lambda out: np.array_equal(out, want),
        k.nbytes + want.nbytes,
        settings,
    )
    count = case["n"]
    selected = expected(want.reshape(-1, slots), count).reshape(batch, kv_heads, count)
    rows = (jnp.full((batch, kv_heads), x, jnp.int32) for x in (count, slots))
    yield from _measured(
        "select",
        HASH_SELECT,
        case,
        (q, k, *rows),
        lambda out: np.array_equal(out, selected),
        k.nbytes + selected.nbytes,
        settings,
        **static(case),
    )


def _collided(case: Case, policy: MagicPIG, settings: Settings) -> list[point.Row]:
    """Rows of collision scores of random buckets: a query collides with about one key in 100."""
    (query_heads, kv_heads), batch, tables = heads(case), case["B"], policy.tables
    used = used_bits(policy).reshape(1, 1, 1, -1)
    keys = jax.random.split(jax.random.key(workload.SEED))
    q, k = (
        jax.random.bits(key, (batch, *sizes, used.size), jnp.uint32) & used
        for key, sizes in zip(keys, ((case["T"], query_heads), (case["S"], kv_heads)), strict=True)
    )
    want = collisions_of(np.asarray(q), np.asarray(k), tables)
    return _measured(
        "collide",
        COLLISION_SCORES,
        case,
        (q, k, jnp.full((batch,), case["S"], jnp.int32)),
        lambda out: np.array_equal(out, want),
        k.nbytes + want.nbytes,
        settings,
        tables=tables,
    )


def used_bits(policy: MagicPIG) -> np.ndarray:
    """Mask of the bits of a code's words that belong to a table, uint32 ``[W]``."""
    places = np.arange(code_words(policy.tables, 1) * 32).reshape(-1, 32) < policy.tables
    words = np.packbits(places, axis=1, bitorder="little").view("<u4")
    return np.repeat(words, policy.bits)


def collisions_of(q: np.ndarray, k: np.ndarray, tables: int) -> np.ndarray:
    """The number of tables in which keys share a bucket with their queries, ``[B, K, S]``."""
    batch, slots, kv_heads, words = k.shape
    groups = code_words(tables, 1)
    q = q.reshape(batch, q.shape[1], kv_heads, -1, groups, words // groups)
    k = k.reshape(batch, slots, kv_heads, groups, words // groups)
    scores = np.zeros((batch, kv_heads, slots), np.int32)
    for row, token, one in np.ndindex(batch, q.shape[1], q.shape[3]):
        differ = np.bitwise_or.reduce(k[row] ^ q[row, token, :, one], axis=-1)
        met = tables - np.bitwise_count(differ).sum(axis=-1, dtype=np.int32)
        scores[row] += np.where(met >= LEAST, met, 0).T
    return np.where(scores > 0, scores, -1)


def static(case: Mapping[str, Any]) -> dict[str, Any]:
    """The static arguments of the backends of `jspec.ops.hash_select`."""
    return {"k": case["n"], "sinks": 0, "recent": 0}


def scores_of(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The bits that keys share with the queries that read them, int32 ``[B, K, S]``."""
    batch, slots, kv_heads, words = k.shape
    q = q.reshape(batch, q.shape[1], kv_heads, -1, words)
    scores = np.zeros((batch, kv_heads, slots), np.int32)
    for token in range(q.shape[1]):
        for one in range(q.shape[3]):
            shared = np.bitwise_count(~(k ^ q[:, token, None, :, one]))
            scores += np.swapaxes(shared.sum(axis=-1, dtype=np.int32), 1, 2)
    return scores


def _measured(
    part: str,
    operation: Operation,
    case: Case,
    arguments: tuple[Any, ...],
    right: Check,
    moved: int,
    settings: Settings,
    **static: Any,
) -> list[point.Row]:
    best = chosen(operation, arguments, **static)
    by_backend = sources(operation, shapes(arguments), settings, **static)
    programs = [
        bound(name, program, arguments, right, chosen=name == best)
        for name, program in compile_all(part, by_backend).items()
    ]
    where = {**case, "part": part}
    clock = attention.clock()
    return point.measure(operation.name, where, programs, settings, moved=moved, **clock)


def floor(result: Mapping[str, Any]) -> table.Floor:
    """The read ceiling that rows are compared with."""
    return table.Floor(ceilings.bandwidth(result["ceilings"], "read"), BYTES)


def show(result: dict[str, Any]) -> None:
    table.show(result, COLUMNS, floor(result))
    regret.show(result["rows"])


SUITE = Suite(
    "hash",
    "hash codes of a decoding step: encoding, also as keys are written, scores, and selection; "
    "collisions of buckets",
    run,
    show,
    (HASH_ENCODE, APPEND_ENCODE, HAMMING_SCORES, HASH_SELECT, COLLISION_SCORES),
    case=case,
)
