"""Whole steps on a KVP x TPA mesh: Helix against tensor parallelism, plain and speculative.

Weights, keys and values are random. The tokens that a mesh decodes are held against those of one
device, greedily, before anything is timed. Clock: *step* is the marginal wall time of a jitted
chunk of steps among chunks that follow each other, over its steps.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.markup import escape
from rich.table import Table

from bench import cases, clocks, point
from bench.cases import Case, kilo
from bench.decode import catalogue
from bench.decode.running import CHUNKS, REPEATS, Loop, device_bytes, memory_of, too_large
from bench.decode.shapes import noise, random_model
from bench.decode.tables import compare
from bench.program import failure
from bench.settings import Settings, bar, console
from bench.suite import Suite
from bench.table import times
from jspec.cache import Striped
from jspec.config import ModelConfig, SamplingParams
from jspec.decode.draft.named import named_draft
from jspec.decode.prefill import rounded_capacity, start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState
from jspec.decode.step import decode_chunk
from jspec.helix import HelixConfig, shard
from jspec.helix.sharded import decoder_sharding
from jspec.models.decoder import Decoder
from jspec.policies.attend import dense_attend
from jspec.typing import Array

COLUMNS = ("shape", "B", "S", "draft", "kvp", "tpa")
DEFAULT: Case = {"shape": "llama-3.1-8b", "B": 1, "S": 262144, "draft": "plain", "gamma": 5}
DEFAULT |= {"kvp": 1, "tpa": 1, "overlap": 1, "strategy": "helix"}
TINY = ModelConfig.uniform(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_size=16,
)
LONGEST = 2**21  # positions that a shape may be given here; what it was trained for costs no time
DRAFTS = {"plain": "none", "verify": "none", "vegas": "vegas:budget=0.07"}
STEPS = 16  # of a chunk; also the tokens that are compared
CHECKED = 2**18  # positions of all rows of the comparison at most: one device holds them
# Of keys and values: attention reads few keys each, and its output outweighs the embedding, so that
# a key that is left out changes tokens.
SCALES = {"keys": 3.0, "values": 2.0}
# Of the standard deviation of a position's logits: two tokens that are nearer than this are a near
# tie, which sums in another order may turn. Right passes in bfloat16 differ by 0.03.
TIE = 0.1


def case(text: str) -> Case:
    """A case of ``--case``; `ValueError` where it is none."""
    found = cases.parse(text, DEFAULT)
    if found["S"] % 16:
        raise ValueError(f"S={found['S']} must be a multiple of 16")
    config = shape_of(found)
    for layer, spec in enumerate(config.layers):
        helix_of(found).check_layer(layer, config.num_heads, spec)
    return found


def helix_of(here: Case) -> HelixConfig:
    names = ("kvp", "tpa", "overlap", "strategy")
    return HelixConfig(**{name: here[name] for name in names})


def shape_of(here: Case) -> ModelConfig:
    found = TINY if here["shape"] == "tiny" else catalogue.MODELS[here["shape"]]
    return dataclasses.replace(found, max_context=LONGEST)


def grid(settings: Settings) -> list[Case]:
    """The cases that were asked for, or those of two devices."""
    if settings.cases:
        return [case(text) for text in settings.cases]
    meshes, drafts = ("kvp=2", "tpa=2"), ("plain", "verify", "vegas")
    if jax.default_backend() != "gpu":
        pairs = itertools.product(meshes, drafts[::2])
        return [case(f"shape=tiny,B=2,S=256,gamma=3,{mesh},draft={x}") for mesh, x in pairs]
    found = [f"{mesh},draft={x}" for x in drafts for mesh in ("kvp=1", *meshes)]
    if not settings.quick:
        found += [f"B=4,{mesh},draft={x}" for x in drafts for mesh in (*meshes, "kvp=2,overlap=2")]
        found += [f"S=1024K,{mesh},draft={x}" for x in drafts for mesh in meshes]
    return [case(text) for text in found]


def run(settings: Settings) -> dict[str, Any]:
    return {"steps": STEPS, "rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[point.Row]:
    with bar("helix-step", len(grid(settings))) as advance:
        for here in grid(settings):
            yield _row(here, settings)
            gc.collect()  # a failure's traceback may hold a cache
            advance()
    reference.cache_clear()


def step_config(here: Case) -> StepConfig:
    """Of steps that draft so; ``verify``: without a draft, but in passes of gamma + 1 tokens."""
    gamma = 0 if here["draft"] == "plain" else here["gamma"]
    return StepConfig(gamma, named_draft(DRAFTS[here["draft"]]))


def model_of(here: Case, *, shared: bool) -> Any:
    """The model with random weights: in shares on the mesh, or whole on one device."""
    dtype = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    if not shared:
        return random_model(shape_of(here), dtype)
    helix = helix_of(here)
    return shard(random_model(shape_of(here), dtype, decoder_sharding(helix)), helix)


def filled(model: Any, here: Case, config: StepConfig) -> DecodeState:
    """A state behind S random positions a row, the same whatever devices hold them."""
    batch, room = here["B"], (CHUNKS[1] + 1) * STEPS * (config.gamma + 1) + config.gamma + 1
    capacity = rounded_capacity(here["S"] + room)
    params = SamplingParams(max_new_tokens=1, ignore_eos=True)
    state = start_decoding(model, [[1]] * batch, params, config, capacity=capacity)
    seeds, cache = itertools.count(), state.cache
    columns = [dict(held) for held in cache.columns]
    del cache
    state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, columns=()))
    for held, layout in zip(columns, state.cache.layouts, strict=True):
        # Sorted, since a column of one device is made in another order than that of a mesh.
        for name in sorted(held):
            empty = held.pop(name)
            shape, where = (batch, here["S"], *empty.shape[2:]), empty.sharding
            size, dtype = empty.shape[1], empty.dtype
            del empty  # before there is a second one
            x = noise(next(seeds), jnp.float32(SCALES[name]), shape, dtype, parts=16)
            held[name] = jax.device_put(_in_slots(x, layout, size), where)
    tokens, rng = np.full((batch, capacity), -1, np.int32), np.random.default_rng(0)
    known = batch, here["S"] + 1  # the last of them is not in the cache yet
    tokens[:, : known[1]] = rng.integers(0, model.config.vocab_size, known, np.int32)
    cache = dataclasses.replace(state.cache, columns=tuple(columns))
    state = dataclasses.replace(
        state,
        cache=cache,
        tokens=jax.device_put(tokens, state.tokens.sharding),
        limits=jax.device_put(np.full(batch, capacity, np.int32), state.limits.sharding),
    )
    return rewound(here, state)


@functools.partial(jax.jit, static_argnames=("layout", "size"))
def _in_slots(x: Array, layout: Any, size: int) -> Array:
    """``x [B, S, ...]`` by position as ``[B, size, ...]`` by slot; 0 behind S."""
    x = jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))
    if not isinstance(layout, Striped):
        return x
    return jnp.take(x, layout.held(jnp.full(1, size - 1, jnp.int32))[0], axis=1)


def rewound(here: Case, state: DecodeState) -> DecodeState:
    """A state with S positions a row, whatever was decoded since."""
    lengths = np.full(here["B"], here["S"], np.int32)
    lengths = jax.device_put(lengths, state.cache.lengths.sharding)
    return dataclasses.replace(state, cache=state.cache.with_lengths(lengths))


def decoded(state: DecodeState, here: Case) -> np.ndarray:
    """The first `STEPS` tokens of each row behind the random ones, int32 ``[B, STEPS]``."""
    first = here["S"] + 1
    return np.asarray(state.tokens)[:, first : first + STEPS]


@functools.lru_cache(maxsize=1)
def reference(shape: str, batch: int, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens ``[B, STEPS]`` of one device, and the logits ``[B, STEPS, V]`` of a pass over
    them."""
    here = DEFAULT | {"shape": shape, "B": batch, "S": slots}
    config, model = step_config(here), model_of(here, shared=False)
    state, _ = decode_chunk(model, filled(model, here, config), config, STEPS)
    tokens, state = decoded(state, here), rewound(here, state)
    fed = np.concatenate([np.asarray(state.last_token)[:, None], tokens[:, :-1]], axis=1)
    return tokens, np.asarray(_logits(model, state.cache, jnp.asarray(fed))[0])


@functools.partial(jax.jit, donate_argnames="cache")
def _logits(model: Decoder, cache: Any, tokens: Array) -> tuple[Array, Any]:
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, cache = model(tokens, positions, dense_attend(positions), cache)
    return model.logits(hidden), cache


def compared(tokens: np.ndarray, right: np.ndarray, logits: np.ndarray) -> dict[str, Any]:
    """How many tokens of all rows are ``right [B, n]`` before the first that is not, and how far
    the logits of that and of the right one are from each other at most, in standard deviations."""
    same, apart = 0, 0.0
    for own, wanted, scores in zip(tokens, right, logits, strict=True):
        other = np.flatnonzero(own != wanted)
        same += int(other[0]) if len(other) else len(wanted)
        if len(other):
            first = other[0]
            gap = scores[first, wanted[first]] - scores[first, own[first]]
            apart = max(apart, float(abs(gap) / scores[first].std()))
    return {"same_tokens": same, "compared_tokens": right.size, "apart": apart}


def check(here: Case, model: Any) -> dict[str, Any]:
    """What `compared` says of the mesh, at as many positions as one device is asked to hold."""
    most = CHECKED // here["B"] // 16 * 16
    small = here | {"S": min(here["S"], most if jax.default_backend() == "gpu" else 4096)}
    right, logits = reference(small["shape"], small["B"], small["S"])
    config = step_config(small)
    state, _ = decode_chunk(model, filled(model, small, config), config, STEPS)
    return compared(decoded(state, small), right, logits) | {"checked_positions": small["S"]}


def _row(here: Case, settings: Settings) -> point.Row:
    helix = helix_of(here)
    name = here["strategy"] if helix.devices > 1 else "alone"
    name += f", {here['overlap']} chunks" if here["overlap"] > 1 else ""
    row = functools.partial(point.row, "step", here, name)
    if jax.device_count() < helix.devices:
        reason = f"it needs {helix.devices} devices, and {jax.device_count()} are here"
        return row(checked=None, reason=reason)
    if not settings.check:
        return row(checked=None, reason="not checked, so not timed")
    try:
        model = model_of(here, shared=helix.devices > 1)
        about = check(here, model)
        if not about["apart"] <= TIE:
            reason = f"its tokens are others, {about['apart']:.2f} apart"
            return row(checked=False, reason=reason, **about)
        return row(checked=True, **about, **measured(here, model))
    except Exception as error:
        return row(checked=False, reason=failure(name, error).reason)


def measured(here: Case, model: Any) -> dict[str, Any]:
    """Times of a step, the tokens that it commits, and the rows that fit; or why it cannot run."""
    config = step_config(here)
    state = filled(model, here, config)
    program = decode_chunk.lower(model, state, config, STEPS).compile()
    weights, cached = bytes_of(model), bytes_of(state.cache.columns)
    memory = memory_of(program) | {"weight_bytes": weights, "cache_bytes": cached}
    about = memory | {"largest_batch": largest_batch(here["B"], memory)}
    if reason := too_large(weights + cached, memory):
        return about | {"reason": reason}
    state, _ = program(model, state)  # what a drafter picked is then of this context
    own = jax.tree.map(jnp.copy, state.draft)
    state, record = program(model, rewound(here, state))
    about["committed"] = float(np.asarray(record.committed).mean())

    def again(state: DecodeState) -> DecodeState:
        # A chunk takes the state that it is given.
        return dataclasses.replace(rewound(here, state), draft=jax.tree.map(jnp.copy, own))

    loop = Loop(model, again, state)
    del state
    short, long = (functools.partial(loop.run, program, count) for count in CHUNKS)
    samples = clocks.step(short, long, 0.0, REPEATS, lengths=CHUNKS)
    return about | {"step_ns": [round(ns / STEPS) for ns in samples]}


def bytes_of(tree: Any) -> int:
    """Bytes that the first device holds."""
    return sum(
        x.dtype.itemsize * int(np.prod(x.sharding.shard_shape(x.shape)))
        for x in jax.tree.leaves(tree)
    )


def largest_batch(batch: int, memory: dict[str, int]) -> int | None:
    """How many rows fit a device, by what ``batch`` of them take; None where none says its size.

    Temporary memory is taken to grow with the rows.
    """
    limit = device_bytes("bytes_limit")
    row = (memory["cache_bytes"] + memory.get("temp_bytes", 0)) / batch
    return None if limit is None else max(int((limit - memory["weight_bytes"]) // row), 0)


def cells(own: point.Row) -> tuple[str, ...]:
    """Of a row under `HEADINGS`."""
    case = own["case"] | {"S": kilo(own["case"]["S"])}
    case["draft"] += "" if case["draft"] == "plain" else f" {case['gamma']}"
    place = *(str(case[name]) for name in COLUMNS), own["name"]
    found = point.spread(own, "step")
    same = f"{own['same_tokens']}/{own['compared_tokens']}" if "same_tokens" in own else ""
    if found is None:
        return *place, own.get("reason") or "not timed", "", "", same, ""
    most = own["largest_batch"]
    committed = own["committed"]
    token = found.median / committed / 1e3
    shown = f"{found.median / 1e3:,.3f}", f"{committed:.2f}", f"{token:,.3f}"
    return *place, *shown, same, "" if most is None else f"{most}"


HEADINGS = (*COLUMNS, "name", "step ms", "tokens", "ms/token", "same", "fit")
FOOT = (
    "step: ms of a step, the median; tokens: committed by a step in each row, of random weights, "
    "which accept little; same: tokens equal to those of one device before a near tie; fit: rows "
    "in the memory of a device by the program's plan"
)


def show(result: dict[str, Any]) -> None:
    table = Table(title=result["machine"]["device"], padding=(0, 1, 0, 0), box=None)
    has_ratios = any("ratio" in own for own in result["rows"])
    for heading in (*HEADINGS, *(["vs before"] if has_ratios else [])):
        table.add_column(heading, justify="left" if heading == "name" else "right")
    reasons: list[str] = []
    for own in result["rows"]:
        if (reason := own.get("reason")) and reason not in reasons:
            reasons.append(reason)
        mark = f"[{reasons.index(reason) + 1}]" if reason else None
        ratio = [times(own["ratio"])] if "ratio" in own else []
        table.add_row(*map(escape, (*cells(own | {"reason": mark}), *ratio)))
    console().print(table)
    for index, reason in enumerate(reasons, 1):
        console().print(f"[{index}] {reason}", markup=False)
    console().print(FOOT, markup=False)


SUITE = Suite(
    "helix-step",
    "whole steps by KVP x TPA devices, Helix against tensor parallelism, plain and speculative",
    run,
    show,
    compare=compare,
    own_clocks=True,
    case=case,
)
