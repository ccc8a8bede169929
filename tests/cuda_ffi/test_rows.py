"""A buffer with a row that the others lack: a handler that took it would read past their ends.

The calls are made in a process of their own, which such a handler may end.
"""

import subprocess
import sys

import jax
import pytest

from jspec.cuda_ffi import library
from tests.cuda_ffi.test_library import CALLS, aliased, call

SCRIPT = "from tests.cuda_ffi.test_rows import try_all; try_all()"


def with_a_row_more(target: str):
    """Every call of ``target`` in which one buffer has one row more."""
    arguments, results, attributes, aliases = CALLS[target]
    both, count = [*arguments, *results], len(arguments)
    for i, (shape, dtype) in enumerate(both):
        if not shape or i in aliased(aliases, count):
            continue  # JAX itself refuses aliases of different shapes
        bad = [*both[:i], ((shape[0] + 1, *shape[1:]), dtype), *both[i + 1 :]]
        yield f"buffer {i}", (bad[:count], bad[count:], attributes, aliases)


def try_all() -> None:
    """Prints how each call ended."""
    for subject in library.TARGETS:
        assert library.refusal(subject) is None
    for target in CALLS:
        for name, wrong in with_a_row_more(target):
            print(target, name, flush=True, end=": ")
            try:
                call(target, *wrong)
            except jax.errors.JaxRuntimeError as error:
                print(str(error).partition(":")[0])
            else:
                print("taken")


@pytest.mark.exhaustive
def test_a_row_more_is_an_invalid_argument():
    if reason := next(filter(None, map(library.refusal, library.TARGETS)), None):
        pytest.skip(reason)
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    lines = ran.stdout.splitlines()
    assert ran.returncode == 0, f"{lines[-1:]} ended the process: {ran.stderr[-500:]}"
    assert len(lines) > 50
    assert [line for line in lines if not line.endswith(": INVALID_ARGUMENT")] == []
