"""`python -m bench <suite>`: check outputs, time what was right, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import ceilings, fused, pack, point, rivals, sampling, step, table, verify
from bench.machine import describe
from bench.settings import Settings, console
from jspec.dispatch import Operation

SUITES: dict[str, Any] = {
    "ceilings": ceilings,
    "verify": verify,
    "pack": pack,
    "fused": fused,
    "sampling": sampling,
    "step": step,
}
UNNAMED = ("ceilings", "step")  # suites without backends to choose from
_INTERRUPTED = threading.Event()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.suite == "list":
        for name, suite in SUITES.items():
            print(f"{name:9} {suite.TITLE}")
        return 0
    if asked.suite == "env":
        print(json.dumps(describe(), indent=2))
        return 0
    if asked.suite == "report":
        from bench import report

        report.write()
        return 0
    unknown = [name for name in asked.backend if name not in _names()]
    if unknown:
        parser.error(f"--backend {unknown[0]} is none of {', '.join(sorted(_names()))}")
    if asked.backend and asked.suite in UNNAMED:
        parser.error(
            f"--backend says nothing to {asked.suite}, which has no backends to choose from"
        )
    settings = Settings(asked.quick, asked.check, tuple(asked.backend))
    whole = asked.suite == "all"
    names = list(SUITES) if whole else [asked.suite]
    earlier = {}
    for name in names if asked.compare else []:
        path = asked.compare / f"{name}.json" if whole else asked.compare
        try:
            earlier[name] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            parser.error(f"--compare cannot read {path}: {error}")
    good = True
    for name in names:
        result = _run(name, settings)
        suite = SUITES[name]
        if name in earlier:
            met = getattr(suite, "compare", table.compare)(result, earlier[name])
            console().print(f"{met} rows compared with that of {earlier[name]['machine']['date']}")
        suite.show(result)
        if asked.json:
            _save(asked.json / f"{name}.json" if whole else asked.json, result)
        if asked.plot:
            from bench.report import figures

            for path in figures.write(result, asked.plot):
                console().print(f"wrote {path}")
        if result.get("interrupted"):
            console().print(f"interrupted: {name} has only what was measured until then")
            return 130
        good = good and all(row["checked"] is not False for row in result["rows"])
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    suites = ["list", "env", *SUITES, "all", "report"]
    parser.add_argument("suite", choices=suites, help="`list` says what each of them measures")
    parser.add_argument(
        "--backend",
        metavar="NAME",
        action="append",
        default=[],
        help="a backend or a rival, as tables name it; may be given again; all by default",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument(
        "--check",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare outputs with what is expected; without it nothing is timed",
    )
    parser.add_argument("--json", metavar="F", type=Path, help="write the result; `all`: a folder")
    parser.add_argument("--plot", metavar="DIR", type=Path, help="write the suite's figures")
    parser.add_argument(
        "--compare", metavar="F", type=Path, help="an earlier --json; `all`: its folder"
    )
    return parser


def _names() -> set[str]:
    """Every backend and rival that a suite may run."""
    modules = (verify, pack, fused, sampling)
    operations = [x for m in modules for x in vars(m).values() if isinstance(x, Operation)]
    return {name for operation in operations for name in operation.backends} | set(rivals.NAMES)


def _run(name: str, settings: Settings) -> dict[str, Any]:
    """A suite's result; what was measured until then, if it is interrupted."""
    begin = time.perf_counter()
    result = {"suite": name, "machine": describe(), "quick": settings.quick}
    result |= SUITES[name].run(settings)
    rows = []
    try:
        for row in result["rows"]:
            rows.append(row)
            if _INTERRUPTED.is_set():
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        result["interrupted"] = True
    result["rows"] = rows
    if name != "step" and point.DEVICE.reason is not None:
        result["clocks"] = {"device": point.DEVICE.reason}
    return result | {"seconds": round(time.perf_counter() - begin, 1)}


def _interrupt(number: int, frame: Any) -> None:
    # What is raised inside a callback of the garbage collector is lost: the flag is not.
    _INTERRUPTED.set()
    raise KeyboardInterrupt


def _save(path: Path, result: dict[str, Any]) -> None:
    """JSON with a line a row, so that a change of one row is a change of one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(json.dumps(row) for row in result["rows"])
    head = json.dumps({k: v for k, v in result.items() if k != "rows"}, indent=1)
    part = path.with_name(path.name + ".part")
    part.write_text(f'{head[:-2]},\n "rows": [\n{rows}\n]}}\n')
    part.replace(path)


if __name__ == "__main__":
    # SIGTERM is how schedulers end a job, and a job in the background of a shell is deaf to SIGINT
    # until it asks for it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.exit(main())
