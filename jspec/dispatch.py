"""Which backend runs an operation, and why the others cannot."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import jax

from jspec import tuned
from jspec.checks import suggestion
from jspec.gpu import gpu_in_use


class BackendError(ValueError):
    """A backend that was named, or every backend of an operation, refuses these arguments."""


@dataclasses.dataclass(frozen=True, init=False)
class Backends(Mapping[str, str]):
    """Which backend runs which operation, as in ``Backends(verify_greedy="cuda")``.

    A frozen, hashable map from the name of an operation to that of a backend; other operations take
    their best one, or `prefer` one. Names are checked where the map is used: see `check`.

    Attributes:
        preferred: the backend that operations that the map does not name take where they can.
    """

    _named: tuple[tuple[str, str], ...]
    preferred: str | None

    def __init__(self, named: Mapping[str, str] | None = None, /, **more: str):
        pairs = {**(named or {}), **more}
        object.__setattr__(self, "_named", tuple(sorted(pairs.items())))
        preferred = named.preferred if isinstance(named, Backends) else None
        object.__setattr__(self, "preferred", preferred)

    @classmethod
    def prefer(cls, backend: str, named: Mapping[str, str] | None = None, /) -> Backends:
        """Backends by which every operation takes ``backend`` where it can.

        An operation that has no such backend and can run as several operations does, so that these
        take it. Where it refuses the arguments, the operation takes its best backend instead:
        `record_choices` tells which, and why.

        Args:
            backend: the name of the backend, as ``"pallas"``.
            named: backends of some operations by name, which are not replaced.
        """
        backends = cls(named)
        object.__setattr__(backends, "preferred", backend)
        return backends

    def __or__(self, named: Mapping[str, str]) -> Backends:
        """The same, with other backends for the operations that ``named`` names."""
        return Backends(self, **named)

    def __getitem__(self, operation: str) -> str:
        return dict(self._named)[operation]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def check(self, operations: Iterable[Operation]) -> None:
        """Raise `BackendError` for a name that is none of ``operations`` or of their backends.

        ``operations``: those that decoding calls.
        """
        known = {operation.name: operation for operation in operations}
        backends = {name: None for operation in known.values() for name in operation.backends}
        if self.preferred is not None and self.preferred not in backends:
            raise BackendError(
                f"no operation has a backend {self.preferred!r} to prefer; they have "
                f"{', '.join(backends)}"
            )
        for name, backend in self._named:
            if name not in known:
                raise BackendError(
                    f"decoding calls no operation {name!r}{suggestion(name, known)}; it calls "
                    f"{', '.join(known)}"
                )
            known[name].check(backend)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which backend an operation took where another one is preferred.

    Attributes:
        operation: the name of the operation.
        backend: the name of the backend that it took.
        reason: why that is not the preferred one; None where it is.
    """

    operation: str
    backend: str
    reason: str | None


_NAMED: contextvars.ContextVar[Backends] = contextvars.ContextVar(
    "named_backends", default=Backends()
)
_CHOICES: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
    "choices", default=None
)


@contextlib.contextmanager
def use_backends(backends: Mapping[str, str]) -> Iterator[None]:
    """A context in which operations run by these backends where ``implementation`` is None.

    It replaces an enclosing one. It is read while JAX traces: whatever is jitted must be traced
    again for other ``backends``, as it is where they are a static argument.
    """
    token = _NAMED.set(Backends(backends))
    try:
        yield
    finally:
        _NAMED.reset(token)


@contextlib.contextmanager
def record_choices() -> Iterator[list[Choice]]:
    """A context that lists, each once, the choices of operations by `Backends.prefer`.

    It lists those that are made while JAX traces or lowers: a program that JAX has already traced
    makes none.
    """
    choices: list[Choice] = []
    token = _CHOICES.set(choices)
    try:
        yield choices
    finally:
        _CHOICES.reset(token)


def named_backend(operation: str) -> str | None:
    """The backend that the enclosing `use_backends` names for ``operation``, or None."""
    return _NAMED.get().get(operation)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    Attributes:
        name: the name of the backend.
        run: the implementation.
        supports: called with the operation's arguments; returns the reason why this backend cannot
            run with them, or None.
        composite: whether it runs other operations, each by a backend of its own.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]
    composite: bool = False


def always(*args: Any, **kwargs: Any) -> None:
    """The ``supports`` of a backend that never refuses."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments that an operation is tested, checked and measured with.

    Attributes:
        name: the name of the case.
        build: returns the arguments as NumPy arrays, the same ones each time.
        static: the keyword arguments.
        small: whether it is quick and leaves no output unspecified, so that `jspec doctor` can run
            it and compare all outputs.
        expected: returns the result, computed without jspec; None: compare with the reference.
    """

    name: str
    build: Callable[[], tuple[Any, ...]]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: bool = False
    expected: Callable[[], Any] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments on the default device."""
        return jax.device_put(self.build())


@dataclasses.dataclass(frozen=True)
class Operation:
    """The backends of an operation, how to choose among them, and its cases.

    Attributes:
        name: the name of the operation.
        backends: each a `Backend`, or ``"module:NAME"`` of one, which is imported when first used.
        sizes: called with the operation's arguments; returns the sizes, by name, by which
            `jspec.tuned` orders the backends on NVIDIA GPUs and CPUs.
        cases: returns the cases, whose names differ.
        default_order: the order of backends on other devices, and where a table has none.
    """

    name: str
    backends: Mapping[str, Backend | str]
    sizes: Callable[..., Mapping[str, int]]
    cases: Callable[[], Sequence[Case]]
    default_order: Sequence[str] = ("xla",)

    def backend(self, name: str) -> Backend:
        """The backend ``name``."""
        backend = self.backends[name]
        if isinstance(backend, str):
            module, attribute = backend.split(":")
            backend = getattr(import_module(module), attribute)
        return backend

    @property
    def never_refusing(self) -> tuple[str, ...]:
        """The names of the backends that accept all arguments, on every machine."""
        pairs = self.backends.items()
        return tuple(n for n, b in pairs if isinstance(b, Backend) and b.supports is always)

    @property
    def composite(self) -> tuple[str, ...]:
        """The names of the backends that run other operations."""
        pairs = self.backends.items()
        return tuple(n for n, b in pairs if isinstance(b, Backend) and b.composite)

    def check(self, implementation: str | None) -> None:
        """Raise `BackendError` where ``implementation`` is no backend of this operation."""
        if implementation is not None and implementation not in self.backends:
            known = ", ".join(self.backends)
            raise BackendError(
                f"{self.name} has no implementation {implementation!r}; choose one of {known}, or "
                "None for the best"
            )

    def order(self, *args: Any, **kwargs: Any) -> Sequence[str]:
        """The backends to try on this device for these arguments, from best to worst."""
        if jax.default_backend() != "cpu" and gpu_in_use() is None:
            return self.default_order
        measured = tuned.order(self.name, self.sizes(*args, **kwargs))
        if measured is None:
            return self.default_order
        # An operation may have fewer backends than the table, as in tests.
        return [name for name in measured if name in self.backends]

    def choose(self, implementation: str | None, *args: Any, **kwargs: Any) -> Backend:
        """The backend ``implementation``, or the best one that can run with these arguments.

        Where ``implementation`` is None, a backend that the enclosing `use_backends` names is it,
        and one that it prefers comes first. Raises `BackendError` with the reason of each backend
        that was tried.
        """
        implementation = implementation or named_backend(self.name)
        self.check(implementation)
        preferred = _NAMED.get().preferred
        if implementation is None and preferred is not None:
            return self._prefer(preferred, *args, **kwargs)
        asked = self.order(*args, **kwargs) if implementation is None else [implementation]
        return self._first(asked, *args, **kwargs)

    def _prefer(self, preferred: str, *args: Any, **kwargs: Any) -> Backend:
        """The backend ``preferred``, or else a composite or the best one; records the choice."""
        first = [preferred] if preferred in self.backends else list(self.composite)
        reason = None if preferred in self.backends else f"it has no backend {preferred}"
        if reason is None:
            reason = self.backend(preferred).supports(*args, **kwargs)
        rest = self.order(*args, **kwargs)
        backend = self._first(
            [*first, *(name for name in rest if name not in first)], *args, **kwargs
        )
        choices = _CHOICES.get()
        choice = Choice(self.name, backend.name, reason)
        if choices is not None and choice not in choices:
            choices.append(choice)
        return backend

    def _first(self, names: Sequence[str], *args: Any, **kwargs: Any) -> Backend:
        """The first of these backends that can run with these arguments."""
        reasons = []
        for name in names:
            backend = self.backend(name)
            reason = backend.supports(*args, **kwargs)
            if reason is None:
                return backend
            reasons.append(f"{name}: {reason}")
        raise BackendError(f"{self.name} cannot run as asked; " + "; ".join(reasons))

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        backend = self.choose(implementation, *args, **kwargs)
        # So that profiles and compiled programs name the operation of an instruction.
        with jax.named_scope(self.name):
            return backend.run(*args, **kwargs)
