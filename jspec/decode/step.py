"""One speculative step: draft, verify, commit, learn; and a chunk of steps in one program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.cache.layout import check_rings
from jspec.decode.checks import check_started
from jspec.decode.draft import Drafted, NoDraft, TargetPass
from jspec.decode.draft.autoregressive import within_limits
from jspec.decode.draft.drafter import learn_with
from jspec.decode.logprobs import Logprobs, verified_logprobs
from jspec.decode.on_mesh import jit_steps, mesh_model, on_mesh_of
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, FlatModels, Models, StepRecord, vocabulary_axes
from jspec.decode.trees import check_tree, of_path, pack
from jspec.models.experts import recorded_experts, routing_shape, stacked_experts
from jspec.ops.commit import Rows, commit, verify_and_commit
from jspec.ops.sample import Role, greedy, sample
from jspec.ops.stochastic import verify_stochastic
from jspec.ops.tree import Tree, ancestors_of, depths_of, verify_tree
from jspec.ops.verify import Verified, verify_greedy
from jspec.ops.vocabulary import Axes
from jspec.policies.attend import run_selected
from jspec.policies.collect import run_collecting
from jspec.policies.dense import DenseAttend
from jspec.policies.offload import with_room_for_device_rows
from jspec.policies.policy import with_pages
from jspec.sharding import varying_axes, varying_over
from jspec.typing import Array, Model


@jit_steps(static_argnames="config", donate_argnames="state")
def speculative_step(models: Model | Models, state: DecodeState, config: StepConfig) -> DecodeState:
    """Draft up to gamma tokens, verify them in one pass, and commit the accepted ones.

    One XLA program. Each ``config`` compiles once; draft lengths, row limits, sampling settings and
    ``done`` are traced and compile nothing. `jspec.start_decoding` makes the first state.

    Args:
        models: The target, or `Models` with a draft model or a policy's parameters.
        state: The batch. It is donated: use the returned one.
        config: The static settings of the step.

    Returns:
        The state after the step.
    """
    return decode_step(models, state, config)[0]


@jit_steps(static_argnames=("config", "steps"), donate_argnames="state")
def decode_chunk(
    models: Model | Models | FlatModels, state: DecodeState, config: StepConfig, steps: int
) -> tuple[DecodeState, StepRecord]:
    """``steps`` speculative steps in one program.

    Args:
        models: As `speculative_step` takes them.
        state: The batch. It is donated: use the returned one.
        config: The static settings of the steps.
        steps: How many steps to run.

    Returns:
        The state after the steps, and their records, stacked: ``[steps, B, ...]``.
    """
    policy_params = Models.of(models).policy
    cache = with_room_for_device_rows(state.cache, config.cache_policy, policy_params)
    state = _with_processor_states(models, dataclasses.replace(state, cache=cache), config)
    state, records = lax.scan(
        lambda state, _: decode_step(models, state, config), state, length=steps
    )
    cache = dataclasses.replace(state.cache, device_rows=())
    return _without_processor_states(dataclasses.replace(state, cache=cache)), records


def _with_processor_states(
    models: Model | Models | FlatModels, state: DecodeState, config: StepConfig
) -> DecodeState:
    """``state`` with the states of its logits processors, computed once for all steps."""
    if state.processing is None:
        return state
    start = DecodeState.with_processor_states
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    # Placed as ``done``: over the batch axis alone.
    like = jax.tree.map(lambda _: state.done, jax.eval_shape(start, shapes).processing)
    like = dataclasses.replace(state, processing=like)
    return on_mesh_of(Models.of(models).target, config, start, state, like=like)


def _without_processor_states(state: DecodeState) -> DecodeState:
    if state.processing is None:
        return state
    return dataclasses.replace(state, processing=state.processing.stopped())


@jax.jit(static_argnames=("config", "max_tokens"), donate_argnames="state")
def sync_drafter(
    models: Model | Models | FlatModels, state: DecodeState, config: StepConfig, max_tokens: int
) -> DecodeState:
    """The state with up to ``max_tokens`` more of each row's tokens in the drafter's own state.

    ``state`` is donated. After plain steps, call it until no token can be missing, before the
    drafter drafts again.
    """

    def sync(models: Models, state: DecodeState) -> DecodeState:
        args = (models, state.draft, state.tokens, state.cache.lengths, max_tokens)
        return dataclasses.replace(state, draft=config.draft.sync(*args))

    models = Models.of(models)
    with config.of_models():
        return on_mesh_of(models.target, config, sync, models, state, like=state)


def decode_step(
    models: Model | Models | FlatModels, state: DecodeState, config: StepConfig
) -> tuple[DecodeState, StepRecord]:
    """The body of `speculative_step`, for a jitted loop of the caller's own.

    Takes what `speculative_step` takes, and donates nothing. Returns the state after the step, and
    its `StepRecord`.
    """
    models = Models.of(models)
    like = state, _empty_record(models, state, state.done[:, None], 1)
    with config.of_models():
        body = functools.partial(_step, config)
        return on_mesh_of(models.target, config, body, models, state, like=like)


def _step(config: StepConfig, models: Models, state: DecodeState) -> tuple[DecodeState, StepRecord]:
    check_rings(state.cache.specs, state.cache.layouts, config.gamma)
    check_started(state.exact, config.exact)
    _check_drafter(config, models, state)
    if state.processing is not None and not state.processing.states:
        state, record = _step(config, models, state.with_processor_states())
        return _without_processor_states(state), record
    drafted, state = draft(models, state, config)
    drafted = within_limits(drafted, state, config.gamma)
    if state.processing is not None:
        # What processors do depends on the tokens before a node, which they take one by one.
        drafted = drafted.first_path
    if _may_branch(config, models):
        return _narrowest_step(config, models, state, drafted)
    return _verified_step(config, models, state, drafted)


def _check_drafter(config: StepConfig, models: Models, state: DecodeState) -> None:
    """Raise `ValueError` where the drafter of the steps has a state and the batch has none."""
    if state.draft is not None:
        return
    batch, capacity = state.tokens.shape
    init = config.draft.init
    if jax.eval_shape(lambda: init(models, batch, capacity, config.gamma)) is not None:
        name = type(config.draft).__name__
        raise ValueError(
            f"a state that was started without {name} has no steps with it; give start_decoding a "
            "config with that draft, or pass the state through jspec.convert_state"
        )


def _may_branch(config: StepConfig, models: Models) -> bool:
    """Whether the width of a pass may depend on the draft: a GPU would wait for the host.

    Drafters with logits draft in every step.
    """
    looks_up = config.draft.traits.one_hot and not isinstance(config.draft, NoDraft)
    on_one_cpu = jax.default_backend() == "cpu" and mesh_model(models.target) is None
    return config.gamma > 0 and looks_up and on_one_cpu


def _narrowest_step(
    config: StepConfig, models: Models, state: DecodeState, drafted: Drafted
) -> tuple[DecodeState, StepRecord]:
    """The rest of a step after the draft, with a pass over one token where no row drafted.

    By two loops of one pass or none: a conditional would copy the cache.
    """
    is_wide = drafted.lengths.any().astype(jnp.int32)
    packed = np.zeros((len(state.done), config.gamma + 5), np.int32)
    record: Any = _empty_record(models, state, packed, config.gamma + 1)
    # Inside a caller's `jax.shard_map`, what the passes record differs between devices.
    carry = state, varying_over(varying_axes(state.done), record)
    for step, begin, end in ((_plain_step, is_wide, 1), (_verified_step, 0, is_wide)):
        carry = lax.fori_loop(
            begin, end, lambda _, carry, step=step: step(config, models, carry[0], drafted), carry
        )
    return carry


def _plain_step(
    config: StepConfig, models: Models, state: DecodeState, drafted: Drafted
) -> tuple[DecodeState, StepRecord]:
    """The rest of a step in which no row drafted: a pass over one token."""
    plain, batch = dataclasses.replace(config, gamma=0), len(state.tokens)
    state, record = _verified_step(plain, models, state, Drafted.empty(batch, 0))
    padding = jnp.full((batch, config.gamma), -1, jnp.int32)
    others = jax.tree.map(
        lambda x: jnp.pad(x, [(0, 0), (0, config.gamma), *[(0, 0)] * (x.ndim - 2)]),
        (record.logprobs, record.routed_experts),
    )
    return state, StepRecord(jnp.concatenate([record.packed, padding], axis=1), *others)


def _empty_record(models: Models, state: DecodeState, packed: Any, tokens: int) -> StepRecord:
    """``packed`` and zeros for so many tokens a row, in the structure of the state's records."""
    shape = len(state.tokens), tokens
    logprobs = None if state.logprobs is None else Logprobs.empty(shape, state.logprobs)
    routing = routing_shape(models.target.config) if state.routed_experts else None
    experts: Any = None if routing is None else np.zeros((*shape, *routing), np.int32)
    return StepRecord(packed, logprobs, experts)


def _verified_step(
    config: StepConfig, models: Models, state: DecodeState, drafted: Drafted
) -> tuple[DecodeState, StepRecord]:
    """The rest of a step after the draft: verify, commit and learn."""
    model_logits, state, target_pass = run_target(models, state, drafted, config)
    before = state.cache.lengths
    axes = vocabulary_axes(models.target)
    logits = model_logits
    if state.processing is not None:
        logits = state.processing.process(logits, drafted.tokens, axes)
    verified, path, state, record = verify(state, drafted, logits, config, axes)
    if state.logprobs is not None:
        of_tokens = of_path(model_logits, path), of_path(logits, path)
        logprobs = verified_logprobs(state, *of_tokens, record.tokens, axes)
        record = dataclasses.replace(record, logprobs=logprobs)
    if target_pass.routed_experts is not None:
        routed_experts = of_path(target_pass.routed_experts, path)
        record = dataclasses.replace(record, routed_experts=routed_experts)
    if state.processing is not None:
        state = dataclasses.replace(state, processing=state.processing.extended(record.tokens))
    if path is not None:
        state = dataclasses.replace(state, cache=pack(state.cache, before, path, record))
    after, max_new = state.cache.lengths, config.gamma + 1
    cache = with_pages(config.cache_policy, models.policy, state.cache, before, after, max_new)
    state = dataclasses.replace(state, cache=cache)
    return learn_with(config.draft, state, target_pass, verified), record


@jax.named_scope("draft")
def draft(models: Models, state: DecodeState, config: StepConfig) -> tuple[Drafted, DecodeState]:
    """Draft tokens, drawn with random numbers of this step's own where the law needs them."""
    if config.gamma == 0:
        return Drafted.empty(len(state.tokens), 0), state
    sampling = state.sampling
    if state.mode != "greedy" and (config.rule == "block" or config.numbers_of_step):
        state = dataclasses.replace(state, sampling=sampling.in_block(state.lengths))
    result = config.draft.draft(models, state, config.gamma)
    drafted, state = check_drafted(config, state, result)
    return drafted, dataclasses.replace(state, sampling=sampling)


def check_drafted(
    config: StepConfig, state: DecodeState, result: tuple[Drafted, DecodeState]
) -> tuple[Drafted, DecodeState]:
    """``result`` of `Drafter.draft`. Raises `TypeError` where it is not what that returns."""
    name, batch = f"{type(config.draft).__name__}.draft", len(state.tokens)
    if not isinstance(result, tuple) or [*map(type, result)] != [Drafted, DecodeState]:
        raise TypeError(f"{name} must return (Drafted, DecodeState), not {type(result).__name__}")
    drafted = result[0]
    for field, shape in (("tokens", (batch, config.gamma)), ("lengths", (batch,))):
        x = getattr(drafted, field)
        if x.shape != shape or x.dtype != jnp.int32:
            raise TypeError(f"{name} returned {field} {x.dtype} {x.shape}; must be int32 {shape}")
    if drafted.parents is not None:
        check_tree(config, state, drafted)
    return result


@jax.named_scope("verification")
def run_target(
    models: Models, state: DecodeState, drafted: Drafted, config: StepConfig
) -> tuple[Array, DecodeState, TargetPass]:
    """Run the target over the last token and the draft; its logits ``[B, gamma + 1, V]``."""
    tokens = jnp.concatenate([state.last_token[:, None], drafted.tokens], axis=1)
    index = jnp.arange(config.gamma + 1, dtype=jnp.int32)[None]
    is_token = (index <= drafted.lengths[:, None]) & ~state.done[:, None]
    context_len = state.cache.lengths
    positions = jnp.where(is_token, context_len[:, None] + index, -1)
    tree, text_positions = None, positions
    if drafted.parents is not None:
        tree = Tree.of(drafted.parents, context_len, is_token)
        text_positions = tree.positions
    settings = {"policy": config.cache_policy, "policy_params": models.policy}
    collected, collect_policy = None, config.draft.collect_policy
    with config.of_target(), recorded_experts() as experts:
        if config.is_lossy:
            hidden, cache, _ = run_selected(
                *(models.target, tokens, positions, state.cache, context_len, 1), **settings
            )
        elif collect_policy is not None:
            hidden, cache, collected = run_collecting(
                *(models.target, tokens, positions, state.cache),
                policy=collect_policy,
                policy_params=models.policy,
            )
        else:
            attend = DenseAttend(positions, tree=tree, **settings)
            hidden, cache = models.target(tokens, text_positions, attend, state.cache)
        logits = models.target.logits(hidden)
    state = dataclasses.replace(state, cache=cache)
    routed_experts = stacked_experts(experts, tokens) if state.routed_experts else None
    return logits, state, TargetPass(text_positions, hidden, collected, routed_experts)


def verify(
    state: DecodeState,
    drafted: Drafted,
    logits: Array,
    config: StepConfig,
    axis_name: Axes | None = None,
) -> tuple[Verified, Array | None, DecodeState, StepRecord]:
    """Verify the draft by the target's ``logits``, and commit tokens to each row that is not done.

    A shorter length rolls back the rejected tokens. ``axis_name`` as in `jspec.ops.sample.sample`.
    The second result is the path of `jspec.ops.verify_tree`, None for a draft that is no tree.
    """
    rows = Rows(state.tokens, state.cache.lengths, state.done)
    is_fused = axis_name is None and "verify_greedy" not in config.backends
    path, lengths = None, drafted.lengths
    if drafted.parents is not None:
        depths = depths_of(ancestors_of(drafted.parents))
        target_tokens = _target_tokens(state, logits, axis_name, depths)
        arguments = (drafted.tokens, target_tokens, drafted.parents, lengths, state.stop_tokens)
        verified, path = verify_tree(*arguments)
        committed, rows = commit(verified, state.limits, rows)
        # What counts as drafted is what could be accepted: the depth of the tree.
        is_node = jnp.arange(config.gamma, dtype=jnp.int32)[None] < lengths[:, None]
        lengths = jnp.where(is_node, depths[:, 1:], 0).max(axis=1)
    elif state.mode == "greedy" and is_fused:
        verified, committed, rows = verify_and_commit(
            drafted.tokens,
            logits,
            drafted.lengths,
            state.stop_tokens,
            state.limits,
            rows,
        )
    else:
        verified = _verify_chain(state, drafted, logits, config, axis_name)
        committed, rows = commit(verified, state.limits, rows)
    cache = state.cache.with_lengths(rows.cached)
    state = dataclasses.replace(state, cache=cache, tokens=rows.tokens, done=rows.done)
    # Counted here, not by the operation: a record that XLA need not compute would be copied on a
    # stream of its own, for which a GPU waits 20 us a step (H200).
    cut = verified.committed <= verified.accepted
    counted = jnp.where(cut, verified.accepted, lengths)
    return verified, path, state, StepRecord.of(counted, rows.done, committed)


def _verify_chain(
    state: DecodeState,
    drafted: Drafted,
    logits: Array,
    config: StepConfig,
    axis_name: Axes | None,
) -> Verified:
    """Verify a draft that is no tree, by its tokens or, with draft logits, by their laws."""
    if state.mode == "greedy" or drafted.logits is None:
        is_named = "verify_greedy" in config.backends
        return verify_greedy(
            drafted.tokens,
            _target_tokens(
                state, logits, axis_name, jnp.arange(config.gamma + 1, dtype=jnp.int32)[None]
            ),
            drafted.lengths,
            state.stop_tokens,
            # Without a draft there is nothing to verify, and some kernels refuse that.
            implementation="xla" if is_named and not config.gamma else None,
        )
    sampling = state.sampling
    if config.rule == "token" and config.numbers_of_step:
        sampling = sampling.in_block(state.lengths)
    return verify_stochastic(
        drafted.tokens,
        logits,
        drafted.lengths,
        state.stop_tokens,
        sampling,
        state.lengths,
        draft_logits=drafted.logits,
        rule=config.rule,
        filtered=state.mode == "filtered",
        axis_name=axis_name,
    )


def _target_tokens(
    state: DecodeState, logits: Array, axis_name: Axes | None, depths: Array
) -> Array:
    """The token that plain decoding takes after each token, int32 ``[B, gamma + 1]``.

    ``depths [B or 1, gamma + 1]``: how many tokens it is after the last known one.
    Sampled rows draw it with the random number that plain decoding has there: a one-hot draft token
    that equals it is accepted with the target's probability (docs/sampling.md, *One-hot drafts*).
    """
    if state.mode == "greedy":
        return greedy(logits, axis_name)
    return sample(
        logits,
        state.sampling,
        state.lengths[:, None] + depths,
        Role.BONUS,
        filtered=state.mode == "filtered",
        axis_name=axis_name,
    )
