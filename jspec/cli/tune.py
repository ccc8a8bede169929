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
from jspec.cli.show import console, counted, counted_bars, environment, print_json
from jspec.decode.checks import one_each
from jspec.decode.draft import Drafter, NoDraft
from jspec.decode.settings import StepConfig
from jspec.eval.sample import prepared
from jspec.eval.tuning import GAMMAS, PLAIN, RATIOS, RUNS, Bench, Trial, Tuning, draft_at, tune
from jspec.eval.tuning_pictures import draw
from jspec.extras import install
from jspec.models.bundled import bundled_path
from jspec.models.hashes import FOLDER
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
        with _bar(_max_runs(len(ratios), len(gammas))) as advance:
            bench = Bench(
                *(job.model, [r.prompt for r in ready], [r.params for r in ready]),
                *(arguments.draft, max(gammas), lambda draft: _arrays(arguments, job, draft)),
                backends_of(arguments),
                advance,
            )
            groups = bench.same_programs(ratios)
            tuning = tune(
                bench.measure, [group[0] for group in groups], gammas, bench.default(groups)
            )
        report = _report(arguments, tuning, groups, len(ready))
        (folder / "settings.json").write_text(written(**report["settings"]))
        (folder / "tuning.json").write_text(json.dumps(report) + "\n")
        picture = _draw(tuning, folder, arguments.out)
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
    return prepared(with_hashes(cache_policy, Path(path) / FOLDER), job.model, job.tokenizer)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; call what it yields after each measurement."""
    with counted_bars(transient=True) as bars:
        task = bars.add_task("settings tried, at most", total=total)
        yield lambda: bars.advance(task)


def _max_runs(ratios: int, gammas: int) -> int:
    """How many runs a tuning makes at most: those that compile, and those that are timed."""
    settings = ratios + gammas + ratios + 2
    return settings + RUNS * (settings - ratios)


def _report(
    arguments: argparse.Namespace,
    tuning: Tuning,
    groups: Sequence[tuple[float, ...]],
    requests: int,
) -> dict[str, Any]:
    """All that was measured, and the settings to take."""
    chosen = tuning.chosen.setting
    ratio = None if tuning.chosen is tuning.default else chosen.ratio
    draft = "none" if chosen == PLAIN else draft_at(arguments.draft, ratio)[0]
    steps = {"acceptance": tuning.acceptance, "gammas": tuning.gammas, "ratios": tuning.ratios}
    singles = {"best": tuning.best, "default": tuning.default, "plain": tuning.plain}
    return {
        "settings": {"draft": draft, "gamma": chosen.gamma},
        "beyond_noise": tuning.chosen is not tuning.default,
        "gains": tuning.gains,
        "speedup": tuning.chosen.tokens_per_s / tuning.plain.tokens_per_s,
        "requests": requests,
        "same_programs": [list(group) for group in groups if len(group) > 1],
        "settled": tuning.settled,
        **{name: [_fields(trial) for trial in trials] for name, trials in steps.items()},
        **{name: _fields(trial) for name, trial in singles.items()},
        "environment": environment(),
    }


def _fields(trial: Trial) -> dict[str, Any]:
    """A trial for JSON."""
    fields = {**trial.setting._asdict(), "accepted": trial.accepted}
    if not trial.speeds:
        return fields
    return {**fields, "tokens_per_s": trial.tokens_per_s, "runs": list(trial.speeds)}


def _draw(tuning: Tuning, folder: Path, out: str) -> str:
    """Draw both pictures; returns what to tell the user."""
    if find_spec("matplotlib") is None:
        return f"no pictures: {install('bench')}"
    draw(tuning, folder)
    return f"pictures in {out}: acceptance.png, throughput.png"


def _show(report: dict[str, Any], tuning: Tuning, out: str, picture: str) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("step", "ratio", "gamma", "accepted a step", "tokens/s", "slowest-fastest", ""):
        table.add_column(heading, justify="right" if heading not in ("step", "") else "left")
    for name, rows in _rows(tuning):
        for trial, mark in rows:
            table.add_row(name, *_cells(trial), mark)
            name = ""
    shows = console()
    shows.print(table)
    for group in report["same_programs"]:
        shows.print(f"the same program on these requests, measured once: ratios {_listed(group)}")
    shows.print(_verdict(report, tuning), soft_wrap=True)
    shows.print(f"jspec generate --settings {out}/settings.json; {picture}", soft_wrap=True)


def _verdict(report: dict[str, Any], tuning: Tuning) -> str:
    """Whether the settings to take are faster than plain decoding, and than the default."""
    settings, best, plain = report["settings"], tuning.best, tuning.plain
    of_plain = f"of plain decoding on {counted(report['requests'], 'request')}"
    if settings["draft"] == "none":
        drafts = f"drafts have {best.tokens_per_s / plain.tokens_per_s:.2f}x {of_plain}"
        if plain.beats(best):
            return f"plain decoding is fastest: {drafts}"
        return f"no measurable gain: {drafts}, within the noise; take --draft none"
    flags = f"--draft {settings['draft']} --gamma {settings['gamma']}"
    speed = f"{report['speedup']:.2f}x {of_plain}"
    if not tuning.gains:
        return f"no measurable gain: {flags} has {speed}, within the noise"
    if report["beyond_noise"]:
        return f"{flags}: {speed}, faster than the default beyond the noise"
    return f"no setting is faster than the default beyond the noise; {flags}: {speed}"


def _rows(tuning: Tuning) -> Iterator[tuple[str, list[tuple[Trial, str]]]]:
    """The trials of each step, each with what to say of it."""
    settled = [t.setting.ratio == tuning.settled for t in tuning.acceptance]
    marks = ["settles" if x else "" for x in settled]
    yield "1: acceptance", list(zip(tuning.acceptance, marks, strict=True))
    fastest = max(tuning.gammas, key=lambda trial: trial.tokens_per_s)
    yield "2: gamma", [(trial, _against(trial, fastest, "fastest")) for trial in tuning.gammas]
    trials = dict.fromkeys((tuning.plain, tuning.default, *tuning.ratios))
    yield "3: ratio", [(trial, _against(trial, tuning.default, "default")) for trial in trials]


def _against(trial: Trial, other: Trial, name: str) -> str:
    """How the speed of a trial compares with that of ``other``, called ``name``."""
    if trial is other:
        return name
    if other.beats(trial):
        return "slower"
    return "faster" if trial.beats(other) else "within noise"


def _cells(trial: Trial) -> tuple[str, ...]:
    ratio, gamma = trial.setting
    size = "" if ratio is None else f"{ratio:g}"
    speeds = ("", "")
    if trial.speeds:
        spread = f"{min(trial.speeds):,.1f}-{max(trial.speeds):,.1f}"
        speeds = f"{trial.tokens_per_s:,.1f}", spread
    return size, f"{gamma}" if gamma else "plain", f"{trial.accepted:.2f}", *speeds


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:g}" for ratio in ratios)
