"""`python -m bench <suite>`: run a suite, check its outputs, print a table, write JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bench import report, step
from bench.machine import describe

SUITES = {"step": step}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    suites = ", ".join(f"{name}: {suite.TITLE}" for name, suite in SUITES.items())
    parser.add_argument("suite", choices=["list", "env", "report", *SUITES], help=suites)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    parser.add_argument("--json", metavar="F", type=Path, help="also write the result as JSON")
    arguments = parser.parse_args()
    if arguments.suite == "list":
        for name, suite in SUITES.items():
            print(f"{name:8} {suite.TITLE}")
        return 0
    if arguments.suite == "env":
        print(json.dumps(describe(), indent=2))
        return 0
    if arguments.suite == "report":
        report.write()
        return 0
    suite = SUITES[arguments.suite]
    result = {"suite": arguments.suite, "machine": describe(), **suite.run(arguments.quick)}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    suite.show(result)
    return 0 if all(row["checked"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
