"""The command: ``--verifier module:function`` gives exit code 0 where every law holds."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import traceback
from multiprocessing.connection import Connection

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
from jspec.conformance.verifier import VerifierError, guarded, load

NO_VERIFIER, FAILED = 2, 3  # exit codes


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code.

    The laws run in a child process, so that a verifier that ends its process gets no verdict.
    """
    settings = parser().parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_exit_code, args=(settings, sender))
    child.start()
    try:
        child.join()
    except KeyboardInterrupt:
        child.terminate()
        child.join()
        return 128 + signal.SIGINT
    if receiver.poll():
        return receiver.recv()
    code = child.exitcode or 0
    how = f"with status {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
    print(f"jspec.conformance: the verifier ends the process, {how}", file=sys.stderr)
    return FAILED


def _send_exit_code(settings: argparse.Namespace, sender: Connection) -> None:
    sender.send(judge(settings))


def judge(settings: argparse.Namespace) -> int:
    """Run the laws in this process and show what they find; returns the command's exit code."""
    findings: list[Finding] = []
    try:
        if settings.rows < 1000:
            raise ValueError(f"--rows {settings.rows} must be at least 1000")
        verifier = guarded(load(settings.verifier))
        laws = with_needed(tuple(settings.laws))
        for finding in check(verifier, laws, rows=settings.rows, seed=settings.seed):
            findings.append(finding)
            if not settings.json:
                _show(findings)
    except ValueError as error:
        print(f"jspec.conformance: {error}", file=sys.stderr)
        return NO_VERIFIER
    except VerifierError as error:
        traceback.print_exception(error)
        print(f"jspec.conformance: {error}", file=sys.stderr)
        return FAILED
    fault = diagnosis(findings)
    if settings.json:
        print(json.dumps(_report(settings.verifier, findings, fault)))
    else:
        _conclude(findings, fault)
    return 0 if fault is None else 1


def parser() -> argparse.ArgumentParser:
    """The parser of the command's arguments."""
    arguments = argparse.ArgumentParser(
        prog="python -m jspec.conformance",
        description="Put a verifier through the sampling laws; see docs/conformance.md.",
    )
    add = arguments.add_argument
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
    return arguments


def _report(name: str, findings: list[Finding], fault: str | None) -> dict[str, object]:
    laws = [
        {"law": x.law, "p": x.p_value, "holds": x.holds, "rows": x.rows, "seconds": x.seconds}
        for x in findings
    ]
    less = accepts_less(findings)
    return {"verifier": name, "alarm": ALARM, "laws": laws, "fault": fault, "accepts_less": less}


def _show(findings: list[Finding]) -> None:
    """Print the last finding, with a heading before the first."""
    x = findings[-1]
    if len(findings) == 1:
        print(f"{'law':16} {'p':>8}  {'result':12} {'rows':>9} {'s':>6}")
    less = x.law == "accepted tokens" and accepts_less(findings)
    result = "accepts less" if less else "holds" if x.holds else "FAILS"
    print(f"{x.law:16} {x.p_value:8.1e}  {result:12} {x.rows:9,} {x.seconds:6.1f}", flush=True)


def _conclude(findings: list[Finding], fault: str | None) -> None:
    print(f"Every law holds (p >= {ALARM:.0e})." if fault is None else f"It shows: {fault}.")
    if accepts_less(findings):
        print("It accepts less than it could: slower, and as lossless.")
