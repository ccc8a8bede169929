"""Compiled programs, cached by function, settings and shapes, and what compiling them took."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np

from jspec.decode.state import FlatModels
from jspec.processes import in_time, steps_are_limited

MAX_PROGRAMS = 64  # programs; each holds megabytes
TRACED = ("jax_enable_x64", "jax_default_matmul_precision")  # settings that change a program
OnCompile = Callable[[bool], None]


class Programs:
    """Runs jitted functions through executables that it compiles once and caches.

    At most ``limit`` are cached, those that ran last, next to those that live callers hold. Threads
    share them: a program that one thread compiles is waited for by the others that need it.
    """

    def __init__(self, limit: int = MAX_PROGRAMS) -> None:
        self._limit = limit
        self._compiled: OrderedDict[_Key, _Program] = OrderedDict()
        self._holders: weakref.WeakSet[Timed] = weakref.WeakSet()
        self._lock = threading.Lock()

    def __call__(self, function: Any, *args: Any, **static: Any) -> Any:
        """``function(*args, **static)``; its keyword arguments are static and hashable."""
        return self.timed()(function, *args, **static)

    def timed(self, on_compile: OnCompile | None = None, *, holds: bool = False) -> Timed:
        """The same programs for a caller that counts what its own calls cost.

        ``holds``: whether the programs that it runs are cached as long as it lives.
        """
        timed = Timed(self, on_compile)
        if holds:
            timed.pinned = set()
            with self._lock:
                self._holders.add(timed)
        return timed

    def clear(self) -> None:
        """Drop all cached programs."""
        with self._lock:
            self._compiled.clear()

    def executable(
        self, cost: Timed, function: Any, args: tuple[Any, ...], static: dict[str, Any]
    ) -> Any:
        """The executable for these arguments. The cost of getting it is added to ``cost``.

        ``args`` may hold `jax.ShapeDtypeStruct` with a sharding in place of arrays, so that a
        program can be compiled before there is memory for them.
        """
        key = _Key(function, args, static)
        while True:
            program, is_new = self._claim(key)
            if is_new:
                self._compile(program, cost, function, args, static)
            elif not program.done():
                with cost.clock():
                    program.exception()  # waits for the thread that compiles it
            if program.exception() is None:
                if cost.pinned is not None:
                    with self._lock:
                        cost.pinned.add(program)
                return program.result()

    def _claim(self, key: _Key) -> tuple[_Program, bool]:
        """The program of ``key``, and whether the caller has to compile it."""
        with self._lock:
            program = self._compiled.get(key)
            if program is not None:
                self._compiled.move_to_end(program.key)
                return program, False
            program = self._compiled[key] = _Program(key)
            pinned = set[_Program]().union(*(holder.pinned or () for holder in self._holders))
            loose = [other for other, entry in self._compiled.items() if entry not in pinned]
            dropped = loose[: max(len(loose) - self._limit, 0)]
            for other in dropped:
                del self._compiled[other]
        for other in dropped:
            # JAX holds what it compiled as long as it holds the trace of the function.
            other.function.clear_cache()
        return program, True

    def _compile(self, program: _Program, cost: Timed, function, args, static) -> None:
        try:
            with cost.clock():
                executable = function.lower(*args, **static).compile()
        except BaseException as error:
            # Others that wait for it try for themselves.
            with self._lock:
                if self._compiled.get(program.key) is program:
                    del self._compiled[program.key]
            program.set_exception(error)
            raise
        cost.compilations += 1
        program.set_result(executable)


class Timed:
    """Runs programs of `Programs` and counts what its own calls cost.

    ``on_compile(True)`` is called before it compiles, ``on_compile(False)`` after it.

    Attributes:
        compile_s: Seconds in which it compiled, or waited for another thread that did.
        compilations: Programs that it compiled itself.
        pinned: Programs that are cached as long as it lives, None where it holds none.
    """

    def __init__(self, programs: Programs, on_compile: OnCompile | None = None) -> None:
        self._programs = programs
        self._on_compile = on_compile or (lambda begins: None)
        self.compile_s = 0.0
        self.compilations = 0
        self.pinned: set[_Program] | None = None

    def __call__(self, function: Any, *args: Any, **static: Any) -> Any:
        executable = self._programs.executable(self, function, args, static)
        if not steps_are_limited():
            return executable(*args)
        with in_time():  # a call returns before its program has ended
            return jax.block_until_ready(executable(*args))

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

    __slots__ = ("__weakref__", "_hash", "parts")

    def __init__(self, *parts: Any) -> None:
        self.parts, self._hash = parts, hash(parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, _Hashed) and self._hash == other._hash and self.parts == other.parts
        )


class _Key(_Hashed):
    """What a program is cached by."""

    __slots__ = ("function",)

    def __init__(self, function: Any, args: tuple[Any, ...], static: dict[str, Any]) -> None:
        traced = tuple(getattr(jax.config, name) for name in TRACED)
        super().__init__(function, *map(_signature, args), tuple(sorted(static.items())), traced)
        self.function = function


class _Program(Future[Any]):
    """An executable, once it is compiled.

    ``key``: the one that it is cached by, which compares to itself at once, and to another one
    array by array.
    """

    def __init__(self, key: _Key) -> None:
        super().__init__()
        self.key = key


def _signature(arg: Any) -> _Hashed:
    """What a program depends on in an argument: its structure, and the types of its arrays.

    That of models is computed once, and equal ones are the same object, which compares at once.
    """
    if not isinstance(arg, FlatModels):
        return _signature_of(arg)
    if arg.signature is None:
        signature = _signature_of(arg)
        arg.signature = _SIGNATURES.setdefault(signature, signature)
    return arg.signature


def _signature_of(arg: Any) -> _Hashed:
    leaves, structure = jax.tree.flatten(arg)
    return _Hashed(structure, tuple(map(_type_of, leaves)))


def _type_of(leaf: Any) -> tuple:
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return leaf.shape, leaf.dtype, leaf.sharding
    return np.shape(leaf), np.result_type(leaf)


_SIGNATURES = weakref.WeakValueDictionary[_Hashed, _Hashed]()
PROGRAMS = Programs()
