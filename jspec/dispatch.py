"""Which backend runs an operation, and why another cannot."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from jspec import tuned
from jspec.gpu import gpu_in_use


class BackendError(ValueError):
    """A backend that was asked for by name, or every backend of an operation, refused."""


@dataclasses.dataclass(frozen=True, init=False)
class Backends(Mapping[str, str]):
    """Which backend serves which operation, as in ``Backends(verify_greedy="cuda")``.

    A frozen, hashable map from an operation's name to a backend's; an operation that is not named
    takes its best one. Names are checked where the map is used: `check` says what there is.
    """

    _named: tuple[tuple[str, str], ...]

    def __init__(self, named: Mapping[str, str] | None = None, /, **more: str):
        pairs = {**(named or {}), **more}
        object.__setattr__(self, "_named", tuple(sorted(pairs.items())))

    def __getitem__(self, operation: str) -> str:
        return dict(self._named)[operation]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._named))

    def __len__(self) -> int:
        return len(self._named)

    def check(self, operations: Iterable[Operation]) -> None:
        """Raise `BackendError` for a name that is none of ``operations`` or of their backends."""
        known = {operation.name: operation for operation in operations}
        for name, backend in self._named:
            if name not in known:
                raise BackendError(
                    f"there is no operation {name!r}; name one of {', '.join(known)}"
                )
            known[name].check(backend)


_PREFERRED: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "preferred", default=Backends()
)


@contextlib.contextmanager
def preferring(backends: Mapping[str, str]) -> Iterator[None]:
    """Have operations called inside take these backends where no implementation is named.

    For what a caller cannot hand ``implementation``, as the products of a model. It counts while
    JAX traces, so that whatever is jitted must be traced anew for other ``backends``.
    """
    token = _PREFERRED.set(backends)
    try:
        yield
    finally:
        _PREFERRED.reset(token)


def preferred(operation: str) -> str | None:
    """The backend that an enclosing `preferring` names for ``operation``, or None."""
    return _PREFERRED.get().get(operation)


@dataclasses.dataclass(frozen=True)
class Backend:
    """One implementation of an operation.

    ``supports(*args, **kwargs)`` gets the operation's arguments and returns the reason why this
    backend refuses them, or None.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]


def always(*args: Any, **kwargs: Any) -> None:
    """The ``supports`` of a backend that never refuses."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments that an operation is tried with.

    ``build()`` gives the arguments with numpy arrays, the same ones each time; ``static``: its
    keyword arguments. ``small``: quick, and no output is unspecified, so that `jspec doctor` can
    run it and compare all of them. ``wanted()``: what it must give, from something else than
    jspec; where that is None, what the reference gives.
    """

    name: str
    build: Callable[[], tuple[Any, ...]]
    static: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: bool = False
    expected: Callable[[], Any] | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments on the default device."""
        return jax.tree.map(jnp.asarray, self.build())


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation's backends, how to choose among them, and the cases that it is tried with.

    ``backends``: each a `Backend`, or ``"module:NAME"`` of one, imported when first asked.
    ``sizes(*args, **kwargs)``: the sizes, by name, that `jspec.tuned` orders the backends by on
    NVIDIA GPUs and CPUs; elsewhere they are tried in the order ``elsewhere``. ``cases()``: each
    with another name.
    """

    name: str
    backends: Mapping[str, Backend | str]
    sizes: Callable[..., Mapping[str, int]]
    cases: Callable[[], Sequence[Case]]
    elsewhere: Sequence[str] = ("xla",)

    def backend(self, name: str) -> Backend:
        """The backend of that name."""
        backend = self.backends[name]
        if isinstance(backend, str):
            module, attribute = backend.split(":")
            backend = getattr(import_module(module), attribute)
        return backend

    @property
    def never_refusing(self) -> tuple[str, ...]:
        """The names of the backends that take all arguments, on every machine."""
        pairs = self.backends.items()
        return tuple(n for n, b in pairs if isinstance(b, Backend) and b.supports is always)

    def check(self, implementation: str | None) -> None:
        """Raise `BackendError` where ``implementation`` is no backend of this operation."""
        if implementation is not None and implementation not in self.backends:
            known = ", ".join(self.backends)
            raise BackendError(
                f"{self.name} has no implementation {implementation!r}; choose one of {known}, or "
                "None for the best"
            )

    def order(self, *args: Any, **kwargs: Any) -> Sequence[str]:
        """The backends to try here for these arguments, from best to worst."""
        if jax.default_backend() != "cpu" and gpu_in_use() is None:
            return self.elsewhere
        # Of a table's names those that there are: an operation may be cut to some backends.
        backend_order = tuned.order(self.name, self.sizes(*args, **kwargs))
        return [name for name in backend_order if name in self.backends]

    def choose(self, implementation: str | None, *args: Any, **kwargs: Any) -> Backend:
        """The backend that ``implementation`` names, or the best one that does not refuse.

        Raises `BackendError` with the reason of each backend that was asked.
        """
        self.check(implementation)
        asked = self.order(*args, **kwargs) if implementation is None else [implementation]
        reasons = []
        for name in asked:
            backend = self.backend(name)
            reason = backend.supports(*args, **kwargs)
            if reason is None:
                return backend
            reasons.append(f"{name}: {reason}")
        raise BackendError(f"{self.name} cannot run as asked; " + "; ".join(reasons))

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        implementation = implementation or preferred(self.name)
        backend = self.choose(implementation, *args, **kwargs)
        # Profiles and compiled programs then say which operation an instruction is from.
        with jax.named_scope(self.name):
            return backend.run(*args, **kwargs)
