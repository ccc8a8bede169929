"""`jspec generate`: decode requests, stream their text, say how it went."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from jspec.cli.requests import Refused, Request, read_requests
from jspec.cli.show import Progress, environment, print_json, print_table
from jspec.cli.text import RowText
from jspec.config import SamplingParams
from jspec.decode.draft import Drafter, ModelDraft, NoDraft, named_draft
from jspec.decode.engine import Generation
from jspec.decode.engine import generate as decode
from jspec.decode.requests import check_request, one_each
from jspec.decode.settings import OPERATIONS
from jspec.decode.state import Models
from jspec.decode.stats import Stats
from jspec.dispatch import Backends
from jspec.models.tokenizer import Tokenizer

BATCH = 8  # requests of a JSONL file that are decoded together


@dataclasses.dataclass(frozen=True)
class Served:
    """A request with its outcome."""

    request: Request
    row: RowText
    finished: str


@dataclasses.dataclass(frozen=True)
class Job:
    """All that decoding a batch needs besides the requests."""

    model: Any
    tokenizer: Tokenizer
    draft: Drafter
    gamma: int
    draft_model: Any
    backends: Backends

    def plain(self) -> Job:
        return dataclasses.replace(self, draft=NoDraft(), gamma=0, draft_model=None)


def generate(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    draft, gamma = _draft(arguments)
    backends = _backends(arguments)
    requests, refused = read_requests(arguments)
    # Plain decoding must draw with the same seeds to be compared with.
    params = one_each([r.params for r in requests], len(requests)) if requests else ()
    requests = [dataclasses.replace(r, params=p) for r, p in zip(requests, params, strict=True)]
    job = _load(arguments, draft, gamma, backends)
    fit = [r for r in requests if _fits(job, r, refused)]
    show = Show(job.tokenizer, quiet=arguments.json, single=arguments.requests is None)
    served, stats = _serve(job, fit, show)
    compare = None
    if arguments.compare and served:
        silent = Show(job.tokenizer, quiet=True, single=False)
        plainly, plain_stats = _serve(job.plain(), fit, silent)
        compare = _compare(served, stats, plainly, plain_stats)
    if arguments.json:
        print_json(_as_json(arguments, served, refused, stats, compare))
    else:
        print_table(stats, _seeds(served), compare)
    for line in refused:
        print(f"jspec: error: line {line.line}: {line.error}", file=sys.stderr)
    if any(s.finished == "interrupted" for s in served):
        return 130
    return 2 if refused else 0


def _draft(arguments: argparse.Namespace) -> tuple[Drafter, int]:
    """The drafter and gamma, checked before a model is loaded."""
    draft = named_draft(arguments.draft or ("model" if arguments.draft_model else "ngram"))
    if isinstance(draft, ModelDraft) != (arguments.draft_model is not None):
        raise ValueError("--draft model and --draft-model DIR go together; pass both or neither")
    gamma = draft.usual_gamma if arguments.gamma is None else arguments.gamma
    least = 0 if isinstance(draft, NoDraft) else 1
    if gamma < least:
        way_out = "; --draft none decodes plainly" if least else ""
        raise ValueError(f"--gamma {gamma} must be at least {least}{way_out}")
    if arguments.context is not None and arguments.context < 2:
        raise ValueError(f"--context {arguments.context} must be at least 2")
    return draft, gamma


def _backends(arguments: argparse.Namespace) -> Backends:
    """The backends of ``--backend OPERATION=NAME``, checked before a model is loaded."""
    named = {}
    for text in arguments.backend:
        operation, equals, name = text.partition("=")
        if not equals:
            raise ValueError(f"--backend {text!r} must be OPERATION=NAME, as in attention=xla")
        named[operation] = name
    backends = Backends(named)
    backends.check(OPERATIONS)
    return backends


def _load(arguments: argparse.Namespace, draft: Drafter, gamma: int, backends: Backends) -> Job:
    from jspec.models.bundled import bundled_path
    from jspec.models.checkpoint import load_model
    from jspec.models.tokenizer import load_tokenizer

    path = arguments.model or bundled_path()
    model, tokenizer = load_model(path), load_tokenizer(path)
    if arguments.context is not None:
        model.config = dataclasses.replace(model.config, max_context=arguments.context)
    if gamma >= model.config.max_context:
        raise ValueError(
            f"--gamma {gamma} must be less than the context of {model.config.max_context}; lower "
            "it (8 is usual) or raise --context"
        )
    draft_model = load_model(arguments.draft_model) if arguments.draft_model else None
    return Job(model, tokenizer, draft, gamma, draft_model, backends)


def _fits(job: Job, request: Request, refused: list[Refused]) -> bool:
    """Whether a request can be served; a line of a file that cannot is refused, others go on."""
    prompt = job.tokenizer.encode(request.prompt)
    try:
        check_request(Models(job.model, job.draft_model), prompt, request.params)
    except ValueError as error:
        if request.line is None:
            raise
        refused.append(Refused(request.line, str(error)))
        return False
    return True


class Show:
    """Streams one request's text to stdout; whole texts, with progress, for several."""

    def __init__(self, tokenizer: Tokenizer, *, quiet: bool, single: bool):
        self.tokenizer = tokenizer
        self.streams = single and not quiet
        self.prints = not single and not quiet
        self.progress = Progress(enabled=not quiet)

    def piece(self, text: str) -> None:
        if self.streams:
            sys.stdout.write(text)
            sys.stdout.flush()

    def whole(self, served: Served) -> None:
        if self.streams:
            print(flush=True)
        if self.prints:
            print(f"--- line {served.request.line}\n{served.row.text}", flush=True)


def _serve(job: Job, requests: Sequence[Request], show: Show) -> tuple[list[Served], Stats]:
    """Decode the requests in batches; Ctrl-C ends it with what there is."""
    served: list[Served] = []
    stats: list[Stats] = []
    for begin in range(0, len(requests), BATCH):
        batch = requests[begin : begin + BATCH]
        special = frozenset(job.model.config.stop_tokens)
        rows = [RowText(job.tokenizer, r.stop, special) for r in batch]
        generation = _decode(job, batch, rows, show)
        stats.append(generation.stats)
        for request, row, why in zip(batch, rows, generation.finished, strict=True):
            show.piece(row.close())
            served.append(Served(request, row, why))
            show.whole(served[-1])
        if "interrupted" in generation.finished:
            break
    return served, Stats.merged(stats)


def _decode(job: Job, batch: Sequence[Request], rows: list[RowText], show: Show) -> Generation:
    def on_tokens(row: int, tokens: tuple[int, ...]) -> bool:
        show.progress.decoded(len(tokens))
        show.piece(rows[row].feed(tokens))
        return rows[row].stopped

    wanted = sum(r.params.max_new_tokens for r in batch)
    with show.progress.batch(0 if show.streams else wanted) as on_prefill:
        return decode(
            job.model,
            [job.tokenizer.encode(r.prompt) for r in batch],
            [_with_stops(job.tokenizer, r) for r in batch],
            gamma=job.gamma,
            draft=job.draft,
            draft_model=job.draft_model,
            backends=job.backends,
            on_tokens=on_tokens,
            on_prefill=on_prefill,
        )


def _with_stops(tokenizer: Tokenizer, request: Request) -> SamplingParams:
    """Stop texts of a single token end the row in the step itself; longer ones between chunks."""
    encoded = [tokenizer.encode(text, special=False) for text in request.stop]
    single = tuple(ids[0] for ids in encoded if len(ids) == 1)
    return dataclasses.replace(request.params, stop_tokens=single)


def _compare(
    served: Sequence[Served], stats: Stats, plainly: Sequence[Served], plain: Stats
) -> dict[str, Any]:
    """Speculative against plain decoding: the same tokens? how much faster a token?

    Sampled rows spend their random numbers otherwise than plain decoding does: there, tokens that
    differ follow the same law.
    """
    speed = plain.decode_tokens_per_s
    return {
        "sampled": any(s.request.params.temperature > 0 for s in served),
        "identical": [s.row.tokens for s in served] == [p.row.tokens for p in plainly],
        "speedup": stats.decode_tokens_per_s / speed if speed else 0.0,
        "decode_tokens_per_s": speed,
    }


def _seeds(served: Sequence[Served]) -> list[str]:
    """The seeds that repeat what was sampled, and of which line; greedy requests need none."""
    requests = [s.request for s in served if s.request.params.temperature > 0]
    return [
        str(r.params.seed) if r.line is None else f"{r.params.seed} (line {r.line})"
        for r in requests
    ]


def _as_json(
    arguments: argparse.Namespace,
    served: Sequence[Served],
    refused: Sequence[Refused],
    stats: Stats,
    compare: dict[str, Any] | None,
) -> dict[str, Any]:
    def outcome(s: Served) -> dict[str, Any]:
        return {
            "text": s.row.text,
            "tokens": s.row.tokens,
            "finished": s.finished,
            "seed": s.request.params.seed,
        }

    rest = {"stats": stats.as_dict(), "compare": compare, "environment": environment()}
    if arguments.requests is None:
        return outcome(served[0]) | rest
    return {
        "results": [{"line": s.request.line} | outcome(s) for s in served],
        "errors": [dataclasses.asdict(line) for line in refused],
    } | rest
