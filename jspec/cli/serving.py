"""Requests served: one as it streams, the lines of a file side by side in an engine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

from jspec.cli.requests import CliRequest, Message
from jspec.cli.show import Progress
from jspec.config import SamplingParams
from jspec.decode.engine import Engine
from jspec.decode.generation import Interrupted
from jspec.decode.generation import generate as decode
from jspec.decode.options import DecodeOptions
from jspec.decode.processors import completed
from jspec.decode.request import Request
from jspec.decode.rows import stops_of
from jspec.decode.stats import Stats
from jspec.models.chat import ChatTemplate
from jspec.models.text import RowText
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Dense

NO_TEMPLATE = (
    "the model has no chat template for messages; give it a plain prompt, without --chat or "
    "'messages', or name a chat model by --model DIR"
)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A request that the model can serve: its prompt as ids, and its stop texts of one token."""

    request: CliRequest
    prompt: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Served:
    """A request with its outcome."""

    request: CliRequest
    row: RowText
    finished: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The served requests, and whether Ctrl-C interrupted the others."""

    served: list[Served]
    stats: Stats
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class Job:
    """All that decoding needs in addition to the requests, ``batch`` of them at a time.

    ``template`` renders conversations, None where the model has none or nobody asked for one.
    """

    model: Any
    tokenizer: Tokenizer
    template: ChatTemplate | None
    options: DecodeOptions
    batch: int

    @property
    def is_lossy(self) -> bool:
        """Whether the model reads a selection of the context."""
        return not isinstance(self.options.get("target", Dense()), Dense)

    def plain(self) -> Job:
        """The same for plain decoding."""
        options: DecodeOptions = {
            **self.options,
            "draft": None,
            "gamma": 0,
            "draft_model": None,
            "target": Dense(),
            "policy_params": None,
        }
        return dataclasses.replace(self, options=options)

    def encode(self, prompt: bytes | list[Message]) -> list[int]:
        """Token ids of a text or a conversation."""
        if isinstance(prompt, bytes):
            return self.tokenizer.encode(prompt)
        if self.template is None:
            raise ValueError(NO_TEMPLATE)
        return self.template.encode(self.tokenizer, prompt)

    def row(self, one: Ready) -> RowText:
        ends = () if one.params.ignore_eos else self.model.config.stop_tokens
        return RowText(self.tokenizer, one.request.stop, ends, one.prompt)


class Show:
    """The output of a run: streamed text of one request, or complete texts; and progress."""

    def __init__(self, *, streams: bool, prints: bool):
        self.streams = streams
        self.prints = prints
        self.progress = Progress()

    def piece(self, text: str) -> None:
        if self.streams:
            sys.stdout.write(text)
            sys.stdout.flush()

    def whole(self, served: Served) -> None:
        request = served.request
        if self.streams:
            print(flush=True)
        if self.prints:
            name = "" if request.id is None else f" {json.dumps(request.id)}"
            print(f"--- line {request.line}{name}\n{served.row.text}", flush=True)


def serve(job: Job, ready: Sequence[Ready], show: Show, name: str = "decode") -> Outcome:
    """Decode the requests; after Ctrl-C the result holds what is decoded so far."""
    nothing = Outcome([], Stats.merged([]), interrupted=False)
    if not ready:
        return nothing
    total_tokens = sum(one.params.max_new_tokens for one in ready)
    try:
        with show.progress.batch(total_tokens, name, streams=show.streams):
            is_line = ready[0].request.line is not None
            return _lines(job, ready, show) if is_line else _single(job, ready[0], show)
    except KeyboardInterrupt:
        return dataclasses.replace(nothing, interrupted=True)


def _single(job: Job, one: Ready, show: Show) -> Outcome:
    """A request of the command's own, whose text streams."""
    row, progress, interrupted = job.row(one), show.progress, False

    def on_tokens(_: int, tokens: tuple[int, ...]) -> int | None:
        text, end = row.take(tokens)
        progress.decoded(len(tokens))
        show.piece(text)
        return end

    try:
        generation = decode(
            job.model,
            [one.prompt],
            [one.params],
            on_tokens=on_tokens,
            on_prefill=progress.prefilled if progress.shown else None,
            on_compile=progress.compiling,
            **job.options,
        )
    except Interrupted as stop:
        interrupted, generation, shown = True, stop.generation, row.text
        # The row may have part of more tokens than there are.
        row = job.row(one)
        row.feed(generation.tokens[0])
        show.piece(row.text[len(shown) :])
    show.piece(row.close())
    why = "stop" if row.stopped else generation.finished[0]
    served = Served(one.request, row, why)
    show.whole(served)
    return Outcome([served], generation.stats, interrupted)


def _lines(job: Job, ready: Sequence[Ready], show: Show) -> Outcome:
    """The requests of a file, shown in its order; of interrupted ones those that have tokens."""
    ends, progress, interrupted = job.model.config.stop_tokens, show.progress, False
    processors = completed((), [one.params for one in ready])
    options: DecodeOptions = {**job.options, "processors": processors}
    engine = Engine(
        job.model,
        slots=min(job.batch, len(ready)),
        capacity=max(len(one.prompt) + one.params.max_new_tokens for one in ready),
        stop_tokens=max(1, len(ends), *(len(stops_of(one.params, ends)) for one in ready)),
        on_compile=progress.compiling,
        **options,
    )
    rows = [job.row(one) for one in ready]
    served: list[Served] = []

    def submitted(one: Ready, row: RowText) -> Request:
        def on_tokens(tokens: tuple[int, ...]) -> int | None:
            progress.decoded(len(tokens))
            return row.take(tokens)[1]

        return engine.submit(one.prompt, one.params, on_tokens=on_tokens)

    def add(one: Ready, row: RowText, why: str | None) -> None:
        row.close()
        served.append(Served(one.request, row, "stop" if row.stopped else why or "interrupted"))
        show.whole(served[-1])

    requests = [submitted(one, row) for one, row in zip(ready, rows, strict=True)]
    try:
        for one, row, request in zip(ready, rows, requests, strict=True):
            request.result()
            add(one, row, request.finished)
    except KeyboardInterrupt:
        interrupted, begin = True, len(served)
        for one, request in zip(ready[begin:], requests[begin:], strict=True):
            if request.tokens:
                # The row that was at work may have part of more tokens than there are.
                row = job.row(one)
                row.feed(request.tokens)
                add(one, row, request.finished)
    return Outcome(served, engine.stats, interrupted)
