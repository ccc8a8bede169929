"""Starting to decode: prefill of a batch of prompts, or of one slot of a running batch."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from jspec.decode.draft import TargetPass
from jspec.decode.logprobs import Logprobs, scores_of_hidden
from jspec.decode.on_mesh import layouts_for, mesh_model, on_mesh_of
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
from jspec.decode.state import DecodeState, FlatModels, Models, PromptRecord, vocabulary_axes
from jspec.dispatch import use_backends
from jspec.models.experts import recorded_experts, routing_shape, stacked_experts
from jspec.ops.cached import FLOAT8
from jspec.policies.collect import run_prompt
from jspec.policies.dense import DenseAttend
from jspec.policies.policy import create_cache, with_pages
from jspec.sharding import Placing, explicit_mesh_sharding, place
from jspec.typing import Array, Model

LEAST = 16  # tokens per row of the smallest prefill pass: fewer take as long
BUSY = 128  # tokens of a pass: shorter ones take about as long as reading the weights does
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
            default device, or the Explicit mesh that the model is on. A model with a mesh of its
            own, such as `jspec.helix.Sharded`, places the state itself.
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
    sizes = (capacity, layouts, dtype, chunk)
    processors = completed(check_processors(processors), params)
    rest = (processors, on_prefill, run, sharding, on_prompt_records)
    start = _started_alone if config.exact == "tokens" else _started
    return start(models, ids, params, config, *sizes, *rest)


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
    sizes = (capacity, layouts, dtype, None)
    return _started(models, prompts, (params,) * rows, config, *sizes, processors, run=run)


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


def _started(
    models: Models,
    ids: Sequence[np.ndarray],
    params: Sequence[SamplingParams],
    config: StepConfig,
    capacity: int,
    layouts: Sequence[Layout],
    dtype: DTypeLike,
    chunk: int | None,
    processors: Sequence[LogitsProcessor],
    on_prefill: OnPrefill | None = None,
    run: Callable[..., Any] | None = None,
    sharding: Placing = None,
    on_prompt_records: OnPromptRecords | None = None,
) -> DecodeState:
    """The state of checked requests: every prompt token but the last of each row is prefilled."""
    batch = len(ids)
    chunk = default_chunk(batch) if chunk is None else chunk
    if (whole_number(chunk) or 0) < 1:
        raise ValueError(f"a prefill chunk of {shown(chunk)} tokens must be at least 1")
    on_mesh = mesh_model(models.target)
    if on_mesh is not None:
        on_mesh.check(config)
        models, sharding = on_mesh.placed(models), on_mesh.placing
    sharding = explicit_mesh_sharding(models) if sharding is None else sharding
    tokens, lengths = padded(ids, capacity)
    specs = models.target.config.layers
    cache = create_cache(config.cache_policy, specs, layouts, batch, dtype, sharding)
    cache = cache.with_lengths(lengths - 1)  # on the host until all is placed
    drafter_state = init_drafter_state(models, config=config, batch=batch, capacity=capacity)
    empty = place({"cache": cache, "draft": drafter_state}, sharding)
    cache, drafter_state = empty["cache"], empty["draft"]
    total = int(lengths.max()) - 1
    if config.exact == "tokens":
        passes = list(passes_over(total, pass_sizes(chunk, BUSY)))
    else:
        # A power of two up to the chunk, so that short prompts pay little and share programs.
        chunk = min(chunk, power_of_two(total))
        passes = [(begin, chunk) for begin in range(0, total, chunk)]
    call = prefill_chunk if run is None else (lambda *a, **s: run(prefill_chunk, *a, **s))
    prompts = jax.device_put(tokens)  # jnp.asarray compiles a program for each shape
    count, records = prompt_logprobs_of(params), asks_experts(params)
    parts = [(empty_record(models, (batch, 0), count, records), 0)]
    last = lengths - 2  # the position of a row's last cached token
    for begin, size in passes:
        args = (models, cache, drafter_state, prompts, np.int32(begin))
        ends = bool(((begin <= last) & (last < begin + size)).any())
        static = {"config": config, "size": size, "selects": config.selects_in_prefill and ends}
        static |= {"prompt_logprobs": count, "routed_experts": records}
        cache, drafter_state, part = call(*args, **static)
        parts.append((part, size))
        if on_prefill is not None:
            jax.block_until_ready(cache)
            on_prefill(min(begin + size, total), total)
    if on_prompt_records is not None:
        of_rows = (PromptRecord.joined(parts, row).asked(x) for row, x in enumerate(params))
        pairs = zip(of_rows, (lengths - 1).tolist(), strict=True)
        on_prompt_records(tuple(jax.tree.map(lambda x, n=n: x[:n], one) for one, n in pairs))
    ends = models.target.config.stop_tokens
    row = (tokens, lengths, params, ends, cache, drafter_state)
    settings = {"processors": processors, "vocab_size": models.target.config.vocab_size}
    return place(state_of(*row, exact=config.exact, **settings), sharding)


def _started_alone(
    models: Models,
    ids: Sequence[np.ndarray],
    params: Sequence[SamplingParams],
    config: StepConfig,
    capacity: int,
    layouts: Sequence[Layout],
    dtype: DTypeLike,
    chunk: int | None,
    processors: Sequence[LogitsProcessor],
    on_prefill: OnPrefill | None = None,
    run: Callable[..., Any] | None = None,
    sharding: Placing = None,
    on_prompt_records: OnPromptRecords | None = None,
) -> DecodeState:
    """As `_started`, with each prompt prefilled alone, so that no other changes the shape of a
    pass over it.
    """
    sizes = (capacity, layouts, dtype, chunk, processors)
    state = _started(
        models, [x[:1] for x in ids], params, config, *sizes, run=run, sharding=sharding
    )
    ends, records, done = models.target.config.stop_tokens, [], 0
    total = sum(len(prompt) - 1 for prompt in ids)

    def report(done_of_row: int, _: int) -> None:
        if on_prefill is not None:
            on_prefill(done + done_of_row, total)

    calls = {"on_prefill": on_prefill and report, "run": run, "sharding": sharding}
    calls |= {"on_prompt_records": records.extend}
    for slot, (prompt, asked) in enumerate(zip(ids, params, strict=True)):
        one = _started(models, [prompt], [asked], config, *sizes, **calls)
        packed = packed_rows(state, [slot], [prompt], [asked], ends, one.cache, one.draft)
        state = insert_row(state, packed, slot, run)
        done += len(prompt) - 1
    if on_prompt_records is not None:
        on_prompt_records(tuple(records))
    return state


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
    sizes = (capacity, state.cache.layouts, state.cache.keys(0).dtype, chunk)
    processors = () if state.processing is None else state.processing.processors
    check_served(processors, rows[0], "batch")
    one = _started(checked, ids, rows, config, *sizes, processors)
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


@jax.jit(
    static_argnames=("config", "size", "selects", "prompt_logprobs", "routed_experts"),
    donate_argnames=("cache", "drafter_state"),
)
def prefill_chunk(
    models: Models | FlatModels,
    cache: Cache,
    drafter_state: Any,
    tokens: Array,
    begin: Array,
    config: StepConfig,
    size: int,
    selects: bool = False,
    prompt_logprobs: int | None = None,
    routed_experts: bool = False,
) -> tuple[Cache, Any, PromptRecord]:
    """Append the ``size`` prompt tokens from position ``begin`` on, up to the cache's lengths.

    ``tokens`` int32 ``[B, S]``: the prompts, whose lengths are those of the cache, and stay.
    ``begin``: int32, of all rows or ``[B]``. ``selects``: whether a row's last query of this pass
    selects what a guided draft reads, as that of the prompt's last piece must. Cache and drafter's
    state are donated, and returned with the tokens.

    ``prompt_logprobs``: how many of the likeliest tokens to score with each prompt token that
    follows one of the ``size``, None for no scores. ``routed_experts``: whether to record the
    experts of these. The record has arrays ``[B, size, ...]``.
    """

    def piece(models: Models, cache: Cache, drafter_state: Any, tokens: Array, begin: Array):
        lengths = cache.lengths
        before, after = jnp.minimum(begin, lengths), jnp.minimum(begin + size, lengths)
        positions = begin.reshape(-1, 1) + jnp.arange(size, dtype=jnp.int32)[None]
        positions = jnp.where(positions < after[:, None], positions, -1)
        index = jnp.minimum(jnp.maximum(positions, 0), tokens.shape[1] - 1)
        new = jnp.where(positions >= 0, jnp.take_along_axis(tokens, index, axis=1), -1)
        policy, params = config.cache_policy, models.policy
        guided, target_pass = config.draft.collect_policy if selects else None, {}
        with use_backends(config.of_prefill), recorded_experts() as experts:
            if guided is None:
                attend = DenseAttend(positions, policy=policy, policy_params=params)
                hidden, cache = models.target(new, positions, attend, cache)
            else:
                context_len = jnp.maximum(after - (config.gamma + 1), 0)
                hidden, cache, collected = run_prompt(
                    *(models.target, new, positions, cache, context_len),
                    policy=guided,
                    policy_params=params,
                )
                target_pass = {"target_pass": TargetPass(positions, hidden, collected)}
            scores = None
            if prompt_logprobs is not None:
                next_index = jnp.minimum(index + 1, tokens.shape[1] - 1)
                following = jnp.take_along_axis(tokens, next_index, axis=1)
                axes = vocabulary_axes(models.target)
                scores = scores_of_hidden(
                    *(models.target, hidden, following, prompt_logprobs, axes)
                )
        cache = with_pages(policy, params, cache, before, after, size)
        drafter_state = config.draft.sync(models, drafter_state, tokens, after, size, **target_pass)
        record = PromptRecord(scores, stacked_experts(experts, new) if routed_experts else None)
        return cache, drafter_state, record

    models = Models.of(models)
    with config.of_models():
        args = (models, cache, drafter_state, tokens, begin)
        like = empty_record(models, (len(tokens), size), prompt_logprobs, routed_experts)
        return on_mesh_of(models.target, config, piece, *args, like=(cache, drafter_state, like))


def empty_record(
    models: Models, shape: tuple[int, int], prompt_logprobs: int | None, routed_experts: bool
) -> PromptRecord:
    """Zeros of numpy for tokens ``[*shape]``, in the structure that `prefill_chunk` returns."""
    count, routing = prompt_logprobs, routing_shape(models.target.config)
    return PromptRecord(
        None if count is None else Logprobs.empty(shape, count).model,
        np.zeros((*shape, *routing), np.int32) if routed_experts and routing else None,
    )


@jax.jit(static_argnames=("config", "batch", "capacity"))
def init_drafter_state(
    models: Models | FlatModels, config: StepConfig, batch: int, capacity: int
) -> Any:
    """The drafter's state before any prompt, of ``batch`` rows of ``capacity`` positions."""
    models = Models.of(models)

    def init(models: Models) -> Any:
        drafter_state = config.draft.init(models, batch, capacity, config.gamma)
        for shape in map(np.shape, jax.tree.leaves(drafter_state)):
            if shape[:1] != (batch,):
                raise ValueError(
                    f"{type(config.draft).__name__}.init returned an array of shape {shape}; each "
                    f"must begin with the batch axis, here {batch} rows"
                )
        return drafter_state

    if mesh_model(models.target) is None:
        return init(models)
    return on_mesh_of(models.target, config, init, models, like=jax.eval_shape(init, models))


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


def pass_sizes(max_tokens: int, least: int = LEAST) -> list[int]:
    """Tokens per row of prefill passes, ascending to ``max_tokens``, none of them below ``least``.

    Each is a fourth of the next one, so that few programs serve prompts of all lengths.
    """
    sizes = [max_tokens]
    while sizes[0] >= 4 * least:
        sizes.insert(0, sizes[0] // 4)
    return sizes


def pass_size(left: int, sizes: Sequence[int]) -> int:
    """Tokens of the next pass over a prompt of which so many are ``left``, padding included.

    Two passes in place of one that is half padding, where they are long enough to save time.
    """
    at = bisect.bisect_left(sizes[:-1], left)
    size, shorter = sizes[at], sizes[max(at - 1, 0)]
    return shorter if size > BUSY and left <= 2 * shorter else size


def passes_over(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Begin and size of each pass over a prompt of ``total`` tokens."""
    begin = 0
    while begin < total:
        yield begin, (size := pass_size(total - begin, sizes))
        begin += size


def default_chunk(batch: int) -> int:
    """Prompt tokens per row and prefill pass: they fill the device, and fit its memory."""
    if jax.default_backend() == "cpu":
        return 256
    return max(256, min(2048, 16384 // batch))


def rounded_capacity(needed: int) -> int:
    """``needed`` positions rounded up, so that close capacities share a program."""
    return -(-needed // CAPACITY_STEP) * CAPACITY_STEP
