"""Communication between the processes of one program that `jax.distributed` has joined.

All processes have to call each function, in the same order. A single process gets its own values.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jspec import __version__

LEAST = 256  # bytes of a message, so that short ones share a program
_step_timeout: float | None = None


class ElsewhereError(ValueError):
    """An error of another process."""


class ExchangeError(RuntimeError):
    """A message of another process did not arrive, for example because that process has ended."""


def several() -> bool:
    """Whether this program has more than one process."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0."""
    return not several() or jax.process_index() == 0


def check_devices() -> None:
    """Raise `ValueError` on all processes where they have different numbers of devices."""
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"process {i} has {counts[i]}" for i in sorted(counts))
        raise ValueError(f"processes have different numbers of devices: {shown}; give each as many")


def from_all(value: Any) -> list[Any]:
    """``value`` of each process, in the order of processes.

    Args:
        value: anything that JSON can represent.

    Raises:
        ExchangeError: where another process has ended.
        ValueError: as `check_devices`.
    """
    if not several():
        return [value]
    check_devices()
    payload = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = _gathered(np.int32(len(payload)))
    message = np.zeros(max(LEAST, 1 << int(lengths.max() - 1).bit_length()), np.uint8)
    message[: len(payload)] = payload
    messages = _gathered(message)
    pairs = zip(messages, lengths, strict=True)
    return [json.loads(message[:length].tobytes()) for message, length in pairs]


def _gathered(x: Any) -> np.ndarray:
    try:
        return process_allgather(x)
    except (
        ValueError,
        jax.errors.JaxRuntimeError,
    ) as error:  # which one depends on who notices first
        raise ExchangeError(str(error)) from error


def from_first(value: Any) -> Any:
    """``value`` of process 0."""
    return from_all(value)[0]


def check_same(values: Mapping[str, str]) -> None:
    """Raise `ValueError` on all processes where one has other ``values`` than process 0.

    Keys, the same on all processes, name the values in the error; `digest` shortens long values.
    """
    first, *others = from_all(dict(values))
    for index, other in enumerate(others, start=1):
        differing = [name for name in first if first[name] != other.get(name)]
        if differing:
            raise ValueError(
                f"process {index} has other {' and '.join(differing)} than process 0; give every "
                "process of --hosts or jax.distributed the same"
            )


def versions() -> dict[str, str]:
    """The versions of jspec and JAX, for `check_same`."""
    return {"versions of jspec and JAX": f"{__version__} {jax.__version__}"}


def digest(value: Any) -> str:
    """A short text that differs if the representation of ``value`` differs."""
    # The address of an object, part of Python's default representation, differs by process.
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def whole(x: jax.Array) -> np.ndarray:
    """``x`` as one NumPy array, gathered where processes hold parts of it."""
    return np.asarray(x if x.is_fully_addressable else process_allgather(x, tiled=True))


def limit_steps(seconds: float | None) -> None:
    """End this process if a block of `in_time` takes more than ``seconds``; None: no limit."""
    global _step_timeout
    _step_timeout = seconds


def steps_are_limited() -> bool:
    """Whether `limit_steps` has set a limit."""
    return _step_timeout is not None


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """A block that waits for other processes, which may hang without an error."""
    if _step_timeout is None:
        yield
        return
    # The waiting thread has released the GIL, so the timer's thread runs.
    timer = threading.Timer(_step_timeout, _end, [_step_timeout])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(seconds: float) -> None:
    """End the process: an exception cannot reach a thread that waits in a collective."""
    line = (
        f"jspec: error: a step has not finished within step_timeout={seconds} seconds: another "
        "process is stuck or slower than that; this one ends\n"
    )
    os.write(2, line.encode())  # sys.stderr may be silenced, or its lock held
    os._exit(1)


@contextlib.contextmanager
def all_or_none() -> Iterator[None]:
    """A block that fails on all processes if it fails on one; inside it, no process waits for
    another.

    Raises `ElsewhereError` on the processes on which it did not fail itself.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        if not several():
            raise
        failure = error
    if not several():
        return
    messages = from_all(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for index, message in enumerate(messages):
        if message is not None:
            raise ElsewhereError(f"process {index}: {message}")
