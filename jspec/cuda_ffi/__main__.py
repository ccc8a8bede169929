"""``python -m jspec.cuda_ffi build``: compile the kernels ahead of their first use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jspec.cuda_ffi.build import SUBJECTS, build_all
from jspec.cuda_ffi.errors import BuildError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a library could not be built."""
    parser = argparse.ArgumentParser(prog="python -m jspec.cuda_ffi")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("build", help="compile what the cache folder does not hold yet")
    command.add_argument("--cuda", action="store_true", help="only the libraries for NVIDIA GPUs")
    command.add_argument("--cpu", action="store_true", help="only the libraries for CPUs")
    arguments = parser.parse_args(argv)
    both = ["CUDA", "cpu"]
    platforms = [name for name in both if getattr(arguments, name.lower())] or both
    total = len(platforms) * len(SUBJECTS)
    failed = 0
    for number, (platform, subject, built) in enumerate(build_all(platforms), 1):
        name = f"{number}/{total} {platform.lower()} {subject}"
        if isinstance(built, BuildError):
            print(f"{name}: {built}", file=sys.stderr)
            failed = 1
            continue
        how = "was there" if built.seconds is None else f"built in {built.seconds:.1f} s"
        print(f"{name}: {how}, {built.path} ({built.path.stat().st_size / 1e6:.1f} MB)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
