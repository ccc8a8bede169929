"""Compiled programs, cached by function, settings and shapes, and what compiling them took."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from jspec.decode.state import FlatModels
from jspec.processes import in_time, steps_are_limited

MAX_PROGRAMS = 64  # programs; each holds megabytes
TRACED = ("jax_enable_x64", "jax_default_matmul_precision")  # settings that change a program
OnCompile = Callable[[bool], None]


class Programs:
    """Executables of jitted functions, which threads share: each one is compiled once.

    The last ``limit`` that were asked for are cached; a `Timed` caches those that it ran as well.
    """

    def __init__(self, limit: int = MAX_PROGRAMS) -> None:
        self._limit = limit
        self._compiled: OrderedDict[_Hashed, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, function: Any, *args: Any, **static: Any) -> Any:
        """``function(*args, **static)``; its keyword arguments are static and hashable."""
        return self.timed()(function, *args, **static)

    def timed(self, on_compile: OnCompile | None = None) -> Timed:
        """The same programs for a caller that counts what its own calls cost."""
        return Timed(self, on_compile)

    def clear(self) -> None:
        """Drop all cached programs."""
        with self._lock:
            self._compiled.clear()

    def executable(
        self, key: _Hashed, compile_: Callable[[], Any], clock: Callable[[], AbstractContextManager]
    ) -> Any:
        """The executable of ``key``, made by ``compile_`` unless another thread makes it.

        Making it, or waiting for the other thread, runs inside ``clock()``.
        """
        while True:
            with self._lock:
                if is_new := key not in self._compiled:
                    self._compiled[key] = Future()
                program = self._compiled[key]
                self._compiled.move_to_end(key)
                excess = len(self._compiled) - self._limit
                dropped = [self._compiled.popitem(last=False)[0] for _ in range(excess)]
            for other in dropped:
                # JAX holds what it compiled as long as it holds the trace of the function.
                other.parts[0].clear_cache()
            if is_new:
                try:
                    with clock():
                        program.set_result(compile_())
                except BaseException as error:
                    # Others that wait for it try for themselves.
                    with self._lock:
                        if self._compiled.get(key) is program:
                            del self._compiled[key]
                    program.set_exception(error)
                    raise
            elif not program.done():
                with clock():
                    program.exception()  # waits
            if program.exception() is None:
                return program.result()


class Timed:
    """Runs `Programs`, and counts what its own calls cost. Each that it ran lives as long as it.

    ``on_compile(True)`` is called before it compiles, ``on_compile(False)`` after it.

    Attributes:
        compile_s: Seconds in which it compiled, or waited for another thread that did.
        compilations: Programs that it compiled itself.
    """

    def __init__(self, programs: Programs, on_compile: OnCompile | None = None) -> None:
        self._programs = programs
        self._on_compile = on_compile or (lambda begins: None)
        self._executables: dict[_Hashed, Any] = {}
        self.compile_s = 0.0
        self.compilations = 0

    def __call__(self, function: Any, *args: Any, **static: Any) -> Any:
        executable = self.executable(function, args, static)
        if not steps_are_limited():
            return executable(*args)
        with in_time():  # a call returns before its program has ended
            return jax.block_until_ready(executable(*args))

    def executable(self, function: Any, args: tuple[Any, ...], static: dict[str, Any]) -> Any:
        """The executable for these arguments.

        ``args`` may hold `jax.ShapeDtypeStruct` with a sharding in place of arrays, so that a
        program can be compiled before there is memory for them.
        """

        def compile_() -> Any:
            executable = function.lower(*args, **static).compile()
            self.compilations += 1
            return executable

        key = _key_of(function, args, static)
        executable = self._executables.get(key)  # once: an equal key is compared array by array
        if executable is None:
            executable = self._programs.executable(key, compile_, self.clock)
            self._executables[key] = executable
        return executable

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Counts the time spent inside as compiling."""
        begin = time.perf_counter()
        try:
            self._on_compile(True)
            yield
        finally:
            try:
                self._on_compile(False)
            finally:
                self.compile_s += time.perf_counter() - begin


class _Hashed:
    """Parts of a key. Their hash is computed once, as that takes longer than all else."""

    __slots__ = ("_hash", "parts")

    def __init__(self, *parts: Any) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Hashed) and self._hash == other._hash and self.parts == other.parts
        )


def _key_of(function: Any, args: tuple[Any, ...], static: dict[str, Any]) -> _Hashed:
    """What a program is cached by; its first part is the function."""
    traced = tuple(getattr(jax.config, name) for name in TRACED)
    return _Hashed(function, *map(_signature, args), tuple(sorted(static.items())), traced)


def _signature(arg: Any) -> _Hashed:
    """What a program depends on in an argument: its structure, and the types of its arrays.

    That of `FlatModels` is computed once.
    """
    if isinstance(arg, FlatModels) and arg.signature is not None:
        return arg.signature
    leaves, structure = jax.tree.flatten(arg)
    signature = _Hashed(structure, tuple(map(_type_of, leaves)))
    if isinstance(arg, FlatModels):
        arg.signature = signature
    return signature


def _type_of(leaf: Any) -> tuple:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.sharding
    return np.shape(leaf), np.result_type(leaf)


PROGRAMS = Programs()
