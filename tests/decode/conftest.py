"""What tests of decoding share: an engine, what XLA compiles, and how far chunks run ahead."""

import math

import jax
import pytest

from jspec.decode.engine import Engine
from tests.decode.engines import engine_of
from tests.decode.watching import Watched, watched

COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if "backend_compile" in event else None
)


@pytest.fixture
def compiled():
    """How often XLA has compiled since the test began: ``compiled()``."""
    before = len(COMPILED)
    return lambda: len(COMPILED) - before


@pytest.fixture
def ahead(monkeypatch) -> Watched:
    """Chunks run ahead wherever they may; what runs."""
    return watched(monkeypatch, math.inf)


@pytest.fixture
def behind(monkeypatch) -> Watched:
    """No chunk runs ahead, so that a turn reads the chunk that it starts."""
    return watched(monkeypatch, 0)


@pytest.fixture(scope="module")
def engine(sharp) -> Engine:
    """One that has compiled all that it needs, for all tests of a module that end its
    requests."""
    result = engine_of(sharp, "ngram", prefill_chunk=64)
    result.warm_up()
    return result
