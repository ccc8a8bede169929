"""Programs to time: compiled from an operation's backends, or functions of rivals."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.settings import Settings, bar
from jspec.dispatch import BackendError, Operation

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to time, with its inputs.

    ``start()`` launches it and returns its outputs, ``wait(outputs)`` blocks until they are ready,
    ``check(outputs)`` returns whether they are right. ``alone``: it runs on streams unknown to JAX,
    so nothing may be queued around it. ``chosen``: `implementation=None` selects it.
    """

    name: str
    start: Callable[[], Any]
    check: Callable[[Any], bool]
    wait: Callable[[Any], Any] = jax.block_until_ready
    alone: bool = False
    chosen: bool = False


@dataclasses.dataclass(frozen=True)
class Absent:
    """A program that cannot be timed: it is unsupported, or ``failed`` unexpectedly."""

    name: str
    reason: str
    failed: bool = False


@dataclasses.dataclass(frozen=True)
class Source:
    """A function to jit, the shapes of its arguments, and which of them it may overwrite."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = ()


@contextlib.contextmanager
def compiler_pool(workers: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads that compile. Leaving it drops what has not begun, so that Ctrl-C does not wait."""
    pool = ThreadPoolExecutor(workers)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def compile_all(
    label: str, sources: Mapping[Key, Source | Absent], seconds: dict[Key, float] | None = None
) -> dict[Key, jax.stages.Compiled | Absent]:
    """Compile each source: lower sequentially, compile on all cores.

    A failure becomes an `Absent`, so that one broken backend does not end the run. ``seconds`` gets
    the time to lower and compile each program.
    """

    def timed(key: Key, begin: float, compile: Callable[[], Any]) -> Any:
        compiled = compile()
        if seconds is not None:
            seconds[key] = time.perf_counter() - begin
        return compiled

    done: dict[Key, jax.stages.Compiled | Absent] = {}
    pending = {}
    with ThreadPoolExecutor() as pool, bar(f"compile {label}", 2 * len(sources)) as advance:
        for key, source in sources.items():
            if isinstance(source, Absent):
                done[key] = source
            else:
                jitted = jax.jit(source.function, donate_argnums=source.donated)
                begin = time.perf_counter()
                try:
                    lowered = jitted.lower(*source.arguments)
                    pending[key] = pool.submit(timed, key, begin, lowered.compile)
                except BackendError as error:
                    done[key] = Absent(failure(key, error).name, str(error))
                except Exception as error:
                    done[key] = failure(key, error)
            advance()
        for key, future in pending.items():
            try:
                done[key] = future.result()
            except Exception as error:
                done[key] = failure(key, error)
            advance()
    return {key: done[key] for key in sources}


def failure(key: Any, error: Exception) -> Absent:
    """The `Absent` of a program that raised; the last part of its key is its name."""
    name = key[-1] if isinstance(key, tuple) else str(key)
    first = next(iter(str(error).splitlines()), "")
    return Absent(str(name), f"failed: {type(error).__name__}: {first[:200]}", failed=True)


def unavailable(name: str, error: Exception) -> Absent:
    """The `Absent` of a rival that raised: one of its packages is not installed, or it failed."""
    if isinstance(error, ModuleNotFoundError):
        return Absent(name, f"{error.name} is not installed")
    return failure(name, error)


def shapes(arguments: Any) -> Any:
    """The shapes and dtypes of a tree of arrays, for lowering."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)


def sources(
    operation: Operation,
    arguments: tuple[Any, ...],
    settings: Settings,
    **static: Any,
) -> dict[str, Source | Absent]:
    """The backends of an operation that the settings select, for arguments of these shapes."""
    by_backend: dict[str, Source | Absent] = {}
    for name in filter(settings.wants, operation.backends):
        try:
            backend = operation.backend(name)
        except ImportError as error:
            by_backend[name] = failure(name, error)
            continue
        reason = backend.supports(*arguments, **static)
        if reason:
            by_backend[name] = Absent(name, reason)
        else:
            by_backend[name] = Source(partial(backend.run, **static), arguments)
    return by_backend


def bound(
    name: str,
    compiled: jax.stages.Compiled | Absent,
    arguments: tuple[Any, ...],
    check: Callable[[Any], bool],
    *,
    chosen: bool = False,
    in_place: Mapping[int, int] | None = None,
) -> Program | Absent:
    """A compiled program with its arguments.

    ``in_place``: from the index of an output to that of the argument in whose memory it is, which
    it is in the next call.
    """
    if isinstance(compiled, Absent):
        return compiled
    if not in_place:
        return Program(name, lambda: compiled(*arguments), check, chosen=chosen)
    current = list(arguments)
    for argument in in_place.values():
        current[argument] = jnp.copy(current[argument])  # other programs have it, too

    def start() -> Any:
        outputs = compiled(*current)
        for output, argument in in_place.items():
            current[argument] = outputs[output]
        return outputs

    return Program(name, start, check, chosen=chosen)


def chosen(operation: Operation, arguments: Sequence[Any], **static: Any) -> str | None:
    """The backend that `implementation=None` selects."""
    try:
        return operation.choose(None, *arguments, **static).name
    except BackendError:
        return None


# Autotuning the matmuls would take longer than the matmuls themselves.
AUTOTUNING_OFF = {"xla_gpu_autotune_level": 0}


def reference(operation: Operation, arguments: Sequence[Any], **static: Any) -> Any:
    """The outputs of an operation's reference, the backend ``xla``, as NumPy arrays."""
    run = jax.jit(partial(operation.backend("xla").run, **static), compiler_options=AUTOTUNING_OFF)
    with jax.default_matmul_precision("highest"):
        return jax.device_get(run(*arguments))


def equals(expected: Any) -> Callable[[Any], bool]:
    """A check that outputs are these arrays."""
    leaves = jax.tree.leaves(expected)
    return lambda out: all(map(np.array_equal, jax.tree.leaves(out), leaves))
