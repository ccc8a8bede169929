"""`jspec generate`: decode requests, stream their text, say how it went."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jspec.cli import demo
from jspec.cli.compile_cache import keep_programs
from jspec.cli.devices import named_mesh, take_virtual_devices
from jspec.cli.output import error_of, result_of, whole_file, write_lines
from jspec.cli.requests import Message, Refused, Request, one_line, read_requests
from jspec.cli.settings import read_settings
from jspec.cli.show import Progress, environment, print_json, print_table
from jspec.config import SamplingParams
from jspec.decode.draft import Drafter, NoDraft, named_draft
from jspec.decode.engine import Gamma, Generation, Interrupted
from jspec.decode.engine import generate as decode
from jspec.decode.requests import check_request, one_each
from jspec.decode.settings import OPERATIONS, StepConfig
from jspec.decode.state import Models
from jspec.decode.stats import Stats
from jspec.dispatch import Backends
from jspec.helix.mesh import HelixConfig
from jspec.helix.sharded import decoder_sharding, shard
from jspec.models.text import RowText, with_stops
from jspec.models.tokenizer import Tokenizer
from jspec.ops.stochastic import Rule
from jspec.policies import Dense, Policy, named_policy
from jspec.policies.hata import with_hashes

if TYPE_CHECKING:
    from jspec.models.chat import ChatTemplate

NO_TEMPLATE = (
    "the model has no chat template for messages; give it a plain prompt, without --chat or "
    "'messages', or name a chat model by --model DIR"
)


@dataclasses.dataclass(frozen=True)
class Ready:
    """A request that the model can serve: its prompt as ids, and its stop texts of one token."""

    request: Request
    prompt: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Served:
    """A request with its outcome."""

    request: Request
    row: RowText
    finished: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was served, and whether Ctrl-C ended it before all was."""

    served: list[Served]
    stats: Stats
    interrupted: bool


@dataclasses.dataclass(frozen=True)
class Job:
    """All that decoding needs besides the requests; ``batch`` of them at a time.

    ``target`` is the policy whose selection the model reads, dense where decoding is lossless.
    ``template`` renders conversations, None where the model has none or nobody asked for one.
    """

    model: Any
    tokenizer: Tokenizer
    template: ChatTemplate | None
    draft: Drafter
    gamma: Gamma
    draft_model: Any
    target: Policy
    rule: Rule
    policy_arrays: Any
    backends: Backends
    batch: int

    def plain(self) -> Job:
        none = {"draft_model": None, "policy_arrays": None}
        return dataclasses.replace(self, draft=NoDraft(), gamma=0, target=Dense(), **none)

    def encode(self, prompt: bytes | list[Message]) -> list[int]:
        """Token ids of a text or a conversation."""
        if isinstance(prompt, bytes):
            return self.tokenizer.encode(prompt)
        if self.template is None:
            raise ValueError(NO_TEMPLATE)
        return self.template.encode(self.tokenizer, prompt)

    def row(self, request: Request) -> RowText:
        special = frozenset(self.model.config.stop_tokens)
        return RowText(self.tokenizer, request.stop, special)


def generate(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.devices is not None:
        take_virtual_devices(arguments.devices)
    helix = None if arguments.helix is None else named_mesh(arguments.helix)
    target = named_policy(arguments.policy or "dense")
    draft, gamma = _draft(arguments, is_lossy=not isinstance(target, Dense))
    backends = backends_of(arguments)
    if arguments.batch < 1:
        raise ValueError(f"--batch {arguments.batch} must be at least 1")
    if arguments.output is not None and arguments.requests is None:
        raise ValueError("--output goes with --requests; for one prompt, redirect stdout")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(whole_file(arguments.output)) if arguments.output else None
        requests, refused = read_requests(arguments)
        if arguments.demo and not arguments.json:
            print(demo.introduction(), file=sys.stderr, flush=True)
        if arguments.compile_cache:
            keep_programs()
        # Plain decoding must draw with the same seeds to be compared with.
        params = one_each([r.params for r in requests], len(requests)) if requests else ()
        requests = [dataclasses.replace(r, params=p) for r, p in zip(requests, params, strict=True)]
        talks = not all(isinstance(request.prompt, bytes) for request in requests)
        job = load(arguments, draft, gamma, target, backends, talks, helix)
        ready = [r for r in (ready_for(job, request, refused) for request in requests) if r]
        return _run(arguments, job, ready, refused, file)


def _run(
    arguments: argparse.Namespace,
    job: Job,
    ready: Sequence[Ready],
    refused: list[Refused],
    file: TextIO | None,
) -> int:
    """Serve what is ready, show what came of it, and return the exit code."""
    prints = not arguments.json and file is None
    single = arguments.requests is None
    show = Show(streams=prints and single, prints=prints and not single)
    outcome = _serve(job, ready, show)
    interrupted, compare = outcome.interrupted, None
    if interrupted and not outcome.served:
        raise KeyboardInterrupt
    if arguments.compare and outcome.served and not interrupted:
        silent = Show(streams=False, prints=False)
        plainly = _serve(job.plain(), ready, silent, name="decode plainly")
        interrupted = plainly.interrupted
        is_lossy = not isinstance(job.target, Dense)
        compare = None if interrupted else _compare(outcome, plainly, lossless=not is_lossy)
    results = [result_of(s.request, s.row.text, s.row.tokens, s.finished) for s in outcome.served]
    errors = [error_of(line) for line in refused]
    if file is not None:
        write_lines(file, results + errors)
    if arguments.json:
        rest = {"stats": outcome.stats.as_dict(), "compare": compare, "environment": environment()}
        found = results[0] if single else {"results": results, "errors": errors}
        print_json(found | rest)
    else:
        answer = demo.verdict(outcome.served[0].row.text) if arguments.demo else None
        print_table(outcome.stats, _seeds(outcome.served), compare, answer)
    for line in refused:
        print(f"jspec: error: line {line.line}: {line.error}", file=sys.stderr)
    if interrupted:
        return 130
    return 2 if refused else 0


def _draft(arguments: argparse.Namespace, *, is_lossy: bool) -> tuple[Drafter, Gamma]:
    """The drafter and gamma, checked before a model is loaded."""
    usual = "none" if is_lossy else "model" if arguments.draft_model else "ngram"
    text, gamma = arguments.draft or usual, arguments.gamma
    if arguments.settings is not None:
        if arguments.draft is not None or gamma is not None:
            raise ValueError("--settings names draft and gamma; leave out --draft and --gamma")
        text, gamma = read_settings(arguments.settings)
    draft = named_draft(text)
    if is_lossy and (gamma or not isinstance(draft, NoDraft)):
        raise ValueError(
            f"--policy {arguments.policy} decodes token by token; leave out --draft, --gamma and "
            f"--settings, or pass --draft {arguments.policy} for lossless decoding"
        )
    if draft.needs_model != (arguments.draft_model is not None):
        raise ValueError("--draft model and --draft-model DIR go together; pass both or neither")
    gamma = draft.usual_gamma if gamma is None else gamma
    least = 0 if isinstance(draft, NoDraft) else 1
    if gamma == "auto" and not least:
        raise ValueError("--gamma auto chooses how much a drafter drafts; --draft none has none")
    if gamma != "auto" and gamma < least:
        way_out = "; --draft none decodes plainly" if least else ""
        raise ValueError(f"--gamma {gamma} must be at least {least}{way_out}")
    if arguments.context is not None and arguments.context < 2:
        raise ValueError(f"--context {arguments.context} must be at least 2")
    return draft, gamma


def backends_of(arguments: argparse.Namespace) -> Backends:
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


def load(
    arguments: argparse.Namespace,
    draft: Drafter,
    gamma: Gamma,
    target: Policy,
    backends: Backends,
    talks: bool,
    helix: HelixConfig | None = None,
) -> Job:
    """The models, on the mesh of ``helix`` if so, what a policy takes of them, and with ``talks``
    the chat template."""
    from jspec.eval.sample import prepared
    from jspec.models.bundled import bundled_path
    from jspec.models.chat import load_chat_template
    from jspec.models.checkpoint import load_model
    from jspec.models.tokenizer import load_tokenizer

    path = arguments.model or bundled_path()
    template = load_chat_template(path) if talks else None
    if arguments.chat and template is None:
        raise ValueError(NO_TEMPLATE)
    sharding = None if helix is None else decoder_sharding(helix)
    model, tokenizer = load_model(path, sharding=sharding), load_tokenizer(path)
    if arguments.context is not None:
        model.config = dataclasses.replace(model.config, max_context=arguments.context)
    if isinstance(gamma, int) and gamma >= model.config.max_context:
        raise ValueError(
            f"--gamma {gamma} must be less than the context of {model.config.max_context}; lower "
            "it (8 is usual) or raise --context"
        )
    draft_model = load_model(arguments.draft_model) if arguments.draft_model else None
    keeps = with_hashes(StepConfig(draft.usual_gamma, draft, target=target).keeps, Path(path))
    arrays = prepared(keeps, model, tokenizer)
    own = model if helix is None else shard(model, helix)
    return Job(
        model=own,
        tokenizer=tokenizer,
        template=template,
        draft=draft,
        gamma=gamma,
        draft_model=draft.prepare(Models(own, draft_model)).draft,
        target=target,
        rule=arguments.rule,
        policy_arrays=arrays,
        backends=backends,
        batch=arguments.batch,
    )


def ready_for(job: Job, request: Request, refused: list[Refused]) -> Ready | None:
    """The request for the model; a line that it cannot serve is refused, others go on."""
    try:
        prompt = job.encode(request.prompt)
        check_request(Models(job.model, job.draft_model), prompt, request.params)
        return Ready(request, prompt, with_stops(request.params, request.stop, job.tokenizer))
    except ValueError as error:
        if request.line is None:
            raise
        refused.append(Refused(request.line, one_line(str(error)), request.id))
        return None


class Show:
    """What a run shows: one request's text as it comes, or whole texts; and progress."""

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


def _serve(job: Job, ready: Sequence[Ready], show: Show, name: str = "decode") -> Outcome:
    """Decode the requests in batches; Ctrl-C ends it with what there is."""
    served: list[Served] = []
    stats: list[Stats] = []
    interrupted = False
    try:
        for begin in range(0, len(ready), job.batch):
            batch = ready[begin : begin + job.batch]
            rows = [job.row(r.request) for r in batch]
            try:
                generation = _decode(job, batch, rows, show, name)
            except Interrupted as stop:
                interrupted, generation = True, stop.generation
                rows = _again(job, batch, rows, show, generation)
            stats.append(generation.stats)
            for one, row, why in zip(batch, rows, generation.finished, strict=True):
                show.piece(row.close())
                served.append(Served(one.request, row, "stop" if row.stopped else why))
                show.whole(served[-1])
            if interrupted:
                break
    except KeyboardInterrupt:
        interrupted = True
    return Outcome(served, Stats.merged(stats), interrupted)


def _decode(
    job: Job, batch: Sequence[Ready], rows: list[RowText], show: Show, name: str
) -> Generation:
    progress = show.progress

    def on_tokens(row: int, tokens: tuple[int, ...]) -> int | None:
        text, end = rows[row].take(tokens)
        progress.decoded(len(tokens))
        show.piece(text)
        return end

    wanted = sum(r.params.max_new_tokens for r in batch)
    with progress.batch(wanted, name, streams=show.streams):
        return decode(
            job.model,
            [r.prompt for r in batch],
            [r.params for r in batch],
            gamma=job.gamma,
            draft=job.draft,
            draft_model=job.draft_model,
            target=job.target,
            rule=job.rule,
            policy_arrays=job.policy_arrays,
            backends=job.backends,
            on_tokens=on_tokens,
            on_prefill=progress.prefilled if progress.shown else None,
            on_compile=progress.compiling,
        )


def _again(
    job: Job, batch: Sequence[Ready], rows: list[RowText], show: Show, generation: Generation
) -> list[RowText]:
    """Texts of the tokens that an interrupted generation kept: ``rows`` may have part of more."""
    fresh = [job.row(r.request) for r in batch]
    for old, new, tokens in zip(rows, fresh, generation.tokens, strict=True):
        new.feed(tokens)
        show.piece(new.text[len(old.text) :])
    return fresh


def _compare(outcome: Outcome, plainly: Outcome, *, lossless: bool = True) -> dict[str, Any]:
    """Speculative or lossy against plain decoding: the same tokens? how much faster a token?

    Sampled rows spend their random numbers otherwise than plain decoding does: there, tokens that
    differ follow the same law, unless decoding was not lossless.
    """
    pairs = list(zip(outcome.served, plainly.served, strict=True))
    same = [s.row.tokens == p.row.tokens for s, p in pairs]
    greedy = [s.request.params.temperature == 0 for s, _ in pairs]
    speed = plainly.stats.decode_tokens_per_s
    return {
        "lossless": lossless,
        "sampled": not all(greedy),
        "identical": all(same),
        "greedy_identical": all(x for x, is_greedy in zip(same, greedy, strict=True) if is_greedy),
        "speedup": outcome.stats.decode_tokens_per_s / speed if speed else 0.0,
        "decode_tokens_per_s": speed,
    }


def _seeds(served: Sequence[Served]) -> list[str]:
    """The seeds that repeat what was sampled, and of which line; greedy requests need none."""
    requests = [s.request for s in served if s.request.params.temperature > 0]
    return [
        str(r.params.seed) if r.line is None else f"{r.params.seed} (line {r.line})"
        for r in requests
    ]
