"""Command line; see README.md. Data workers import this file too: nothing heavy at the top."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.monotonic()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="examples.train_bundled", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the model and its card go")
    parser.add_argument(
        "--state",
        type=Path,
        default=Path(tempfile.gettempdir(), "jspec-train-bundled"),
        help="where the full state, the corpus and compiled programs are kept between runs",
    )
    parser.add_argument("--minutes", type=float, default=9.3, help="for everything in this run")
    parser.add_argument(
        "--until", type=float, default=1.0, help="share of the plan done at the end of this run"
    )
    parser.add_argument("--resume", type=Path, help="a --state folder, or an --out folder")
    parser.add_argument(
        "--rewind",
        type=float,
        default=1.0,
        help="resume as if no more than this share of the plan were done: trains a model further",
    )
    parser.add_argument(
        "--stages", help="context:rows:share:retrieval,... instead of the plan's; shares add to 1"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny model on two CPU cores")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    from examples.train_bundled.run import main

    sys.exit(main(parse(), BEGAN))
