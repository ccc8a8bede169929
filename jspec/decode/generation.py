"""Generation: a batch of requests, prefilled together and decoded until the last one ends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Unpack

import jax
import numpy as np

from jspec.checks import shown
from jspec.config import SamplingParams
from jspec.decode.checks import Prompt, agreed_params, as_ids, check_requests, logprobs_of
from jspec.decode.convert_state import convert_state
from jspec.decode.logprobs import Logprobs, TokenScores
from jspec.decode.on_mesh import placing_of
from jspec.decode.options import DecodeOptions, ResolvedOptions
from jspec.decode.prefill import check_unrecorded, rounded_capacity, start_decoding
from jspec.decode.processors import LogitsProcessor, completed
from jspec.decode.programs import OnCompile
from jspec.decode.request import Request
from jspec.decode.rows import state_of, stops_of
from jspec.decode.runner import Runner, memory_errors
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, Models, PromptRecord
from jspec.decode.stats import Stats
from jspec.sharding import place
from jspec.typing import Model

START = 16384  # positions a row that `generate` begins with where requests need more
OnTokens = Callable[[int, tuple[int, ...]], bool | int | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
        tokens: New tokens of each row.
        finished: Why each row ended: ``stop``, ``length`` or ``interrupted``.
        seeds: The seed of each row, also where the request had none.
        stats: Statistics of these tokens.
        steps: Verification steps of each row; ``len(tokens[row]) / steps[row]`` is the row's mean
            accepted length.
        logprobs: `Logprobs` of each row, numpy arrays; None for a row whose ``params`` ask for
            none.
        prompt_logprobs: `TokenScores` of each prompt's tokens but the first, likewise.
        routed_experts: The experts of each row's tokens, prompt included, but the last: int32
            ``[n - 1, mixtures, c]``, likewise.
    """

    tokens: tuple[tuple[int, ...], ...]
    finished: tuple[str, ...]
    seeds: tuple[int, ...]
    stats: Stats
    steps: tuple[int, ...]
    logprobs: tuple[Logprobs | None, ...]
    prompt_logprobs: tuple[TokenScores | None, ...]
    routed_experts: tuple[np.ndarray | None, ...]


class Interrupted(KeyboardInterrupt):
    """Ctrl-C in `generate`; ``generation`` has the tokens decoded by then."""

    def __init__(self, generation: Generation):
        super().__init__("generate was interrupted; .generation has the tokens that there were")
        self.generation = generation


def generate(
    model: Model,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    *,
    prefill_chunk: int | None = None,
    prefilled: DecodeState | None = None,
    on_tokens: OnTokens | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    on_compile: OnCompile | None = None,
    **options: Unpack[DecodeOptions],
) -> Generation:
    """Decode a ragged batch of requests, each with its own settings.

    A request with a seed gives the same tokens in any row, with any other requests in the batch and
    with any chunk size, where the model's logits are the same. Those are the tokens of plain
    decoding if it is greedy or its draft one-hot (docs/sampling.md). A sampled one with other
    drafts may give others with ``gamma="auto"``, which follows measured times. Where several
    processes share the model's devices, all of them must make the same call, and what ``on_tokens``
    returns in process 0 counts.

    Args:
        model: The target, whose tokens are decoded. A model of numpy arrays is put on the device
            first.
        prompts: Token ids of each request.
        params: Settings for all requests, or one per request.
        prefill_chunk: Prompt tokens per row and prefill pass; None chooses by the batch.
        prefilled: A state that `jspec.start_decoding` made for these prompts, with any params and
            policy, in place of a prefill; with ``exact`` it must have been made with it. It is not
            donated, so that it serves several calls (`jspec.convert_state`).
        on_tokens: Called as ``on_tokens(row, tokens)`` with a row's new tokens after each chunk. It
            may return True to end the row after them, or a number to end it after so many of them;
            the rest is dropped and counts nowhere. Where chunks are short the next one runs
            meanwhile (docs/loops.md).
        on_prefill: Called as ``on_prefill(done, total)`` with prompt tokens per row.
        on_compile: Called as ``on_compile(True)`` before a program compiles, and with False after
            it.
        **options: The drafter, gamma and other options of decoding: `DecodeOptions`.

    Returns:
        The tokens of each row, why each ended, and statistics.

    Raises:
        TypeError: For an argument of another kind.
        ValueError: As `jspec.start_decoding` does.
        MemoryError: Where the device has no room for the batch.
        Interrupted: On Ctrl-C: a `KeyboardInterrupt` with the generation so far.
    """
    ids = as_ids(prompts)
    resolved = ResolvedOptions.of(model, options)
    models, config = resolved.models, resolved.config
    settings = (config, options.get("gamma"), resolved.steps, prefill_chunk)
    rows, ends = agreed_params(models, ids, params, settings), models.target.config.stop_tokens
    # At least 32, so that requests for few tokens share a compiled step.
    resolved = resolved.with_at_most(max(32, *(row.max_new_tokens for row in rows)))
    config, requests = resolved.config, []
    for index, (prompt, row) in enumerate(zip(ids, rows, strict=True)):
        callback = functools.partial(on_tokens, index) if callable(on_tokens) else on_tokens
        requests.append(Request(prompt, row, stops_of(row, ends), callback))
    settings = {"together": True, "logprobs": logprobs_of(rows)}

    def record(records: tuple[PromptRecord, ...]) -> None:
        for request, of_prompt in zip(requests, records, strict=True):
            request._prompt_record = of_prompt

    if prefilled is not None:
        check_unrecorded(rows, "prefilled has none of prompts; leave it out")
    runner, prompt_tokens = Runner(resolved, len(ids), on_compile, **settings), 0
    needed = max(len(prompt) + row.max_new_tokens for prompt, row in zip(ids, rows, strict=True))
    size = f"{len(ids)} prompts at a time, the longest of {needed} tokens with max_new_tokens"
    way_out = "give fewer prompts at a time, shorten them, lower max_new_tokens"
    try:
        with memory_errors(size, way_out):
            with runner.chunks.clock_prefill():
                if prefilled is None:
                    capacity = rounded_capacity(first_capacity(max(map(len, ids)), needed))
                    sizes = {"capacity": capacity, "chunk": prefill_chunk, "grows": True}
                    calls = {"on_prefill": on_prefill, "run": runner.chunks.programs}
                    sizes |= {"cache_dtype": resolved.cache_dtype}
                    calls |= {"on_prompt_records": record}
                    calls |= {"processors": resolved.processors}
                    state = start_decoding(models, ids, rows, config, **sizes, **calls)
                    prompt_tokens = sum(map(len, ids))
                else:
                    state = _converted(models, prefilled, ids, rows, config, resolved.processors)
                jax.block_until_ready(state)
            runner.fill(state, range(len(ids)), requests)
            while runner.busy:
                runner.decode()
    except KeyboardInterrupt:
        raise Interrupted(_generation(runner, requests, prompt_tokens)) from None
    return _generation(runner, requests, prompt_tokens)


def _converted(
    models: Models,
    prefilled: DecodeState,
    ids: Sequence[np.ndarray],
    params: Sequence[SamplingParams],
    config: StepConfig,
    processors: Sequence[LogitsProcessor],
) -> DecodeState:
    """A state that has the prompts already, for steps of ``config`` with other ``params``."""
    tokens, lengths = jax.device_get((prefilled.tokens, prefilled.lengths))
    rows = [line[:length].tolist() for line, length in zip(tokens, lengths, strict=True)]
    if rows != [prompt.tolist() for prompt in ids]:
        raise ValueError(
            f"prefilled has {len(rows)} rows of {shown([len(row) for row in rows])} tokens, which "
            f"are not the {len(ids)} prompts; pass what start_decoding gave for them"
        )
    check_requests(models, ids, params)
    state = convert_state(models, prefilled, config)
    ends = models.target.config.stop_tokens
    row = (tokens, lengths, params, ends, state.cache, state.draft)
    state = state_of(
        *row,
        exact=state.exact,
        processors=completed(processors, params),
        vocab_size=models.target.config.vocab_size,
    )
    return place(state, placing_of(models))


def _generation(runner: Runner, requests: Sequence[Request], prompt_tokens: int) -> Generation:
    return Generation(
        tokens=tuple(request.tokens for request in requests),
        finished=tuple(request.finished or "interrupted" for request in requests),
        seeds=tuple(x.params.seed for x in requests if x.params.seed is not None),
        stats=runner.stats(len(requests), prompt_tokens),
        steps=tuple(request.steps for request in requests),
        logprobs=tuple(request.logprobs for request in requests),
        prompt_logprobs=tuple(request.prompt_logprobs for request in requests),
        routed_experts=tuple(request.routed_experts for request in requests),
    )


def first_capacity(longest_prompt: int, needed: int) -> int:
    """Positions per row to begin with: twice the prompt or `START`, if so many are needed."""
    return min(needed, max(START, 2 * longest_prompt))
