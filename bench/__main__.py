"""`python -m bench <suite>`: check outputs, time what was right, print a table, write JSON.

`show FILE...` prints the tables of results that --json wrote, such as those in bench/results.
"""

from __future__ import annotations

import argparse
import errno
import faulthandler
import itertools
import json
import os
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench import (
    attention,
    counters,
    decode,
    defaults,
    hata,
    helix,
    linear,
    pack,
    point,
    quality,
    real,
    rollouts,
    select,
    serving,
    show,
    verify,
)
from bench.drafters import BY_A_MODEL, BY_HASHES, LOSSY
from bench.helix import shapes
from bench.machine import describe
from bench.settings import Settings, console
from bench.suite import OperationBenchmark, Suite

SUITES: dict[str, Suite] = {
    module.SUITE.name: module.SUITE
    for module in (
        *(verify, pack, attention, select, hata, linear),
        *(decode, real, serving, rollouts, defaults, helix, shapes, quality, counters),
    )
}
READ = quality.READING.name
# Other operations of the suite `quality` that take a model.
BY_MODEL = (quality.TREES.name, quality.PASSES.name, quality.FLIPS.name)
WITH_HASHES = (READ, quality.FLIPS.name)
OF_QUALITY = f"op={READ}, {', '.join(f'op={name}' for name in BY_MODEL)} of quality"
ALONE = (real.SUITE.name, counters.SUITE.name)  # needs a model, needs ncu
# What is no suite.
COMMANDS = {
    "all": "every suite but real and counters",
    "show": "the tables of stored results: python -m bench show FILE...",
    "report": "docs/RESULTS.md, the tables of other pages, and pictures, from bench/results",
    "tune": "orders of backends, from results: python -m bench tune DIR --json FILE; block sizes, "
    "searched on this GPU, without DIR",
    "env": "the machine and its versions",
}
_INTERRUPTED = threading.Event()
_interrupted_at = 0.0
# Seconds in which signals count as one: `timeout` sends one to the process and one to its group,
# and the second would interrupt writing the result.
SIGNAL_WINDOW = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.files and asked.suite not in ("show", "tune"):
        parser.error(f"{asked.files[0]} does not apply to {asked.suite}")
    if asked.suite == "list":
        titles = {name: suite.title for name, suite in SUITES.items()}
        for name, title in (titles | COMMANDS).items():
            print(
                textwrap.fill(title, 100, initial_indent=f"{name:16}", subsequent_indent=16 * " ")
            )
        return 0
    if asked.suite == "show":
        return _show(parser, asked.files)
    if asked.suite == "env":
        print(json.dumps(describe(), indent=2))
        return 0
    if asked.suite == "report":
        if find_spec("matplotlib") is None:
            parser.error("figures need matplotlib: pip install '.[bench]'")
        from bench import report

        report.write(page=report.README, pages=report.DOCS)
        return 0
    if asked.suite == "tune":
        return _tune(parser, asked)
    return _measure(parser, asked)


def _measure(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> int:
    """Run the requested suites; returns 0 if every checked output was right."""
    whole = asked.suite == "all"
    names = [name for name in SUITES if name not in ALONE] if whole else [asked.suite]
    model = _model(parser, asked)
    only = tuple(asked.backend)
    if only:
        _check_backends(parser, only, names)
    _check_cases(parser, asked.case, names)
    cases = tuple(asked.case)
    resume = asked.json if asked.resume else None
    settings = Settings(asked.quick, only, cases, model, resume, asked.draft_model, asked.hashes)
    if asked.json:
        _check_writable(parser, "--json", [_file(asked.json, name, asked) for name in names])
    good = True
    for name in names:
        try:
            result = _run(name, settings, _file(asked.json, name, asked) if asked.json else None)
        except real.Refused as error:
            parser.error(str(error))
        SUITES[name].show(result)
        if asked.json:
            rows = [json.dumps(row) for row in result["rows"]]
            _save(_file(asked.json, name, asked), result, rows)
        if result.get("interrupted"):
            console().print(f"interrupted: {name} has only what was measured until then")
            return 130
        wrong = [row for row in result["rows"] if row["checked"] is False]
        for row in wrong:
            case = ",".join(f"{key}={value}" for key, value in row["case"].items())
            print(f"bench: wrong output: {row['name']} of {case}", file=sys.stderr)
        good = good and not wrong
    return 0 if good else 1


def _model(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> Path | None:
    """The path of the model for the suites that take one, None for the bundled one."""
    if asked.suite != real.SUITE.name:
        for option, value in {"--resume": asked.resume, "--draft-model": asked.draft_model}.items():
            if value:
                parser.error(f"{option} does not apply to {asked.suite}, only to {real.SUITE.name}")
        operations = set(map(_operation, asked.case)) if asked.suite == quality.SUITE.name else {""}
        by_hashes = bool(operations) and operations <= {*WITH_HASHES}
        if asked.hashes and (not by_hashes or asked.model is None):
            parser.error(
                f"--hashes does not apply to {asked.suite}, only to {real.SUITE.name} and, with "
                f"--model, to {' and '.join(f'op={name}' for name in WITH_HASHES)} of quality"
            )
        of_quality = bool(operations) and operations <= {READ, *BY_MODEL}
        always = defaults.SUITE.name, rollouts.SUITE.name
        takes_model = asked.suite in always or (of_quality and asked.suite == quality.SUITE.name)
        if asked.model and not takes_model:
            suites = ", ".join((real.SUITE.name, *always, OF_QUALITY))
            parser.error(f"--model does not apply to {asked.suite}, only to {suites}")
    elif asked.model is None:
        parser.error("real needs --model, a GGUF file or a model directory")
    elif asked.draft_model is None and (needs := sorted({*asked.backend} & {*BY_A_MODEL})):
        parser.error(f"--backend {needs[0]} drafts with a second model; name it by --draft-model")
    elif asked.hashes is None and (needs := sorted({*asked.backend} & {*BY_HASHES, *LOSSY})):
        parser.error(
            f"--backend {needs[0]} needs trained hashes of the model; name those that `jspec "
            "train-hash` wrote by --hashes"
        )
    if asked.resume and not asked.json:
        parser.error("--resume needs --json, the result to continue")
    paths = {"--model": asked.model, "--draft-model": asked.draft_model, "--hashes": asked.hashes}
    for option, path in paths.items():
        if path is not None and not path.exists():
            parser.error(f"{option} {path} does not exist")
    return asked.model


def _operation(case: str) -> str:
    """The operation of a case of the suite `quality`."""
    named = [x.removeprefix("op=") for x in case.split(",") if x.startswith("op=")]
    return named[-1] if named else READ


def _file(path: Path, suite: str, asked: argparse.Namespace) -> Path:
    """The file of a suite: ``path``, or a file in that folder for `all`."""
    return path / f"{suite}.json" if asked.suite == "all" else path


def _check_writable(parser: argparse.ArgumentParser, option: str, paths: Sequence[Path]) -> None:
    """Exit with an error if one of these files is not writable or is a folder."""
    for path in paths:
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
        except OSError as error:
            parser.error(f"{option} cannot write {path}: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    suites = ["list", *SUITES, *COMMANDS]
    describes = "`list` describes each of them"
    parser.add_argument("suite", choices=suites, metavar="SUITE", help=describes)
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        type=Path,
        help="`show`: results to print; `tune`: the folder of results to fit the order "
        "of backends to, and --json the table to write",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        action="append",
        default=[],
        help="a backend, drafter, policy or rival by its name in tables; may be repeated",
    )
    parser.add_argument(
        "--case",
        metavar="CASE",
        action="append",
        default=[],
        help="a case instead of the suite's defaults, such as B=4,S=128K,T=10; may be repeated",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--json", metavar="F", type=Path, help="write the result; `all`: a folder")
    parser.add_argument("--resume", action="store_true", help="real: continue the result of --json")
    parser.add_argument(
        "--model",
        metavar="FILE",
        type=Path,
        help=f"real, defaults, rollouts, {OF_QUALITY}: a GGUF file or a model directory",
    )
    parser.add_argument(
        "--draft-model", metavar="FILE", type=Path, help="real: a second model, to draft for it"
    )
    parser.add_argument(
        "--hashes",
        metavar="DIR",
        type=Path,
        help="real, op=read, op=flips of quality: hashes of the model by jspec train-hash",
    )
    return parser


def _show(parser: argparse.ArgumentParser, files: Sequence[Path]) -> int:
    if not files:
        parser.error("show needs a result, such as bench/results/h200/verify.json")
    for path in files:
        try:
            show.show(path, SUITES)
        except show.NoResult as error:
            parser.error(str(error))
    return 0


def _tune(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> int:
    from bench import tune

    if len(asked.files) > 1 or asked.json is None:
        parser.error("tune needs --json, the table to write, and at most one folder of results")
    if asked.files and (asked.case or asked.backend):
        parser.error("--case and --backend are of the search of block sizes, without results")
    _check_writable(parser, "--json", [asked.json])
    try:
        if asked.files:
            tune.tune(asked.files[0], asked.json)
        else:
            every = [x for suite in SUITES.values() for x in suite.benchmarks]
            benchmarks = [x for x in every if isinstance(x, OperationBenchmark)]
            tune.tune_blocks(asked.json, benchmarks, asked.case, asked.backend)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except (KeyError, TypeError) as error:
        parser.error(f"{asked.files[0]} holds no results: {type(error).__name__}: {error}")
    return 0


def _check_backends(
    parser: argparse.ArgumentParser, backends: Sequence[str], suites: Sequence[str]
) -> None:
    """Exit with an error if a backend is unknown to the suites."""
    known = set().union(*(SUITES[name].names for name in suites))
    if not known:
        parser.error(f"--backend does not apply to {suites[0]}, which has no choice of backends")
    for name in backends:
        if name not in known:
            parser.error(f"--backend {name} must be one of {', '.join(sorted(known))}")


def _check_cases(
    parser: argparse.ArgumentParser, cases: Sequence[str], suites: Sequence[str]
) -> None:
    """Exit with an error if a case is invalid for one of the suites."""
    for name, text in itertools.product(suites, cases):
        parse = SUITES[name].case
        if parse is None:
            parser.error(f"--case does not apply to {name}, whose cases are fixed")
        try:
            parse(text)
        except ValueError as error:
            parser.error(f"--case {text}: {error}")


def _run(name: str, settings: Settings, path: Path | None) -> dict[str, Any]:
    """Run a suite; if it is interrupted, the result has the rows measured so far.

    ``path``: a file to which the result is written after each row.
    """
    begin = time.perf_counter()
    result = {"suite": name, "machine": describe(), "quick": settings.quick}
    rows, lines = [], []
    try:
        result |= SUITES[name].run(settings)
        for row in result["rows"]:
            rows.append(row)
            if path is not None:
                lines.append(json.dumps(row))  # only once: some suites have thousands of rows
                seconds = round(time.perf_counter() - begin, 1)
                _save(path, result | {"interrupted": True, "seconds": seconds}, lines)
            if _INTERRUPTED.is_set():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        result["interrupted"] = True
    result["rows"] = rows
    if not SUITES[name].custom_clocks and point.DEVICE.reason is not None:
        result["clocks"] = {"device": point.DEVICE.reason}
    return result | {"seconds": round(time.perf_counter() - begin, 1)}


def _interrupt(number: int, frame: Any) -> None:
    global _interrupted_at
    before, _interrupted_at = _interrupted_at, time.monotonic()
    if _INTERRUPTED.is_set() and _interrupted_at - before < SIGNAL_WINDOW:
        return
    # An exception raised inside a callback of the garbage collector is lost; the flag is not.
    _INTERRUPTED.set()
    raise KeyboardInterrupt


def _save(path: Path, result: dict[str, Any], lines: Sequence[str]) -> None:
    """Write JSON with one line per row, which keeps diffs of results small.

    ``lines``: the rows as JSON, used instead of those of ``result``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    rows = ",\n".join(lines)
    part = path.with_name(path.name + ".part")
    part.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n')
    part.replace(path)


if __name__ == "__main__":
    # Schedulers end a job with SIGTERM, and background jobs of a shell ignore SIGINT by default.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    faulthandler.enable()  # print a traceback on crashes
    code = main()
    if _INTERRUPTED.is_set():
        # Python would wait for a suite's thread whose program may never end.
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
