"""Starting to decode: prefill of a batch of prompts, or of one slot of a running batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.cache import Cache, Layout, LinearLayout, PagedLayout
from jspec.config import SamplingParams, shown, whole_number
from jspec.decode.checks import (
    Prompt,
    agreed_params,
    as_ids,
    asks_experts,
    check_exact,
    check_models,
    check_requests,
    check_started,
    prompt_logprobs_of,
    strongest,
)
from jspec.decode.on_mesh import layouts_for, mesh_model, placing_of
from jspec.decode.prefill_pass import (
    BUSY_PASS,
    default_chunk,
    empty_record,
    init_drafter_state,
    pass_sizes,
    passes_over,
    prefill_chunk,
)
from jspec.decode.processors import (
    LogitsProcessor,
    check_processors,
    check_served,
    completed,
)
from jspec.decode.rows import (
    insert_row,
    packed_rows,
    padded,
    power_of_two,
    state_of,
    stops_of,
)
from jspec.decode.settings import StepConfig, check_arrays
from jspec.decode.state import DecodeState, Models, PromptRecord
from jspec.ops.cached import FLOAT8
from jspec.policies.policy import create_cache
from jspec.sharding import Placing, place
from jspec.typing import Model

CAPACITY_STEP = 256  # capacities are rounded up to this, so that close ones share a program
OnPrefill = Callable[[int, int], None]
OnPromptRecords = Callable[[tuple[PromptRecord, ...]], None]


def start_decoding(
    models: Model | Models,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    config: StepConfig = StepConfig(),
    *,
    capacity: int | None = None,
    chunk: int | None = None,
    cache_dtype: DTypeLike | None = None,
    on_prefill: OnPrefill | None = None,
    run: Callable[..., Any] | None = None,
    sharding: Placing = None,
    grows: bool = False,
    processors: Sequence[LogitsProcessor] = (),
    on_prompt_records: OnPromptRecords | None = None,
) -> DecodeState:
    """Check a batch of requests and prefill their prompts.

    Where several processes share the model's devices, all of them must make the same call.

    Args:
        models: The target, or `Models` with a draft model or a policy's parameters.
        prompts: Token ids of each request.
        params: Settings for all requests, or one per request.
        config: The config of the steps to come, whose drafter is prefilled too. Steps may use a
            smaller gamma.
        capacity: Positions per row; None takes what the longest request needs.
        chunk: Prompt tokens per row and prefill pass; None chooses by the batch. With
            ``config.exact="tokens"`` each prompt is prefilled alone, in passes of `pass_sizes`, and
            None is that of one row.
        cache_dtype: Dtype of the target's keys and values; None is the model's ``dtype``.
        on_prefill: Called as ``on_prefill(done, total)`` with prompt tokens per row; of all rows
            where each is prefilled alone.
        run: Called as ``run(function, *args, **static)`` in place of each jitted prefill function.
        sharding: Where the state's arrays lie, each of which begins with the batch axis. A sharding
            over batch rows, such as ``NamedSharding(mesh, P("rows"))``, or a function of an array's
            name and shape, such as ``"cache.columns.0.keys"`` and ``(B, S, K, H)``. None is the
            one device, or the Explicit mesh, that the model is on, else the default device. A model
            with a mesh of its own, such as `jspec.helix.Sharded`, places the state itself.
        grows: Whether ``capacity`` may be less than the longest request needs, as the caller raises
            it in time by `jspec.grow_capacity`.
        processors: Logits processors of all requests, after those that their ``params`` need.
        on_prompt_records: Called with the `PromptRecord` of each prompt, numpy arrays: what its
            ``params`` ask for by ``prompt_logprobs`` and ``routed_experts``.

    Returns:
        The state for the first step.

    Raises:
        ValueError: Where a prompt is empty, has ids outside the vocabulary, or exceeds the capacity
            or a model's context; where an array does not divide over ``sharding``; and where
            processes made different calls.
        TypeError: For arguments of another kind.
    """
    models, ids, params = _checked(
        *(models, prompts, params, config), (capacity, chunk, cache_dtype, grows)
    )
    if on_prompt_records is None:
        check_unrecorded(params, "start_decoding(on_prompt_records=) gives them")
    needed = max(len(p) + s.max_new_tokens for p, s in zip(ids, params, strict=True))
    capacity = rounded_capacity(needed) if capacity is None else capacity
    if grows:
        _check_capacity(capacity, max(map(len, ids)), "prompt")
    else:
        _check_capacity(capacity, needed)
    dtype = _float_dtype(models.target.dtype if cache_dtype is None else cache_dtype)
    longest, rings = max(capacity, needed), not config.exact
    layouts = layouts_for(models.target, capacity, config.gamma, longest, rings=rings)
    start = _Start(
        models,
        config,
        capacity,
        layouts,
        dtype,
        chunk,
        completed(check_processors(processors), params),
        run,
        sharding,
    )
    prefill = start.one_by_one if config.exact == "tokens" else start.together
    return prefill(ids, params, on_prefill, on_prompt_records)


def start_empty(
    models: Models,
    rows: int,
    config: StepConfig,
    capacity: int,
    *,
    cache_dtype: DTypeLike | None,
    run: Callable[..., Any],
    processors: Sequence[LogitsProcessor],
    blocks: int | None = None,
) -> DecodeState:
    """A state of ``rows`` whose prompts have one token, which is prefilled nowhere.

    ``blocks``: of the cache of layers that have room for all positions; None: each row has its
    positions in one piece. The other arguments as in `start_decoding`.
    """
    prompts, params = [np.zeros(1, np.int32)] * rows, SamplingParams(max_new_tokens=1, seed=0)
    if blocks is None:
        return start_decoding(
            *(models, prompts, params, config),
            capacity=capacity,
            cache_dtype=cache_dtype,
            run=run,
            processors=processors,
        )
    dtype = _float_dtype(models.target.dtype if cache_dtype is None else cache_dtype)
    layouts = layouts_for(models.target, capacity, config.gamma, rings=not config.exact)
    layouts = tuple(
        PagedLayout(capacity, blocks) if isinstance(x, LinearLayout) else x for x in layouts
    )
    start = _Start(models, config, capacity, layouts, dtype, None, processors, run)
    return start.together(prompts, (params,) * rows)


def _checked(
    models: Model | Models,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    config: StepConfig,
    settings: Any,
) -> tuple[Models, list[np.ndarray], tuple[SamplingParams, ...]]:
    """Models, ids and settings of requests that the models can serve by steps of ``config``.

    ``settings``: what else all processes that share the models must agree on.
    """
    models = Models.of(models)
    check_models(models)
    check_arrays(models, config)
    if config.exact:
        check_exact(models.target, config.cache_policy, config.exact)
    ids = as_ids(prompts)
    params = agreed_params(models, ids, params, (config, settings))
    check_requests(models, ids, params)
    return models, ids, params


def check_unrecorded(params: Sequence[SamplingParams], way_out: str) -> None:
    """Raise `ValueError` where a request asks for what prefill computes of its prompt's tokens."""
    count = prompt_logprobs_of(params)
    if count is not None or asks_experts(params):
        what = "routed_experts=True" if count is None else f"prompt_logprobs={count}"
        raise ValueError(f"a request asks for {what}, which are not given: {way_out}")


def _check_capacity(capacity: Any, needed: int, parts: str = "prompt and max_new_tokens") -> None:
    """Raise `ValueError` unless the ``parts`` of a request, ``needed`` positions, fit."""
    if (whole_number(capacity) or 0) < needed:
        shorten = "shorten the prompt" if parts == "prompt" else "lower max_new_tokens"
        raise ValueError(
            f"a request needs {needed} slots ({parts}) but capacity={shown(capacity)}; raise the "
            f"capacity or {shorten}"
        )


@dataclasses.dataclass(frozen=True)
class _Start:
    """Prefills checked requests into the first state of a batch: every prompt token but the last.

    ``layouts``: of each layer's cache. ``dtype``: of the target's keys and values. The other
    attributes are arguments of `start_decoding`.
    """

    models: Models
    config: StepConfig
    capacity: int
    layouts: Sequence[Layout]
    dtype: DTypeLike
    chunk: int | None
    processors: Sequence[LogitsProcessor]
    run: Callable[..., Any] | None = None
    sharding: Placing = None

    def together(
        self,
        ids: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
        on_prefill: OnPrefill | None = None,
        on_prompt_records: OnPromptRecords | None = None,
    ) -> DecodeState:
        """The state of these requests, a piece of all prompts in each pass."""
        models, config, sharding = self.models, self.config, self.sharding
        on_mesh = mesh_model(models.target)
        if on_mesh is not None:
            on_mesh.check(config)
            models, sharding = on_mesh.placed(models), None
        sharding = placing_of(models) if sharding is None else sharding
        tokens, lengths = padded(ids, self.capacity)
        total = int(lengths.max()) - 1
        passes = self._passes(len(ids), total)
        cache, drafter_state = self._empty(models, lengths - 1, sharding)
        prompts = jax.device_put(tokens)  # jnp.asarray compiles a program for each shape
        count, experts = prompt_logprobs_of(params), asks_experts(params)
        records = [(empty_record(models, (len(ids), 0), count, experts), 0)]
        last = lengths - 2  # the position of a row's last cached token
        for begin, size in passes:
            args = (models, cache, drafter_state, prompts, np.int32(begin))
            ends = bool(((begin <= last) & (last < begin + size)).any())
            static = {"config": config, "size": size, "selects": config.selects_in_prefill and ends}
            static |= {"prompt_logprobs": count, "routed_experts": experts}
            cache, drafter_state, record = self._call(prefill_chunk, *args, **static)
            records.append((record, size))
            if on_prefill is not None:
                jax.block_until_ready(cache)
                on_prefill(min(begin + size, total), total)
        if on_prompt_records is not None:
            of_rows = (PromptRecord.joined(records, row).asked(x) for row, x in enumerate(params))
            pairs = zip(of_rows, (lengths - 1).tolist(), strict=True)
            on_prompt_records(tuple(jax.tree.map(lambda x, n=n: x[:n], one) for one, n in pairs))
        model_config = models.target.config
        row = (tokens, lengths, params, model_config.stop_tokens, cache, drafter_state)
        settings = {"processors": self.processors, "vocab_size": model_config.vocab_size}
        return place(state_of(*row, exact=config.exact, **settings), sharding)

    def one_by_one(
        self,
        ids: Sequence[np.ndarray],
        params: Sequence[SamplingParams],
        on_prefill: OnPrefill | None = None,
        on_prompt_records: OnPromptRecords | None = None,
    ) -> DecodeState:
        """The state of these requests, each prompt prefilled alone, so that no other one changes
        the shape of a pass over it."""
        state = self.together([x[:1] for x in ids], params)
        stop_tokens, records, done = self.models.target.config.stop_tokens, [], 0
        total = sum(len(prompt) - 1 for prompt in ids)

        def report(done_of_row: int, _: int) -> None:
            if on_prefill is not None:
                on_prefill(done + done_of_row, total)

        for slot, (prompt, asked) in enumerate(zip(ids, params, strict=True)):
            one = self.together([prompt], [asked], on_prefill and report, records.extend)
            row = ([prompt], [asked], stop_tokens, one.cache, one.draft)
            state = insert_row(state, packed_rows(state, [slot], *row), slot, self.run)
            done += len(prompt) - 1
        if on_prompt_records is not None:
            on_prompt_records(tuple(records))
        return state

    def _call(self, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """``function(*args, **static)``, by ``run`` where there is one."""
        call = function if self.run is None else functools.partial(self.run, function)
        return call(*args, **static)

    def _passes(self, batch: int, total: int) -> list[tuple[int, int]]:
        """Begin and size of each pass over ``batch`` prompts, the longest of ``total`` tokens."""
        chunk = default_chunk(batch) if self.chunk is None else self.chunk
        if (whole_number(chunk) or 0) < 1:
            raise ValueError(f"a prefill chunk of {shown(chunk)} tokens must be at least 1")
        if self.config.exact == "tokens":
            return list(passes_over(total, pass_sizes(chunk, BUSY_PASS)))
        # A power of two up to the chunk, so that short prompts pay little and share programs.
        chunk = min(chunk, power_of_two(total))
        return [(begin, chunk) for begin in range(0, total, chunk)]

    def _empty(self, models: Models, cached: np.ndarray, sharding: Placing) -> tuple[Cache, Any]:
        """A cache for rows of ``cached`` tokens, int32 ``[B]``, and the drafter's state."""
        config, batch = self.config, len(cached)
        specs = models.target.config.layers
        cache = create_cache(config.cache_policy, specs, self.layouts, batch, self.dtype, sharding)
        cache = cache.with_lengths(cached)  # on the host until all is placed
        sizes = {"batch": batch, "capacity": self.capacity}
        drafter_state = self._call(init_drafter_state, models, config=config, **sizes)
        empty = place({"cache": cache, "draft": drafter_state}, sharding)
        return empty["cache"], empty["draft"]


def fill_slot(
    models: Model | Models,
    state: DecodeState,
    slot: int,
    prompt: Prompt,
    params: SamplingParams = SamplingParams(),
    config: StepConfig = StepConfig(),
    *,
    chunk: int | None = None,
) -> DecodeState:
    """Put another request into row ``slot`` of a running batch; the other rows do not change.

    Args:
        models: As `start_decoding` takes them.
        state: The state of the batch. It is donated: use the returned one.
        slot: The row, in ``[0, B)``.
        prompt: Token ids of the request.
        params: Its settings. Prompt, new tokens and stop tokens must fit the room that ``state``
            was started with.
        config: The config of the steps to come.
        chunk: Prompt tokens per prefill pass; None chooses.

    Returns:
        The state with the request in its row.

    Raises:
        ValueError: As `start_decoding` does, and for a draft or gamma for which the drafter's
            arrays have other shapes than in ``state``.
    """
    batch, capacity = state.tokens.shape
    index = whole_number(slot)
    if index is None or not 0 <= index < batch:
        raise ValueError(f"slot={shown(slot)} must be in [0, {batch}), the rows of the batch")
    check_started(state.exact, config.exact)
    checked, ids, rows = _checked(models, [prompt], params, config, (capacity, chunk))
    check_unrecorded(rows, "an Engine gives them")
    _check_capacity(capacity, len(ids[0]) + rows[0].max_new_tokens)
    processors = () if state.processing is None else state.processing.processors
    check_served(processors, rows[0], "batch")
    dtype = state.cache.keys(0).dtype
    start = _Start(checked, config, capacity, state.cache.layouts, dtype, chunk, processors)
    one = start.together(ids, rows)
    if _row_shapes(one.draft) != _row_shapes(state.draft):
        raise ValueError(
            f"with draft={shown(config.draft)} and gamma={config.gamma} the drafter keeps other "
            "arrays than those of this batch; fill the slot with the draft and gamma that the "
            "batch was started with"
        )
    ends, room = checked.target.config.stop_tokens, state.stop_tokens.shape[1]
    if (count := len(stops_of(rows[0], ends))) > room:
        raise ValueError(
            f"the request has {count} stop tokens, the batch has room for {room}; start it with a "
            "request of as many"
        )
    counts = [x.logprobs for x in (state, one) if x.logprobs is not None]
    mode = strongest([state.mode, one.mode])
    state = dataclasses.replace(state, mode=mode, logprobs=max(counts, default=None))
    packed = packed_rows(state, [index], ids, rows, ends, one.cache, one.draft)
    return insert_row(state, packed, index)


def _row_shapes(drafter_state: Any) -> Any:
    """The structure of a drafter's state, and the shapes of a row of its arrays."""
    leaves, structure = jax.tree.flatten(drafter_state)
    return structure, [x.shape[1:] for x in leaves]


def _float_dtype(dtype: DTypeLike) -> np.dtype:
    """``dtype`` of a cache. Raises `ValueError` unless it is one of the float dtypes below."""
    try:
        resolved = jnp.dtype(dtype)
    except TypeError:
        resolved = jnp.dtype(bool)
    is_float = jnp.issubdtype(resolved, jnp.floating) and (
        resolved.itemsize > 1 or resolved == FLOAT8
    )
    if not is_float or jax.dtypes.canonicalize_dtype(resolved) != resolved:
        raise ValueError(
            f"a cache of {shown(dtype)} must be of float32, bfloat16, float16 or float8_e4m3fn"
        )
    return resolved


def rounded_capacity(needed: int) -> int:
    """``needed`` positions rounded up, so that close capacities share a program."""
    return -(-needed // CAPACITY_STEP) * CAPACITY_STEP
