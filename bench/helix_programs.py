"""The programs of whole steps on a mesh, and what one device decodes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import helix_state
from bench.cases import Case
from bench.helix_state import (
    DEFAULT,
    MESH,
    alone,
    decoded,
    filled,
    model_of,
    rewound,
    shapes_of,
    small,
    step_config,
)
from bench.settings import bar
from jspec.decode.step import decode_chunk
from jspec.models.decoder import Decoder
from jspec.policies.attend import dense_attend
from jspec.typing import Array


class Programs:
    """Compiled programs by their case, and what one device decodes there.

    Programs of many layers take long to compile: all are lowered before the first one runs, and
    compiled on all cores.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._chunks: dict[Any, Future[jax.stages.Compiled]] = {}
        self._logits: dict[Any, Future[jax.stages.Compiled]] = {}
        self._reference: tuple[Any, Any] = (None, None)

    def prepare(self, cases: Sequence[Case]) -> None:
        """Compile what the ``cases`` and the checks of them need."""
        smaller = [small(here) for here in cases]
        every = [*map(alone, smaller), *smaller, *cases]
        # A model is made once for all that needs it.
        by_mesh = sorted(every, key=lambda here: str(_mesh_of(here)))
        with bar("compile helix-step", len(every)) as advance:
            for mesh, group in itertools.groupby(by_mesh, key=_mesh_of):
                model = model_of(mesh)
                for here in group:
                    self._start(model, here)
                    advance()
                del model
        for program in (*self._chunks.values(), *self._logits.values()):
            program.exception()  # waits for it: compiling tries kernels out on the device

    def chunk(self, here: Case) -> jax.stages.Compiled:
        """`decode_chunk` of `STEPS` steps."""
        return self._chunks[_key(here)].result()

    def reference(self, here: Case) -> tuple[np.ndarray, np.ndarray]:
        """Greedy tokens ``[B, STEPS]`` of one device, and the logits ``[B, STEPS, V]`` of a pass
        over them."""
        here = alone(here)
        if self._reference[0] != here:
            self._reference = here, self._decoded(here)
        return self._reference[1]

    def _decoded(self, here: Case) -> tuple[np.ndarray, np.ndarray]:
        config, model = step_config(here), model_of(here)
        state, _ = self.chunk(here)(model, filled(model, here, config))
        tokens, state = decoded(state, here), rewound(here, state)
        fed = np.concatenate([np.asarray(state.last_token)[:, None], tokens[:, :-1]], axis=1)
        logits, _ = self._logits[_key(here)].result()(model, state.cache, jnp.asarray(fed))
        return tokens, np.asarray(logits)

    def _start(self, model: Any, here: Case) -> None:
        if _key(here) in self._chunks:
            return
        self._chunks[_key(here)] = self._compiled(lambda: _lowered(model, here))
        if here == alone(here):
            self._logits[_key(here)] = self._compiled(lambda: _lowered_logits(model, here))

    def _compiled(self, lower: Callable[[], Any]) -> Future[jax.stages.Compiled]:
        try:
            return self._pool.submit(lower().compile)
        except Exception as error:
            # Its frames, and those of what it came from, hold caches.
            error.__context__ = error.__cause__ = None
            failed: Future[jax.stages.Compiled] = Future()
            failed.set_exception(error.with_traceback(None))
            return failed


def _key(here: Case) -> tuple[Any, ...]:
    return tuple(sorted(here.items()))


def _mesh_of(here: Case) -> Case:
    """The case without what a model does not depend on."""
    return DEFAULT | {name: here[name] for name in ("shape", *MESH)}


def _lowered(model: Any, here: Case) -> Any:
    config = step_config(here)
    return decode_chunk.lower(model, shapes_of(model, here, config), config, helix_state.STEPS)


def _lowered_logits(model: Any, here: Case) -> Any:
    cache = shapes_of(model, here, step_config(here)).cache
    tokens = jax.ShapeDtypeStruct((here["B"], helix_state.STEPS), jnp.int32)
    return _logits.lower(model, cache, tokens)


@functools.partial(jax.jit, donate_argnames="cache")
def _logits(model: Decoder, cache: Any, tokens: Array) -> tuple[Array, Any]:
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, cache = model(tokens, positions, dense_attend(positions), cache)
    return model.logits(hidden), cache
