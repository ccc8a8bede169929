"""Attention over a cache, over a selection of it, and with scores of its keys.

Every backend and the rivals, as shares of the read ceiling. A selection is read in place: a copy of
it, read as a dense cache, is faster from the 54th read on at B=8, n=8K of 128K, T=1 on an H200, and
never in the three other cases that were measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import workload
from bench.caches import CACHES, TOLERANCE, Check, bytes_of, dense, random_cache
from bench.cases import Case, heads, product
from bench.paged import IN_BLOCKS
from bench.program import reference
from bench.rivals import attention as rivals
from bench.suite import OperationBenchmark, Setup, suite_of
from jspec.ops.append import QKRope
from jspec.ops.attention.appended import APPEND_ATTEND
from jspec.ops.attention.dense import ATTENTION
from jspec.ops.attention.gathered import GATHERED
from jspec.ops.attention.scored import SCORED
from jspec.ops.attention.weights import WEIGHTS
from jspec.typing import Array

DEFAULT: Case = {
    "B": 8,
    "S": 32768,
    "heads": "32/8",
    "H": 128,
    "T": 1,
    "cache": "bfloat16",
    "lengths": "full",
}
# Table 2 of Yue et al. 2026: a selection in runs of so many slots, by their name.
PAGES = {f"pages-{size}": size for size in (2, 4, 8, 16)}
CHOICES = {
    "cache": CACHES,
    "lengths": ("full", "ragged"),
    "indices": ("shared", "per-head", *PAGES),
}


def attention_setup(case: Case) -> Setup:
    """Attention of the T newest tokens over a cache of S slots."""
    inputs = dense(case)
    arguments = inputs.q, inputs.k, inputs.v, inputs.positions
    check = Check(*reference(ATTENTION, arguments, **static(case)))
    return Setup(
        arguments,
        check.both,
        bytes_of(int(inputs.lengths.sum()), case),
        static(case),
        rivals.attention(inputs, check.output) if _of_16_bits(case) else {},
    )


def static(case: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the backends of `jspec.ops.attention`."""
    options = ("key_positions", "window", "softcap", "value_size")
    return {**dict.fromkeys(options), "scale": case["H"] ** -0.5}


@dataclasses.dataclass(frozen=True)
class Selected:
    """``q [B, T, N, H]``; ``k``, ``v [B, S, K, H]``; ``positions`` int32 ``[B, T]``, the last ones
    of the cache; ``selected`` int32 ``[B, n]`` or ``[B, K, n]``, slots below ``context_len [B]``;
    ``tail`` int32 ``[B, T]``, the slots of the queries themselves."""

    q: Array
    k: Array
    v: Array
    positions: Array
    selected: Array
    tail: Array
    context_len: Array

    @property
    def arguments(self) -> tuple[Array, ...]:
        """Of the backends of `jspec.ops.gathered_attention`."""
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def selected_inputs(case: Mapping[str, Any]) -> Selected:
    """A selection in random order; values not selected, and the last selected one, are large.

    Pages are in random order, the slots of a page one after another.
    """
    batch, slots, tokens, count = case["B"], case["S"], case["T"], case["n"]
    lists = heads(case)[1] if case["indices"] == "per-head" else 1
    page = PAGES.get(case["indices"], 1)
    rng = np.random.default_rng([workload.SEED, batch, slots, count])
    pages, chosen = (slots - tokens) // page, count // page
    drawn = [rng.choice(pages, chosen, replace=False) for _ in range(batch * lists)]
    slots_of = page * np.array(drawn, np.int32)[..., None] + np.arange(page, dtype=np.int32)
    selected = slots_of.reshape(batch, lists, count)
    large = np.ones((batch, lists, slots), bool)
    np.put_along_axis(large, selected[..., :-1], False, axis=2)
    q, k, v = random_cache(case, np.swapaxes(large, 1, 2), np.full(batch, count + tokens))
    newest = np.broadcast_to(np.arange(slots - tokens, slots, dtype=np.int32), (batch, tokens))
    if case["indices"] != "per-head":
        selected = selected[:, 0]
    context_len = np.full(batch, slots - tokens, np.int32)
    return Selected(q, k, v, *map(jnp.asarray, (newest, selected, newest, context_len)))


def gathered_setup(case: Case) -> Setup:
    """Attention over n selected slots and the T newest ones."""
    data = selected_inputs(case)
    options = ("counts", "log_weights", "softcap", "value_size")
    static = {**dict.fromkeys(options), "scale": case["H"] ** -0.5}
    check = Check(*reference(GATHERED, data.arguments, **static))
    return Setup(
        data.arguments,
        check.both,
        bytes_of(case["B"] * (case["n"] + case["T"]), case) + data.selected.nbytes,
        static,
        rivals.gathered_attention(data, check.output) if _of_16_bits(case) else {},
    )


def appended_setup(case: Case) -> Setup:
    """Attention of a new token over n selected slots and its own, into which it is written."""
    case = case | {"T": 1, "cache": "bfloat16"}
    data, (_, kv_heads) = selected_inputs(case), heads(case)
    size, group = case["H"], heads(case)[0] // kv_heads
    keys = jax.random.split(jax.random.key(workload.SEED))
    shape = (case["B"], 1, kv_heads, (group + 2) * size)
    joined = jax.random.normal(keys[0], shape, jnp.bfloat16)
    q, k, v = jnp.split(joined, [group * size, (group + 1) * size], axis=-1)
    q = q.reshape(case["B"], 1, -1, size)
    angles = jax.random.normal(keys[1], (case["B"], 1, 1, size // 2))
    qk_rope = QKRope(jnp.cos(angles), jnp.sin(angles), joined=joined)
    arguments = q, k, v, qk_rope, *data.arguments[1:]
    static = {"scale": size**-0.5, "softcap": None}

    turned, key = qk_rope(q, k)
    rows, slots = np.arange(case["B"])[:, None], data.positions
    columns = [x.at[rows, slots].set(new) for x, new in ((data.k, key), (data.v, v))]
    unused = dict.fromkeys(("counts", "log_weights", "value_size"))
    attended = (turned, *columns, *data.arguments[3:])
    check = Check(*reference(GATHERED, attended, **static, **unused))
    is_near = jax.jit(functools.partial(jnp.allclose, rtol=TOLERANCE))

    def is_right(outputs: Any) -> bool:
        pairs = zip(outputs[2:], columns, strict=True)
        return check.both(outputs) and all(bool(is_near(x, y)) for x, y in pairs)

    read = bytes_of(case["B"] * (case["n"] + 1), case)
    moved = read + data.selected.nbytes + joined.nbytes
    return Setup(arguments, is_right, moved, static, in_place={2: 4, 3: 5})


def _of_16_bits(case: Case) -> bool:
    """Whether rivals take the cache, whose dtype must be that of the queries."""
    return case.get("cache", "bfloat16") == "bfloat16"


def scored_setup(case: Case) -> Setup:
    """Attention that also scores every key by the mean query of its KV head (Vegas)."""
    inputs = dense(case)
    q, k = inputs.q, inputs.k
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    probe = grouped.astype(jnp.float32).mean(axis=(1, 3)).astype(q.dtype)
    arguments = q, k, inputs.v, inputs.positions, probe
    *expected, scores = reference(SCORED, arguments, **static(case))
    check, scores_check = Check(*expected), near(scores)
    return Setup(
        arguments,
        lambda outputs: check.both(outputs) and scores_check(outputs[2]),
        bytes_of(int(inputs.lengths.sum()), case) + _score_bytes(case),
        static(case),
    )


def weights_setup(case: Case) -> Setup:
    """The softmax weight of every key in the mean over queries (SpecExtend)."""
    inputs, options = dense(case), {"scale": case["H"] ** -0.5, "softcap": None}
    attended = inputs.q, inputs.k, inputs.v, inputs.positions
    _, lse = reference(ATTENTION, attended, **static(case))
    arguments = inputs.q, inputs.k, jnp.asarray(lse)
    return Setup(
        arguments,
        near(reference(WEIGHTS, arguments, **options)),
        bytes_of(case["B"] * case["S"], case) // 2 + _score_bytes(case),
        options,
    )


def _score_bytes(case: Case) -> int:
    return 4 * case["B"] * case["S"] * heads(case)[1]


def near(expected: np.ndarray) -> Callable[[Any], bool]:
    """A check that scores ``[B, K, S]`` are within `TOLERANCE` of their norm."""

    def check(scores: Any) -> bool:
        error = np.linalg.norm(np.asarray(scores, np.float32) - expected)
        return bool(error <= TOLERANCE * np.linalg.norm(expected))

    return check


def checked(case: Case) -> Case:
    """The case; raises `ValueError` where the shortest row has fewer slots than queries."""
    shortest = case["S"] if case.get("lengths") != "ragged" else case["S"] // 4
    if case["T"] > shortest:
        raise ValueError(f"T={case['T']} must be at most {shortest}, the shortest row's slots")
    if case.get("n", 0) + case["T"] > case["S"]:
        raise ValueError(f"n={case['n']} and T={case['T']} must fit into S={case['S']}")
    page = PAGES.get(case.get("indices", ""), 1)
    if case.get("n", 0) % page:
        raise ValueError(f"n={case['n']} must be a multiple of {page} for {case['indices']}")
    return case


def _of_one_token(case: Case) -> Case:
    checked(case | {"T": 1})
    return case


CONTEXTS = product(B=(4,), S=("2K", "4K", "8K", "16K", "32K", "64K", "128K", "256K"))
SMALL_MODELS = [  # SmolLM2-135M's heads, then those of Qwen2.5-0.5B
    *product(B=(1, 8, 96), S=("7K",), heads=("9/3",), H=(64,), T=(1, 6)),
    *product(B=(1, 8, 64), S=("30K",), heads=("14/2",), H=(64,), T=(1, 6)),
]
# What a device of a mesh has of a row or a few: so few heads that orders of whole models mislead.
ON_A_MESH = [
    *product(B=(1, 4), S=("256K",), heads=("8/1",), T=(1, 10)),
    *product(B=(1,), S=("1024K",), heads=("8/1",), T=(1,)),
]
SMALL_SELECTIONS = [  # at 7 % of the context, as Vegas selects
    *product(B=(12, 96), S=("7K",), n=(512,), heads=("9/3",), H=(64,)),
    *product(B=(12,), S=("2K",), n=(144,), heads=("9/3",), H=(64,)),
    *product(B=(16, 64), S=("30K",), n=("2K",), heads=("14/2",), H=(64,)),
    *product(B=(64,), S=("8K",), n=(576,), heads=("16/8",)),
    *product(B=(64,), S=("8K",), n=(576,), heads=("32/8",), H=(64,)),
    # HATA selects for each KV head.
    *product(B=(12, 96), S=("7K",), n=(560,), heads=("9/3",), H=(64,), indices=("per-head",)),
    *product(B=(16, 64), S=("30K",), n=(2200,), heads=("14/2",), H=(64,), indices=("per-head",)),
]
SCORED_DEFAULT = {key: DEFAULT[key] for key in ("B", "S", "heads", "H", "T", "cache")}
EIGHT_BITS = product(B=(4,), S=("128K",), T=(1, 10), cache=("float8_e4m3fn",))
SCORED_CASES = [
    *product(B=(4,), S=("128K",), heads=("32/8",), T=(2, 6, 10, 16)),
    *product(B=(4,), S=("128K",), heads=("64/8",), H=(64,), T=(2, 6, 10, 16)),
    *product(B=(1,), S=("256K",), heads=("8/1",), T=(6,)),
    *product(B=(1, 16), S=("30K",), heads=("14/2",), H=(64,), T=(6,)),
    *EIGHT_BITS[1:],
]


def _scored(operation: Any, setup: Callable[[Case], Setup]) -> OperationBenchmark:
    return OperationBenchmark(
        operation=operation,
        setup=lambda case: setup(case | {"lengths": "full"}),
        default=SCORED_DEFAULT,
        choices=CHOICES,
        complete=checked,
        gpu=SCORED_CASES,
        quick=SCORED_CASES[:1],
        cpu=product(B=(1,), S=("2K",), heads=("8/2",), H=(64,), T=(2, 8)),
    )


SUITE = suite_of(
    "attention",
    "attention over a cache, over a selection of it, and with scores of its keys: every backend, "
    "cuDNN, PyTorch, FlashAttention-3, FlashInfer",
    OperationBenchmark(
        operation=ATTENTION,
        setup=attention_setup,
        rivals=rivals.NAMES,
        default=DEFAULT,
        choices=CHOICES,
        complete=checked,
        gpu=[
            *("B=8,heads=32/32", "B=8", "B=4,S=128K,T=10", "B=1,S=256K", "B=1,S=128K,T=10"),
            *("B=8,heads=64/8,H=64,T=12", "B=8,S=64K,lengths=ragged", "B=1,S=8K", "B=32,S=8K"),
            *("B=32,S=8K,T=10", *CONTEXTS, *product(B=(4,), T=(2, 4, 8, 10, 16))),
            *SMALL_MODELS,
            *ON_A_MESH,
            *EIGHT_BITS,
        ],
        quick=["B=8", "B=4,S=128K,T=10", "B=8,S=64K,lengths=ragged", "B=1,S=8K"],
        cpu=["B=1,S=2K", "B=1,S=8K", "B=1,S=8K,T=10", "B=4,S=2K,lengths=ragged"],
    ),
    OperationBenchmark(
        operation=GATHERED,
        setup=gathered_setup,
        rivals=rivals.GATHERED,
        default={
            **{key: DEFAULT[key] for key in ("B", "heads", "H", "T", "cache")},
            "S": 131072,
            "n": 8192,
            "indices": "shared",
        },
        choices=CHOICES,
        complete=checked,
        gpu=[
            *("", "T=10", "S=32K,n=512,heads=32/32,indices=per-head", "S=32K,n=2K"),
            *SMALL_SELECTIONS,
            *product(B=(16,), indices=("shared", *PAGES), heads=("32/8",)),
            *product(B=(16,), indices=("shared", *PAGES), heads=("64/8",), H=(64,)),
            "cache=float8_e4m3fn",
        ],
        quick=["", "T=10", "S=32K,n=512,heads=32/32,indices=per-head"],
        cpu=["B=1,S=8K,n=512", "B=1,S=8K,n=512,heads=32/32,indices=per-head"],
    ),
    OperationBenchmark(
        operation=APPEND_ATTEND,
        setup=appended_setup,
        default={"B": 64, "S": 30720, "heads": "14/2", "H": 64, "n": 2048, "indices": "shared"},
        choices=CHOICES,
        complete=_of_one_token,
        gpu=[
            *product(B=(1, 16, 64)),
            *product(B=(12, 96), S=("7K",), heads=("9/3",), n=(512,)),
            *product(B=(64,), S=("8K",), heads=("16/8",), H=(128,), n=(576,)),
            *product(B=(4,), S=("120K",), heads=("32/8",), H=(128,), n=("8K",)),
        ],
        quick=["B=16"],
        cpu=product(B=(1,), S=("2K",), n=(144,)),
    ),
    _scored(SCORED, scored_setup),
    _scored(WEIGHTS, weights_setup),
    IN_BLOCKS,
)
