"""The `jspec` command: a file for each of its commands, and errors as one line."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from jspec.cli.arguments import parse_arguments
from jspec.cli.errors import fail, interrupted, redeliver_interrupts

SMALLER = "lower --batch or --max-new-tokens, shorten the prompt, or take a smaller model"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `jspec`; returns the exit code: 0, 2 for bad input, 130 after Ctrl-C."""
    _open_streams()
    redeliver_interrupts()
    arguments = parse_arguments(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that has no such character shows another one.
        sys.stdout.reconfigure(errors="replace")
    try:
        # A command imports what it needs: `jspec --help` must not wait for JAX.
        command = import_module(f"jspec.cli.{arguments.command.replace('-', '_')}")
        return command.run(arguments)
    except BrokenPipeError:
        return _silence_stdout()
    except OSError as error:
        # Python names no file that is open, as the one of --output or standard output.
        name = error.filename or ("the output" if error.errno == errno.ENOSPC else None)
        return fail(f"{name}: {error.strerror}" if name and error.strerror else str(error))
    except ValueError as error:
        return fail(str(error))
    except MemoryError as error:
        # The part before the semicolon; the rest names arguments of Python.
        return fail(f"{str(error).partition(';')[0] or 'out of memory'}; {SMALLER}")
    except RuntimeError as error:
        # XLA's own, as of a model that does not fit; naming its class would import JAX.
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        return fail(f"out of memory; {SMALLER}")
    except KeyboardInterrupt:
        return interrupted()
    except ImportError as error:
        # What Ctrl-C becomes while the compiled part of jaxlib is imported.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return interrupted()


def _open_streams() -> None:
    """Where the shell closed a stream (``>&-``) Python has None: read and write nothing there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - until the process ends


def _silence_stdout() -> int:
    """The reader went away (`jspec ... | head`): leave without a second error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
