"""`jspec tune`: the ratio and gamma at which a sparse drafter serves some requests fastest."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.table import Table

from jspec.cli.compile_cache import keep_programs
from jspec.cli.generate import Job, Ready, backends_of, load, ready_for
from jspec.cli.output import whole_folder
from jspec.cli.requests import Refused, read_requests
from jspec.cli.settings import written
from jspec.cli.show import console, counted_bars, environment, print_json
from jspec.decode.checks import one_each
from jspec.decode.draft import Drafter, NoDraft
from jspec.decode.settings import StepConfig
from jspec.eval.sample import prepared
from jspec.eval.tuning import GAMMAS, RATIOS, Bench, Trial, Tuning, draft_at, tune
from jspec.eval.tuning_pictures import draw
from jspec.extras import install
from jspec.models.bundled import bundled_path
from jspec.policies import Dense
from jspec.policies.hata import with_hashes


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns its exit code."""
    ratios, gammas = arguments.ratio or RATIOS, arguments.gamma or GAMMAS
    for ratio in ratios:
        if not 0 < ratio <= 1:
            raise ValueError(f"--ratio {ratio} must be above 0 and at most 1")
        draft_at(arguments.draft, ratio)
    if min(gammas) < 1:
        raise ValueError(f"--gamma {min(gammas)} must be at least 1")
    if arguments.batch < 1:
        raise ValueError(f"--batch {arguments.batch} must be at least 1")
    with whole_folder(arguments.out) as folder:
        if arguments.compile_cache:
            keep_programs()
        job, ready = _ready(arguments, max(gammas))
        with _bar(2 * len(ratios) + len(gammas) + 1) as advance:
            bench = Bench(
                *(job.model, [r.prompt for r in ready], [r.params for r in ready], max(gammas)),
                lambda draft: _arrays(arguments, job, draft),
                backends_of(arguments),
                advance,
            )
            plain = bench.plain()
            tuning = tune(bench.sparse(arguments.draft), ratios, gammas)
        report = _report(arguments, tuning, plain, len(ready))
        (folder / "settings.json").write_text(written(**report["settings"]))
        (folder / "tuning.json").write_text(json.dumps(report) + "\n")
        picture = _draw(tuning, plain, folder, arguments.out)
    if arguments.json:
        print_json(report)
    else:
        _show(report, tuning, arguments.out, picture)
    return 0


def _ready(arguments: argparse.Namespace, longest: int) -> tuple[Job, list[Ready]]:
    """The model, and the first requests, as many as a batch has."""
    requests, refused = read_requests(arguments)
    requests = requests[: arguments.batch]
    talks = not all(isinstance(request.prompt, bytes) for request in requests)
    backends = backends_of(arguments)
    job = load(arguments, NoDraft(), longest, Dense(), backends, talks)
    params = one_each([r.params for r in requests], len(requests)) if requests else ()
    requests = [dataclasses.replace(r, params=p) for r, p in zip(requests, params, strict=True)]
    ready = [x for request in requests if (x := ready_for(job, request, refused))]
    _refuse(refused)
    return job, ready


def _refuse(refused: Sequence[Refused]) -> None:
    """Raise `ValueError` for the first line that cannot be served."""
    if refused:
        raise ValueError(f"--requests, line {refused[0].line}: {refused[0].error}")


def _arrays(arguments: argparse.Namespace, job: Job, draft: Drafter) -> Any:
    """The arrays of the draft's policy."""
    path = arguments.model or bundled_path()
    cache_policy = StepConfig(draft.traits.default_gamma, draft).cache_policy
    return prepared(with_hashes(cache_policy, Path(path)), job.model, job.tokenizer)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; call what it yields after each measurement."""
    with counted_bars(transient=True) as bars:
        task = bars.add_task("settings tried, at most", total=total)
        yield lambda: bars.advance(task)


def _report(
    arguments: argparse.Namespace, tuning: Tuning, plain: float, requests: int
) -> dict[str, Any]:
    """All that was measured, and the fastest settings: plain decoding where that is."""
    best, speedup = tuning.best, tuning.best.tokens_per_s / plain if plain else 0.0
    settings = {"draft": draft_at(arguments.draft, best.ratio)[0], "gamma": best.gamma}
    return {
        "settings": settings if speedup > 1 else {"draft": "none", "gamma": 0},
        "speedup": speedup,
        "plain_tokens_per_s": plain,
        "requests": requests,
        **dataclasses.asdict(tuning),
        "environment": environment(),
    }


def _draw(tuning: Tuning, plain: float, folder: Path, out: str) -> str:
    """Draw both pictures; returns what to tell the user."""
    if find_spec("matplotlib") is None:
        return f"no pictures: {install('bench')}"
    draw(tuning, plain, folder)
    return f"pictures in {out}: acceptance.png, throughput.png"


def _show(report: dict[str, Any], tuning: Tuning, out: str, picture: str) -> None:
    steps = (
        ("1: where acceptance settles", tuning.acceptance, tuning.settled, None),
        ("2: gamma", tuning.gammas, None, tuning.best.gamma),
        ("3: ratio", tuning.ratios, tuning.best.ratio, None),
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "ratio", "gamma", "accepted a step", "tokens/s", "vs plain"):
        table.add_column(heading, justify="left" if heading == "step" else "right")
    for name, trials, ratio, gamma in steps:
        for trial in trials:
            chosen = trial.ratio == ratio or trial.gamma == gamma
            table.add_row(*_cells(name, trial, report["plain_tokens_per_s"], chosen=chosen))
            name = ""
    shows, settings = console(), report["settings"]
    shows.print(table)
    speed = f"{report['speedup']:.2f}x of plain decoding on {report['requests']} requests"
    if settings["draft"] == "none":
        shows.print(f"plain decoding is fastest: drafts have {speed}", soft_wrap=True)
    else:
        shows.print(
            f"--draft {settings['draft']} --gamma {settings['gamma']}: {speed}", soft_wrap=True
        )
    shows.print(f"jspec generate --settings {out}/settings.json; {picture}", soft_wrap=True)


def _cells(name: str, trial: Trial, plain: float, *, chosen: bool) -> tuple[str, ...]:
    speed = f"{trial.tokens_per_s:,.1f}"
    above = f"{trial.tokens_per_s / plain:.2f}x" if plain else ""
    mark = "*" if chosen else ""
    return name, f"{trial.ratio:g}", f"{trial.gamma}", f"{trial.accepted:.2f}", speed, above + mark
