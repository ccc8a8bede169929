"""``python -m jspec.conformance --verifier module:function``: exit 0 where every law holds."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from jspec.conformance.laws import (
    ALARM,
    LAWS,
    ROWS,
    Finding,
    accepts_less,
    check,
    diagnosis,
    with_needed,
)
from jspec.conformance.verifier import load


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    settings = _parser().parse_args(arguments)
    try:
        if settings.rows < 1000:
            raise ValueError(f"--rows {settings.rows} must be at least 1000")
        verifier = load(settings.verifier)
        findings = []
        shows = Console(stderr=True)
        hidden = settings.json or not shows.is_terminal
        with Progress(console=shows, transient=True, disable=hidden) as progress:
            laws = with_needed(tuple(settings.laws))
            task = progress.add_task("laws", total=len(laws))
            for finding in check(verifier, laws, rows=settings.rows, seed=settings.seed):
                findings.append(finding)
                progress.advance(task)
    except ValueError as error:
        print(f"jspec.conformance: {error}", file=sys.stderr)
        return 2
    fault = diagnosis(findings)
    if settings.json:
        print(json.dumps(_report(settings.verifier, findings, fault)))
    else:
        _print(settings.verifier, findings, fault)
    return 0 if fault is None else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jspec.conformance",
        description="Put a verifier through the sampling laws; see docs/conformance.md.",
    )
    add = parser.add_argument
    add("--verifier", required=True, metavar="MODULE:FUNCTION", help="the function to test")
    add(
        "--laws",
        nargs="+",
        choices=tuple(LAWS),
        default=tuple(LAWS),
        metavar="LAW",
        help="default all",
    )
    add("--rows", type=int, default=ROWS, metavar="N", help="requests a law; default %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="of the requests; default %(default)s")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _report(name: str, findings: list[Finding], fault: str | None) -> dict[str, object]:
    laws = [
        {"law": x.law, "p": x.p_value, "holds": x.holds, "rows": x.rows, "seconds": x.seconds}
        for x in findings
    ]
    less = accepts_less(findings)
    return {"verifier": name, "alarm": ALARM, "laws": laws, "fault": fault, "accepts_less": less}


def _print(name: str, findings: list[Finding], fault: str | None) -> None:
    table = Table(title=name)
    table.add_column("law")
    table.add_column("p", justify="right")
    table.add_column("result")
    table.add_column("rows", justify="right")
    table.add_column("s", justify="right")
    less = accepts_less(findings)
    for x in findings:
        holds = "holds" if x.holds else "[red]fails[/red]"
        if x.law == "accepted tokens" and less:
            holds = "accepts less"
        table.add_row(x.law, f"{x.p_value:.1e}", holds, f"{x.rows:,}", f"{x.seconds:.1f}")
    console = Console()
    console.print(table)
    console.print(
        f"Every law holds (p >= {ALARM:.0e})." if fault is None else f"It shows: {fault}."
    )
    if less:
        console.print("It accepts less than it could: slower, and as lossless.")


if __name__ == "__main__":
    sys.exit(main())
