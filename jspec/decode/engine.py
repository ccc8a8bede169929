"""Continuous batching: requests come and go in the slots of a batch that decodes on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Unpack, get_args

import jax
import numpy as np

from jspec.config import SamplingParams, positive, shown
from jspec.decode.blocks import Blocks, check_blocks
from jspec.decode.checks import Prompt, agreed_params, as_ids, check_request, one_each
from jspec.decode.options import DecodeOptions, ResolvedOptions
from jspec.decode.prefill import rounded_capacity
from jspec.decode.processors import LogitsProcessor, check_served
from jspec.decode.programs import OnCompile
from jspec.decode.request import OnTokens, Request
from jspec.decode.rows import stops_of
from jspec.decode.runner import Runner, memory_errors
from jspec.decode.scheduler import Scheduler
from jspec.decode.slot_prefill import SlotPrefill
from jspec.decode.state import Models
from jspec.decode.stats import Stats
from jspec.decode.weights import VariableAndValue, WeightTypes, variables_of
from jspec.sharding import bytes_on_device, put
from jspec.typing import Array, Model

# Bytes of weights up to which a pass of 2048 tokens takes a GPU about as long as its host needs to
# launch one.
LIGHT = 2**29
OnUpdate = Literal["keep", "recompute", "abort"]
MAX_SLOTS = 2**16  # of an engine; the host handles the slots of a chunk one by one


class Engine:
    """Continuous batching: decodes up to ``slots`` requests at a time; others wait in a queue.

    `submit` queues a request, and each `step` prefills prompts and then runs ``steps_per_chunk``
    decode steps of all slots. A `step` prefills up to ``prefill_chunk`` prompt tokens for each free
    slot, for four at most, so that a long prompt stalls no one. Short ones are prefilled several
    at a time, and before a long one that is being prefilled (docs/scheduling.md). Where chunks are
    short the next one runs while one is read.

    The caller drives: nothing runs outside `step`, `run`, and reading a request. An engine is for
    one thread. It has ``slots + 1`` rows of cache, one of them for a long prompt that is being
    prefilled, and one for each shared prefix (docs/scheduling.md). An exception in `step` that is
    not a callback's, Ctrl-C included, ends the engine: every request keeps its tokens.

    A request with a seed gives the tokens that it gives alone, where the model's logits are the
    same, except a sampled one with ``gamma="auto"`` and drafts that have logits. Where several
    processes share the model's devices, all of them must make the same calls, and their callbacks
    must return the same.

    Args:
        model: The target, whose tokens are decoded. The engine is on its device or its mesh.
        slots: Requests that decode at the same time.
        capacity: Most positions of a request, prompt and new tokens. Lowered to the context of the
            model, or of the draft model, beyond which no request goes.
        stop_tokens: Most stop tokens of a request, the model's included.
        logprobs: Most of the likeliest tokens that a request asks for by ``params.logprobs``; None
            refuses requests that ask for log-probabilities.
        prompt_logprobs: The same of ``params.prompt_logprobs``. Prompts whose log-probabilities are
            asked for are prefilled one by one, and whole, also after a shared prefix.
        routed_experts: Whether requests may ask by ``params.routed_experts``. Steps record the
            experts of all tokens; prompts of requests that ask are prefilled as those above.
        cache_blocks: Blocks of 128 positions that the slots share, each request taking as many as
            it fills: the memory of the slots, in place of ``slots`` times ``capacity``. Where they
            do not suffice, the requests that were prefilled last wait, and their prompts and tokens
            are prefilled again (docs/serving.md). None: each slot has memory of its own.
        prefill_chunk: Prompt tokens per free slot and step; None is 512, 2048 for a model of up to
            512 MiB, and 256 on a CPU.
        on_compile: Called as ``on_compile(True)`` before a program compiles, and with False after
            it. After `warm_up` none compiles, whatever requests and prefixes come.
        **options: The drafter, gamma and other options of decoding: `DecodeOptions`.

    Attributes:
        slots: As above.
        capacity: As above, lowered to the context.
        cache_blocks: As above.
        is_closed: Whether an exception has ended it.

    Raises:
        TypeError: As `jspec.generate` does.
        ValueError: As `jspec.generate` does.
        MemoryError: Where the device has no room.
    """

    def __init__(
        self,
        model: Model,
        *,
        slots: int,
        capacity: int,
        stop_tokens: int = 16,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        routed_experts: bool = False,
        cache_blocks: int | None = None,
        prefill_chunk: int | None = None,
        on_compile: OnCompile | None = None,
        **options: Unpack[DecodeOptions],
    ) -> None:
        slots, capacity = positive("slots", slots, MAX_SLOTS), positive("capacity", capacity)
        stop_tokens = positive("stop_tokens", stop_tokens)
        if cache_blocks is not None:
            options = {"exact": None, **options}  # which reads rows in one piece
        resolved = ResolvedOptions.of(model, options)
        models = (resolved.models.target, resolved.models.draft)
        contexts = [x.config.max_context for x in models if x is not None]
        capacity = min(capacity, *contexts)
        usual = usual_chunk(resolved.models)
        chunk = positive("prefill_chunk", usual if prefill_chunk is None else prefill_chunk)
        if cache_blocks is not None:
            check_blocks(resolved, cache_blocks, capacity)
        self.slots, self.capacity, self.cache_blocks = slots, capacity, cache_blocks
        self._ends = tuple(resolved.models.target.config.stop_tokens)
        if len(self._ends) > stop_tokens:
            raise ValueError(
                f"stop_tokens={stop_tokens} must be at least {len(self._ends)}, which are the "
                "model's own"
            )
        self.stop_tokens = stop_tokens
        asking = SamplingParams(
            max_new_tokens=1,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            routed_experts=routed_experts,
        )
        check_request(resolved.models, [0], asking)  # a request may ask for as many
        self.logprobs, self.prompt_logprobs = asking.logprobs, asking.prompt_logprobs
        self.routed_experts = routed_experts
        self._variables: Sequence[VariableAndValue] = variables_of(
            (model, options.get("draft_model"))
        )
        self._options = resolved
        self._runner = Runner(resolved, slots, on_compile, logprobs=self.logprobs)
        self._prefix_tokens = 0
        self._is_at_work, self.is_closed, self._has_cache = False, False, True
        with self._memory():
            room, programs = rounded_capacity(capacity), self._runner.chunks.programs
            prefill = SlotPrefill(
                *(resolved, slots, room, chunk, programs),
                prompt_logprobs=self.prompt_logprobs,
                routed_experts=routed_experts,
                cache_blocks=cache_blocks,
            )
            if cache_blocks is not None:
                forget = prefill.texts.forget
                self._runner.blocks = Blocks(slots, room, cache_blocks, forget)
            self._scheduler = Scheduler(self._runner, prefill)
            self._create_slots()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """Queue a request.

        Args:
            prompt: Token ids.
            params: Settings of the request.
            on_tokens: Called as ``on_tokens(tokens)`` with new tokens after each chunk. It may
                return True to end the request after them, or a number to end it after so many of
                them. It may submit and cancel, but not `step`. What it raises ends this request
                alone, and is the request's ``error``.

        Returns:
            The queued request.

        Raises:
            ValueError: For a request that can never fit.
            RuntimeError: The engine has ended, or the weights of its model were replaced.
        """
        self._check_open()
        if not self.is_current:
            raise RuntimeError(
                "the weights of the model were replaced, and the engine decodes with those from "
                "before; pass the model to Engine.update"
            )
        (ids,) = as_ids([prompt])
        (params,) = agreed_params(self._options.models, [ids], params, self.capacity)
        check_request(self._options.models, ids, params)
        check_served(self.processors, params, "engine")
        stops = stops_of(params, self._ends)
        self._check_room(len(ids), params, stops)
        request = Request(ids.astype(np.int32), params, stops, on_tokens, self)
        self._scheduler.add(request)
        return request

    def submit_group(
        self,
        prompt: Prompt,
        params: SamplingParams = SamplingParams(),
        *,
        n: int,
        on_tokens: OnTokens | None = None,
    ) -> tuple[Request, ...]:
        """Queue ``n`` answers to one prompt, with the seed of ``params`` and those that follow it.

        They share its prefill, as all requests do that have the same prompt and follow each other.

        Args:
            prompt: As in `submit`.
            params: As in `submit`.
            n: Answers.
            on_tokens: As in `submit`, for each of them.

        Returns:
            The queued requests.

        Raises:
            ValueError: As `submit` does.
            RuntimeError: As `submit` does.
        """
        n = positive("n", n)
        first = self.submit(prompt, params, on_tokens=on_tokens)
        seed = first.params.seed
        assert seed is not None
        seeds = [(seed + index) % 2**32 for index in range(1, n)]
        others = (dataclasses.replace(first.params, seed=x) for x in seeds)
        return first, *(self.submit(prompt, x, on_tokens=on_tokens) for x in others)

    def share_prefix(self, tokens: Sequence[int]) -> tuple[Request, ...]:
        """Prefill ``tokens`` now, once for all later prompts that begin with them.

        The prefix takes the memory of a slot until `drop_prefix`. A `step` follows each piece of
        ``prefill_chunk`` tokens but the last, so that other requests go on.

        Returns:
            The requests that ended in these steps.

        Raises:
            ValueError: For a prefix that can never fit.
        """
        self._check_ready()
        (ids,) = as_ids([tokens])
        check_request(self._options.models, ids, SamplingParams(max_new_tokens=2))
        if len(ids) + 2 > self.capacity:
            raise ValueError(
                f"the prefix has {len(ids)} tokens and leaves no room in capacity={self.capacity} "
                "for a prompt after it; shorten it"
            )
        ids, ended = ids.astype(np.int32), ()
        if self._scheduler.prefill.has(ids):
            return ended
        prefill = self._scheduler.prefill

        def prefill_piece() -> Array:
            prefill.advance(row)
            return prefill.completion_of(self._runner.state, row)

        with self._device_work():
            row = prefill.prefix(ids)
            self._runner.chunks.follow(prefill_piece)
        while row.left:
            ended += self.step()
            with self._device_work():
                self._runner.chunks.follow(prefill_piece)
        prefill.share(row)
        self._prefix_tokens += len(ids)
        return ended

    def drop_prefix(self, tokens: Sequence[int]) -> None:
        """Free a shared prefix. Raises `ValueError` unless exactly these tokens are one."""
        self._check_open()
        (ids,) = as_ids([tokens])
        if not self._scheduler.prefill.drop(ids):
            raise ValueError(f"no prefix of these {len(ids)} tokens is shared; share_prefix does")

    @property
    def is_current(self) -> bool:
        """Whether it takes requests: it has not ended, and decodes with its model's weights."""
        replaced = any(variable.get_raw_value() is not x for variable, x in self._variables)
        return not self.is_closed and not replaced

    @property
    def model(self) -> Model:
        """The model that decodes, with the weights of the last `update`, as for `score_tokens`."""
        return self._options.models.target

    @property
    def version(self) -> int:
        """How many times `update` has replaced the weights."""
        return self._runner.chunks.version

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """The logits processors of its requests."""
        return self._options.processors

    @property
    def busy(self) -> bool:
        """Whether a request has not ended yet."""
        return self._runner.busy or self._scheduler.busy

    @property
    def stats(self) -> Stats:
        """Statistics so far; ``rows`` counts the requests whose prompts were prefilled."""
        prompt_tokens = self._scheduler.prompt_tokens + self._prefix_tokens
        return self._runner.stats(self._scheduler.admitted, prompt_tokens)

    def run(self) -> None:
        """`step` until no request is left."""
        while self.busy:
            self.step()

    def step(self) -> tuple[Request, ...]:
        """Prefill prompts, then run a chunk of steps; returns the requests that ended.

        The next chunk may still run when it returns, and is read by the next `step`
        (docs/scheduling.md).
        """
        self._check_ready()
        with self._device_work():
            self._scheduler.resume(self._runner.make_room())
            if self._scheduler.can_prefill:
                self._runner.chunks.follow(self._scheduler.prefill_prompts)
            waiting, fills = self._scheduler.busy, self._scheduler.can_prefill
            return self._runner.decode(waiting=waiting, fills=fills)

    def warm_up(self, params: SamplingParams | Sequence[SamplingParams] | None = None) -> None:
        """Compile every program that any mix of requests can need, before the first request.

        Args:
            params: Settings that stand for those of all requests: only steps for their modes
                compile, as those of greedy requests. None is for any settings.

        Raises:
            RuntimeError: Requests are at work, or the engine has ended.
        """
        if self.busy:
            raise RuntimeError("requests are at work; call warm_up before the first one")
        self._check_ready()
        if params is not None:
            batch = len(params) if isinstance(params, Sequence) else 1
            params = one_each(params, batch)
        with self._device_work():
            # Twice: on a mesh, what a program returns may be placed otherwise than what it took.
            for _ in range(2):
                self._runner.state = self._scheduler.prefill.warmed(self._runner.state)
                self._runner.warm(params)
            jax.block_until_ready(self._runner.state)

    def update(
        self,
        weights: Any,
        *,
        on_update: OnUpdate = "keep",
        policy_params: Any = None,
        donate: bool = False,
    ) -> int:
        """Replace the weights of the model; nothing compiles.

        Chunks that run end with the weights from before. Quantised copies for drafts and parameters
        of policies that the engine made are made again, and shared prefixes are dropped. Prompts
        that are being prefilled begin again.

        An array that has the dtype and the sharding of the engine's is taken as it is: nothing is
        copied, and a training step that donates it takes it from the engine, which then needs
        another update before its next step. Of one that is replicated over several devices, so is
        the copy of the engine's device. Any other is cast and moved, after the engine's earlier
        weights were dropped.

        Args:
            weights: A pytree of the model's own structure, an `nnx.State`, or a model.
            on_update: What becomes of requests that have tokens in a slot. ``"keep"``: they go on
                with their cache, made by the earlier weights. ``"recompute"``: prompt and tokens
                are prefilled again with the new weights. ``"abort"``: they end.
            policy_params: New parameters of the policy, where the caller passed such to the engine;
                None leaves those.
            donate: Whether arrays of ``weights`` that must be copied are freed one by one.

        Returns:
            The new `version`, which `Request.versions` has for each token.

        Raises:
            ValueError: Where ``weights`` do not fit the model; the engine goes on with its own.
            MemoryError: Where the device has no room; the engine has ended.
        """
        self._check_open()
        check_on_update(on_update)
        types = self._weight_types
        arrays = types.matched(weights, self._options.flat)
        with self._device_work():
            self._begin_update(on_update, types.blank)
            params_of = None if policy_params is None else lambda model: policy_params
            target = types.model_of(arrays, donate=donate)
            self._end_update(self._options.updated(target, params_of))
        return self.version

    def release_cache(self) -> None:
        """Free the memory of the cache until `restore_cache`, as for a training step.

        Shared prefixes are dropped, and requests in slots wait: their prompts and tokens are
        prefilled again. `submit`, `update` and `Request.cancel` go on to work.
        """
        if not self._has_cache:
            return
        with self._device_work():
            self._preempt()
            running = [chunk.record for chunk in self._runner.chunks.running]
            jax.block_until_ready((self._runner.state, running))
            self._runner.chunks.wait_for_prompts()
            self._runner.close()
            self._scheduler.prefill.release()
            self._has_cache = False

    def restore_cache(self) -> None:
        """Make the cache again that `release_cache` freed. Compiles nothing.

        Raises:
            MemoryError: Where the device has no room; the engine has ended.
        """
        if self._has_cache:
            return
        with self._device_work():
            self._scheduler.prefill.restore()
            self._create_slots()
            self._has_cache = True

    def _create_slots(self) -> None:
        state = self._scheduler.prefill.started()
        stops = np.full((self.slots, self.stop_tokens), -1, np.int32)
        stops = put(stops, state.stop_tokens.sharding)
        state = dataclasses.replace(state, routed_experts=self.routed_experts)
        self._runner.reset(dataclasses.replace(state, stop_tokens=stops))

    def _preempt(self) -> None:
        """Queue all requests again whose prompts were prefilled."""
        self._scheduler.restart()
        self._scheduler.resume(self._runner.preempt())

    @functools.cached_property
    def _weight_types(self) -> WeightTypes:
        return WeightTypes(self._options.models.target)

    def _begin_update(self, on_update: OnUpdate, blank: Model) -> None:
        """Drop the weights, and what was computed with them; the target is ``blank`` then."""
        if on_update == "abort":
            for request in self._runner.preempt():
                request._end("aborted")
        elif on_update == "recompute":
            self._preempt()
        self._scheduler.restart()
        if self._has_cache:
            self._scheduler.prefill.flush()
        self._variables = []
        self._use(self._options.without_weights(blank))

    def _end_update(self, options: ResolvedOptions) -> None:
        """Go on with the models of ``options``, which have new weights."""
        self._use(self._options.with_models_of(options))
        self._variables = options.variables
        self._runner.chunks.version += 1

    def _use(self, options: ResolvedOptions) -> None:
        self._options = self._runner.chunks.options = options
        self._scheduler.prefill.options = options

    def _check_ready(self) -> None:
        """Raise `RuntimeError` unless the engine has its cache and its weights."""
        self._check_open()
        if not self._has_cache:
            raise RuntimeError("the cache was released; call restore_cache before the next step")
        if any(x.is_deleted() for x in jax.tree.leaves(self._options.flat)):
            raise RuntimeError(
                "weights of the engine were deleted, as a step does that they are donated to; pass "
                "new ones to Engine.update before the next step"
            )

    def _check_room(self, prompt_tokens: int, params: SamplingParams, stops: Sequence[int]) -> None:
        """Raise `ValueError` for a request of more than the engine was made for."""
        needed = prompt_tokens + params.max_new_tokens
        if needed > self.capacity:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens, which with max_new_tokens="
                f"{params.max_new_tokens} exceeds capacity={self.capacity}; shorten the prompt, "
                "lower max_new_tokens, or make the engine with a larger capacity"
            )
        if len(stops) > self.stop_tokens:
            raise ValueError(
                f"the request has {len(stops)} stop tokens, the model's included, and the engine "
                f"room for stop_tokens={self.stop_tokens}; make it with more"
            )
        for name in ("logprobs", "prompt_logprobs"):
            asked, limit = getattr(params, name), getattr(self, name)
            if asked is not None and (limit is None or asked > limit):
                raise ValueError(
                    f"the request asks for {name}={asked}, and the engine was made with "
                    f"{name}={limit}; make it with as many"
                )
        if params.routed_experts and not self.routed_experts:
            raise ValueError(
                "the request asks for routed_experts=True; make the engine with the same"
            )

    def _remove(self, request: Request) -> None:
        """Remove a request from the queue, from prefill or from its slot."""
        self._scheduler.remove(request)
        self._runner.remove(request)

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the engine ended by an exception in a step; make another one")

    @contextlib.contextmanager
    def _device_work(self) -> Iterator[None]:
        """Work on the device. An exception in it ends the engine: the state may be incomplete."""
        self._check_open()
        if self._is_at_work:
            raise RuntimeError("a callback may not drive the engine that calls it; return first")
        self._is_at_work = True
        try:
            with self._memory():
                for chunk in self._runner.chunks.running:
                    self._runner.chunks.resume(chunk)
                yield
        except BaseException as error:
            self._close(error)
            raise
        finally:
            self._is_at_work = False

    def _close(self, error: BaseException) -> None:
        """End every request, and free the memory of the device."""
        self.is_closed = True
        for request in [*self._scheduler.requests, *self._runner.requests]:
            if request.finished is None:
                request.error = error if isinstance(error, Exception) else None
                request._end("interrupted")
        self._scheduler.close()
        if self._has_cache:
            self._runner.close()

    def _memory(self) -> contextlib.AbstractContextManager[None]:
        size = f"{self.slots} slots of {self.capacity} positions"
        if self.cache_blocks is None:
            return memory_errors(size, "lower slots or capacity")
        return memory_errors(f"{size} in {self.cache_blocks} blocks", "lower cache_blocks")


def check_on_update(on_update: Any) -> None:
    """Raise `ValueError` for what `Engine.update` does not take."""
    if on_update not in get_args(OnUpdate):
        raise ValueError(
            f"on_update={shown(on_update)} must be one of {', '.join(get_args(OnUpdate))}"
        )


def usual_chunk(models: Models) -> int:
    """Prompt tokens of a prefill pass: decoding slots wait for it."""
    if jax.default_backend() == "cpu":
        return 256
    return 2048 if bytes_on_device(models) <= LIGHT else 512
