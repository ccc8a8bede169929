"""A decoding step with the cache in host memory, and steps with it on the device.

The shapes of table 9 of HATA (arXiv 2506.02572): Llama 2 at 36K tokens, Llama 3.1 at 72K, 1.56 % of
them read. Weights, keys and values are random. Clock: *step* is the marginal wall time of a jitted
chunk of steps in a sequence of chunks, over its steps. *bus*: wall time of a call that fetches the
rows that all layers of a step read, and does nothing else. Variants of `hata_off` leave out
prediction or reuse.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import clocks, point
from bench.cases import Case
from bench.decode.catalogue import MODELS
from bench.decode.check import LAYERS, Check
from bench.decode.running import compiled
from bench.decode.shapes import random_model
from bench.decode.states import Blueprint
from bench.program import failure
from bench.settings import Settings, bar
from bench.suite import Benchmark
from jspec import host
from jspec.config import ModelConfig
from jspec.decode.draft import NoDraft
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models
from jspec.decode.step import decode_chunk
from jspec.models.decoder import Decoder
from jspec.ops.host_rows import fetch_rows
from jspec.policies import Dense, Hata, HataOff, Policy
from jspec.policies.policy import columns_of

BUDGET = 0.0156
# Backends of the step whose tokens are compared: `hata_off` runs the parts of a layer one by one,
# and `hata` as one operation rounds differently.
IN_PARTS = {"hash_attention": "one_by_one"}
CHUNKS = (1, 2)  # chunks of the two runs whose difference is timed
STEPS, REPEATS = 16, 7
SMALL = ModelConfig.uniform(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_context=1024,
)
SHAPES = {"small": SMALL} | {name: MODELS[name] for name in ("llama-2-7b", "llama-3.1-8b")}


def policies(budget: float) -> dict[str, Policy]:
    """The policies to time, by name."""
    asked: dict[str, Any] = {"budget": budget}
    return {
        "dense": Dense(),
        "hata": Hata(**asked),
        "hata_off": HataOff(**asked),
        "hata_off, no prediction": HataOff(**asked, predicted=0.0),
        "hata_off, no reuse": HataOff(**asked, reuse=False),
        "hata_off, published": HataOff(**asked, predicted=1.0, reuse=False),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffBenchmark(Benchmark):
    """A step of each policy, of one row of tokens."""

    @property
    def name(self) -> str:
        return "hata_off"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(policies(BUDGET))

    def measure(self, case: Case, settings: Settings) -> Iterator[point.Row]:
        if reason := host.refusal():
            yield point.row(self.name, case, "hata_off", checked=None, reason=reason)
            return
        # No variable here references the model, so that it is freed before the next one is made.
        yield from _Case(case, random_model(SHAPES[case["model"]]), settings).rows(settings)
        gc.collect()


class _Case:
    """The rows of a model at a context."""

    def __init__(self, case: Case, model: Decoder, settings: Settings) -> None:
        self.model, self.case = model, case
        self.steps = 1 if model.config is SMALL else STEPS
        self.blueprint = Blueprint.of(model, 1, case["S"], 0, 2 * CHUNKS[1] * self.steps)
        every = policies(0.1 if model.config is SMALL else BUDGET)
        self.policies = {name: policy for name, policy in every.items() if settings.wants(name)}

    def rows(self, settings: Settings) -> Iterator[point.Row]:
        """Yield a row for each policy, with times if its output was right."""
        if not settings.check:
            for name in self.policies:
                reason = "not checked, so not timed"
                yield point.row("hata_off", self.case, name, checked=None, reason=reason)
            return
        tokens: dict[str, np.ndarray] = {}
        timed: dict[str, dict[str, Any]] = {}
        with bar(self.case["model"], len(self.policies)) as advance:
            for name, policy in self.policies.items():
                try:
                    timed[name], tokens[name] = self._timed(policy)
                except Exception as error:
                    reason = failure(name, error).reason
                    yield point.row("hata_off", self.case, name, checked=False, reason=reason)
                gc.collect()  # one cache at a time
                # Yield a row as soon as the one it is compared with is known: an interrupted run
                # then loses none.
                for ready in [
                    done for done in timed if done == "dense" or _reference_of(done) in tokens
                ]:
                    yield self._judged(ready, tokens, timed.pop(ready))
                advance()
        for name in timed:
            reason = f"{_reference_of(name)} did not run, which its tokens are compared with"
            yield point.row("hata_off", self.case, name, checked=False, reason=reason)

    def _judged(self, name: str, tokens: dict[str, np.ndarray], timed: dict[str, Any]) -> point.Row:
        """The row of a policy, with the reason if its output is wrong."""
        reason, checked = None, f"{LAYERS} layers"
        if name != "dense":
            checked = f"as {_reference_of(name)}"
            if not np.array_equal(tokens[name], tokens[_reference_of(name)]):
                reason = f"its tokens differ from those of {_reference_of(name)}"
        else:
            reason = timed.pop("wrong")
        if reason is not None:
            return point.row("hata_off", self.case, name, checked=False, reason=reason)
        return point.row("hata_off", self.case, name, checked=checked, **timed)

    def _timed(self, policy: Policy) -> tuple[dict[str, Any], np.ndarray]:
        """The figures of a step, and the tokens of a first chunk."""
        models = Models(self.model, policy=policy.prepare(self.model, None))
        state = self._state(policy, models.policy)
        figures: dict[str, Any] = {"device_bytes": _bytes(state, in_host=False)}
        figures["host_bytes"] = _bytes(state, in_host=True)
        if isinstance(policy, HataOff):
            figures["bus_ns"], figures["bus_bytes"] = _bus(state, policy)
        if isinstance(policy, Dense):
            figures["wrong"] = self._wrong(state)
        config = StepConfig(0, NoDraft(), target=policy)
        compared = dataclasses.replace(config, backends=IN_PARTS)
        state, record = decode_chunk(models, state, config=compared, steps=self.steps)
        tokens = np.asarray(record.tokens)
        if not (np.asarray(record.committed) == 1).all():
            raise RuntimeError("a step did not commit one token a row")
        states = [state]

        def chunks(count: int) -> Callable[[], Any]:
            def call() -> jax.Array:
                state = self.blueprint.rewound(states.pop())
                for _ in range(count):
                    state, _ = decode_chunk(models, state, config=config, steps=self.steps)
                states.append(state)
                return state.cache.lengths

            return call

        short, long = map(chunks, CHUNKS)
        samples = clocks.step(short, long, 0.0, REPEATS, lengths=CHUNKS)
        figures["step_ns"] = [round(ns / self.steps) for ns in samples]
        return figures, tokens

    def _wrong(self, state: DecodeState) -> str | None:
        """Why a dense step is wrong against the reference, or None."""
        check = Check(Models(self.model), StepConfig(0, NoDraft()), lambda models: None)
        return check.wrong(state, compiled(check.lowerings(self.blueprint.shapes)))[0]

    def _state(self, policy: Policy, policy_params: Any) -> DecodeState:
        """A state in the memory and columns of a policy, with the same values for all policies."""
        # Copies: the blueprint's small arrays serve every policy, whose steps overwrite them.
        small = jax.tree.map(jnp.copy, self.blueprint.small)
        state = dataclasses.replace(self.blueprint, small=small).filled(
            self.model.config.vocab_size
        )
        columns, storage = [], policy.storage
        host_layers = () if storage is None else storage.layers(state.cache.specs)
        for layer, column in enumerate(state.cache.columns):
            columns_of_layer = dict(column)
            if columns_of(policy, layer, state.cache.specs[layer]):
                encode = policy.encoder(policy_params, layer)
                columns_of_layer |= encode(column["keys"], column["values"])
            if layer in host_layers:
                for name in ("keys", "values"):
                    columns_of_layer[name] = host.place_in_host(column[name], None)
            columns.append(columns_of_layer)
        cache = dataclasses.replace(state.cache, columns=tuple(columns), storage=storage)
        return dataclasses.replace(state, cache=cache)


def _reference_of(name: str) -> str:
    """The policy whose tokens those of ``name`` are compared with.

    The tokens of `hata` are computed twice, with the cache on the device and in host memory.
    """
    return "hata_off" if name == "hata" else "hata"


def _bytes(state: DecodeState, *, in_host: bool) -> int:
    """Bytes of the cache in host memory, or of the cache on the device."""
    leaves = jax.tree.leaves(state.cache.columns)
    return sum(x.nbytes for x in leaves if host.in_host(x) == in_host)


def _bus(state: DecodeState, policy: HataOff) -> tuple[list[int], int]:
    """Samples of a call that fetches as many rows as a step reads, and their bytes."""
    cache = state.cache
    layers = policy.storage.layers(cache.specs)
    context, rng = int(cache.lengths[0]), np.random.default_rng(0)
    count, heads = round(policy.budget * context), cache.specs[layers[0]].kv_heads
    chosen = [np.sort(rng.choice(context, count, replace=False)) for _ in range(heads)]
    slots = jnp.asarray(np.array(chosen, np.int32)[None])

    @jax.jit
    def fetch(columns: Any, slots: jax.Array) -> Any:
        return [fetch_rows(pair, slots) for pair in columns]

    columns = [tuple(cache.columns[i][name] for name in ("keys", "values")) for i in layers]
    fetched = jax.block_until_ready(fetch(columns, slots))
    moved = sum(x.nbytes for x in jax.tree.leaves(fetched))
    samples = []
    for _ in range(REPEATS):
        begin = time.perf_counter_ns()
        jax.block_until_ready(fetch(columns, slots))
        samples.append(time.perf_counter_ns() - begin)
    return samples, moved


BENCHMARK = OffBenchmark(
    default={"model": "llama-2-7b", "S": 36 * 1024},
    choices={"model": tuple(SHAPES)},
    gpu=["model=llama-2-7b,S=36K", "model=llama-3.1-8b,S=72K"],
    quick=["model=llama-3.1-8b,S=72K"],
    cpu=["model=small,S=256"],
)
