"""`jspec generate`: decode requests, stream their text, say how it went."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from jspec.cli import demo
from jspec.cli.compile_cache import keep_programs
from jspec.cli.devices import leave_interrupted, named_mesh, one_voice, take_devices
from jspec.cli.errors import interrupted as say_interrupted
from jspec.cli.errors import one_line
from jspec.cli.output import error_of, result_of, whole_file, write_lines
from jspec.cli.requests import CliRequest, Refused, read_requests
from jspec.cli.serving import NO_TEMPLATE, Job, Outcome, Ready, Served, Show, serve
from jspec.cli.settings import read_settings
from jspec.cli.show import environment, print_choices, print_json, print_table
from jspec.decode.checks import check_request, one_each
from jspec.decode.draft import Drafter, NoDraft, named_draft
from jspec.decode.options import DecodeOptions, Gamma
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.dispatch import Backends, record_choices
from jspec.eval.sample import prepared
from jspec.helix.mesh import HelixConfig
from jspec.helix.sharded import decoder_sharding, shard
from jspec.models.bundled import bundled_path
from jspec.models.chat import load_chat_template
from jspec.models.checkpoint import check_model, load_model
from jspec.models.draft_model import load_draft_model
from jspec.models.fingerprint import fingerprint
from jspec.models.hashes import FOLDER
from jspec.models.text import with_stops
from jspec.models.tokenizer import load_tokenizer
from jspec.ops.registry import step_operations
from jspec.policies import Dense, Policy, named_policy
from jspec.policies.hata import with_hashes
from jspec.processes import (
    all_or_none,
    check_same,
    digest,
    from_first,
    is_first,
    several,
    versions,
)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    if arguments.hosts is not None and arguments.helix is None:
        raise ValueError("--hosts needs --helix, which says what their devices share")
    if arguments.devices is not None and arguments.helix is None:
        raise ValueError(
            f"--devices {arguments.devices} needs --helix, which shares rows among them"
        )
    take_devices(arguments.devices, arguments.hosts)
    with one_voice(arguments.hosts), contextlib.ExitStack() as stack:
        with all_or_none():
            helix = None if arguments.helix is None else named_mesh(arguments.helix)
            target = named_policy(arguments.policy or "dense")
            draft, gamma = _draft(arguments, is_lossy=not isinstance(target, Dense))
            backends = backends_of(arguments)
            if arguments.batch < 1:
                raise ValueError(f"--batch {arguments.batch} must be at least 1")
            if arguments.output is not None and arguments.requests is None:
                raise ValueError("--output goes with --requests; for one prompt, redirect stdout")
            output = arguments.output if is_first() else None
            if output is not None and _same_file(output, arguments.requests):
                raise ValueError(f"--output {output} would replace --requests; name another file")
            file = None if output is None else stack.enter_context(whole_file(output))
            requests, refused = read_requests(arguments)
            settings = (helix, target, draft, gamma, backends)
            common = _common(arguments, requests, settings) if several() else {}
        check_same(common)
        if arguments.demo and not arguments.json:
            print(demo.introduction(), file=sys.stderr, flush=True)
        if arguments.compile_cache:
            keep_programs()
        # Plain decoding must draw with the same seeds to be compared with, and so must processes.
        params = one_each([r.params for r in requests], len(requests)) if requests else ()
        seeds = from_first([p.seed for p in params])
        requests = [
            dataclasses.replace(r, params=dataclasses.replace(p, seed=seed))
            for r, p, seed in zip(requests, params, seeds, strict=True)
        ]
        talks = not all(isinstance(request.prompt, bytes) for request in requests)
        job = load(arguments, draft, gamma, target, backends, talks, helix)
        ready = [r for r in (ready_for(job, request, refused) for request in requests) if r]
        code = _run(arguments, job, ready, refused, file)
        leave_interrupted(code, arguments.hosts)
        return code


def _same_file(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _common(
    arguments: argparse.Namespace, requests: Sequence[CliRequest], settings: Any
) -> dict[str, str]:
    """The values that all processes of a run must share, for `check_same`."""
    more = (arguments.rule, arguments.batch, arguments.context, arguments.compare)
    more = (*more, arguments.exact)
    drafts = arguments.draft_model
    return {
        **versions(),
        "model files": fingerprint(arguments.model or bundled_path()),
        "draft model files": "" if drafts is None else fingerprint(drafts),
        "requests": digest(requests),
        "settings": digest((settings, more)),
    }


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
    with record_choices() as choices:
        outcome = serve(job, ready, show)
    interrupted, compare = outcome.interrupted, None
    if interrupted and not outcome.served:
        raise KeyboardInterrupt
    if arguments.compare and outcome.served and not interrupted:
        silent = Show(streams=False, prints=False)
        plainly = serve(job.plain(), ready, silent, name="decode plainly")
        interrupted = plainly.interrupted
        compare = None if interrupted else _compare(outcome, plainly, lossless=not job.is_lossy)
    refused.sort(key=lambda line: line.line)
    results = [result_of(s.request, s.row.text, s.row.tokens, s.finished) for s in outcome.served]
    errors = [error_of(line) for line in refused]
    if file is not None:
        write_lines(file, results + errors)
    if arguments.json:
        rest = {"stats": outcome.stats.as_dict(), "compare": compare, "environment": environment()}
        if choices:
            rest["backends"] = [dataclasses.asdict(choice) for choice in choices]
        output = results[0] if single else {"results": results, "errors": errors}
        print_json(output | rest)
    elif interrupted and not outcome.stats.steps:
        raise KeyboardInterrupt
    elif outcome.served:
        answer = demo.verdict(outcome.served[0].row.text) if arguments.demo else None
        print_table(outcome.stats, _seeds(outcome.served), compare, answer)
        if choices:
            print_choices(choices)
    for line in refused:
        print(f"jspec: error: line {line.line}: {line.error}", file=sys.stderr)
    if interrupted:
        missing = len(ready) - len(outcome.served)
        return say_interrupted(
            f"; {missing} of {len(ready)} requests have no result" if missing else ""
        )
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
    if draft.traits.needs_model != (arguments.draft_model is not None):
        raise ValueError("--draft model and --draft-model DIR go together; pass both or neither")
    if gamma == "auto" and isinstance(draft, NoDraft):
        raise ValueError("--gamma auto chooses how much a drafter drafts; --draft none has none")
    if isinstance(gamma, int) and gamma < 0:
        raise ValueError(f"--gamma {gamma} must be at least 0, which decodes plainly")
    if arguments.context is not None and arguments.context < 2:
        raise ValueError(f"--context {arguments.context} must be at least 2")
    return draft, gamma


def backends_of(arguments: argparse.Namespace) -> Backends:
    """The backends of ``--backend``, checked before a model is loaded."""
    named = dict(text.split("=", 1) for text in arguments.backend if "=" in text)
    preferred = [text for text in arguments.backend if "=" not in text]
    if len(preferred) > 1:
        raise ValueError(f"--backend {' and '.join(preferred)}: only one backend can be preferred")
    backends = Backends.prefer(preferred[0], named) if preferred else Backends(named)
    backends.check(step_operations())
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
    path = arguments.model or bundled_path()
    sharding = None if helix is None else decoder_sharding(helix)
    with all_or_none():
        check_model(Path(path))
        template = load_chat_template(path) if talks else None
        if arguments.chat and template is None:
            raise ValueError(NO_TEMPLATE)
        keep = None if helix is None else False  # no share of a mesh is in MXFP4
        tokenizer = load_tokenizer(path)  # first, as it is the faster to fail
        model = load_model(path, sharding=sharding, keep_mxfp4=keep)
    if arguments.context is not None:
        model.config = dataclasses.replace(model.config, max_context=arguments.context)
    if isinstance(gamma, int) and gamma >= model.config.max_context:
        raise ValueError(
            f"--gamma {gamma} must be less than the context of {model.config.max_context}; lower "
            "it (8 is usual) or raise --context"
        )
    drafts = arguments.draft_model
    draft_model = load_draft_model(drafts, tokenizer) if drafts else None
    cache_policy = with_hashes(
        StepConfig(draft.traits.default_gamma, draft, target=target).cache_policy,
        Path(path) / FOLDER,
    )
    arrays = prepared(cache_policy, model, tokenizer)
    placed_model = model if helix is None else shard(model, helix)
    options: DecodeOptions = {
        "draft": draft,
        "gamma": gamma,
        "draft_model": draft.prepare(Models(placed_model, draft_model)).draft,
        "target": target,
        "rule": arguments.rule,
        "policy_params": arrays,
        "backends": backends,
    }
    if arguments.exact is not None:
        options["exact"] = None if arguments.exact == "no" else arguments.exact
    return Job(placed_model, tokenizer, template, options, arguments.batch)


def ready_for(job: Job, request: CliRequest, refused: list[Refused]) -> Ready | None:
    """The request for the model; a line that it cannot serve is refused, others go on."""
    try:
        prompt = job.encode(request.prompt)
        check_request(Models(job.model, job.options.get("draft_model")), prompt, request.params)
        return Ready(request, prompt, with_stops(request.params, request.stop, job.tokenizer))
    except ValueError as error:
        if request.line is None:
            raise
        refused.append(Refused(request.line, one_line(str(error)), request.id))
        return None


def _compare(outcome: Outcome, plainly: Outcome, *, lossless: bool = True) -> dict[str, Any]:
    """Speculative or lossy against plain decoding: the same tokens? how much faster a token?

    Sampled rows whose drafts have logits spend their random numbers otherwise than plain decoding
    does: there, tokens that differ follow the same distribution, unless decoding was not lossless.
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
