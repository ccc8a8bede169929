"""The interface of a verifier, which drafts and verifies one block a row."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]


class Verifier(Protocol):
    def __call__(
        self,
        draft_logits: Floats,
        target_logits: Floats,
        *,
        temperature: float,
        top_p: float,
        seeds: NDArray[np.uint32],
        positions: NDArray[np.int32],
    ) -> ArrayLike:
        """Draw draft tokens, verify them, and return the committed tokens of one block a row.

        Args:
            draft_logits: float32 ``[N, gamma, V]``; gamma may be 0.
            target_logits: float32 ``[N, gamma + 1, V]``.
            temperature: of draft and target; 0 is greedy.
            top_p: of draft and target; 1 is off.
            seeds: uint32 ``[N]``, seeds of the requests. A verifier with its own random numbers
                may ignore them and ``positions``.
            positions: int32 ``[N]``, positions of the first tokens of the blocks.

        Returns:
            Integers ``[N, gamma + 1]``, -1 after the end of a row's block.
        """
        ...


class VerifierError(Exception):
    """A verifier raised an exception or asked to end the process."""


def guarded(verifier: Verifier) -> Verifier:
    """``verifier``, whose exceptions and exits become a `VerifierError`; Ctrl-C stays itself."""

    @functools.wraps(verifier)
    def call(*arguments: Any, **settings: Any) -> ArrayLike:
        try:
            return verifier(*arguments, **settings)
        except SystemExit as error:
            raise VerifierError(f"the verifier exits, with status {error.code!r}") from None
        except Exception as error:
            raise VerifierError(f"the verifier raises {type(error).__name__}: {error}") from error

    return call


def load(name: str) -> Verifier:
    """Import the verifier ``module:function``.

    Raises:
        ValueError: there is none.
        VerifierError: its module raises or exits.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"--verifier {name!r} must be module:function, as in my.package:verify")
    try:
        verifier = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise ValueError(
            f"--verifier {name!r}: {error}; run it where the module can be found"
        ) from None
    except (Exception, SystemExit) as error:
        raise VerifierError(f"{module} ends with {type(error).__name__}: {error}") from error
    if not callable(verifier):
        raise ValueError(f"--verifier {name!r}: {module} has no function {function!r}")
    _check_signature(name, verifier)
    return cast(Verifier, verifier)


def _check_signature(name: str, verifier: Callable[..., object]) -> None:
    try:
        signature = inspect.signature(verifier)
    except ValueError:
        return  # of a callable that says nothing
    settings = dict.fromkeys(("temperature", "top_p", "seeds", "positions"))
    try:
        signature.bind(None, None, **settings)
    except TypeError as error:
        raise ValueError(f"--verifier {name!r}: {error}; see docs/conformance.md") from None
