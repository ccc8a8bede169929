"""Whether the logits of a position have the same bits in passes of every length.

Texts are fed token by token, and then by passes of T tokens in smaller batches, among other texts:
position by position, the logits of both are compared bit for bit. Equal tokens alone would prove
less, since the likeliest token is rarely close to the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench.cases import Case
from bench.drafters import EXACT
from bench.point import Row, row, row_without
from bench.program import compiler_pool, failure
from bench.settings import Settings, bar
from bench.suite import Benchmark
from bench.texts import texts
from jspec.cache import Cache
from jspec.decode.checks import check_exact
from jspec.decode.on_mesh import layouts_for
from jspec.decode.prefill import rounded_capacity
from jspec.decode.state import Exact
from jspec.models.bundled import bundled_path
from jspec.policies.collect import run_collecting
from jspec.policies.dense import DENSE, DenseAttend
from jspec.typing import Array

# texts: of S tokens, B of them at a time in passes of one token; in passes of T the largest divisor
# up to B / T, so these have many.
DEFAULT: Case = {"S": 512, "texts": 2016, "B": 1008, "exact": "tokens"}
WIDTHS = range(2, 11)  # tokens of a pass
COLLECTING = "vegas"  # passes of `COLLECTED` tokens that score all keys for Vegas
COLLECTED = 6
PLAIN = "1"  # passes of one token, with which others are compared
NAMES = (*map(str, WIDTHS), COLLECTING)
_LOWERING = threading.Lock()  # one program after the other, so that the first is ready early


def complete(case: Case) -> Case:
    if case["texts"] % case["B"]:
        raise ValueError(f"texts={case['texts']} must be a multiple of B={case['B']}")
    return case


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each length of passes: positions compared, and those whose logits differ."""
    path = settings.model or bundled_path()
    model, tokenizer = jspec.load_model(path, dtype="bfloat16"), jspec.load_tokenizer(path)
    case = {"model": settings.model.stem if settings.model else "bundled", **case}
    exact = EXACT[case["exact"]]
    try:
        if exact:
            check_exact(model, DENSE, exact)
    except jspec.BackendError as error:
        yield row("passes", case, PLAIN, checked=None, reason=str(error))
        return
    names = [PLAIN, *(name for name in NAMES if settings.wants(name))]
    passes = {name: Passes(name, exact, case) for name in names}
    with compiler_pool() as pool:
        programs = {name: pool.submit(passes[name].compiled, model) for name in names}
        # A token of a model's own tokenizer may have more bytes than `texts` counts on.
        longer = texts(tokenizer, range(case["texts"]), 2 * case["S"])
        ids = np.array([text[: case["S"]] for text in longer], np.int32)
        expected = None
        for seed, name in enumerate(names):
            order = np.random.default_rng(seed).permutation(len(ids))
            try:
                program = programs[name].result()
                begin = time.perf_counter()
                digests = passes[name].of(program, model, ids[order])
            except Exception as error:
                yield row_without("passes", case, failure(name, error))
                if name == PLAIN:
                    return
                continue
            figures = {"batch": passes[name].batch, "seconds": time.perf_counter() - begin}
            if expected is None:
                expected = np.empty_like(digests)
                expected[order] = digests
                yield row("passes", case, name, checked=None, **figures)
                continue
            figures |= compared(digests, expected[order], order)
            checked = not figures["differing"] if exact else None
            yield row("passes", case, name, checked=checked, **figures)


def compared(digests: np.ndarray, expected: np.ndarray, order: np.ndarray) -> Row:
    """The positions compared, those that differ, and text and position of the first one.

    ``digests``, ``expected``: ``[texts, S, 2]``, of the texts in ``order``.
    """
    differs = (digests != expected).any(axis=-1)
    figures: Row = {"compared": differs.size, "differing": int(differs.sum())}
    if figures["differing"]:
        text, position = np.argwhere(differs)[0].tolist()
        figures["first"] = [int(order[text]), position]
    return figures


class Passes:
    """Passes of one length over the texts of a case; ``name``: of `NAMES` or `PLAIN`.

    Attributes:
        batch: texts at a time.
    """

    def __init__(self, name: str, exact: Exact | None, case: Case):
        collects = name == COLLECTING
        width = COLLECTED if collects else int(name)
        draft = jspec.named_draft(COLLECTING) if collects else jspec.NoDraft()
        self._config = jspec.StepConfig(width - 1 if collects else 0, draft, exact=exact)
        self._name, self._size, count = name, case["S"], -(-case["S"] // width)
        positions = np.arange(count * width, dtype=np.int32).reshape(count, width)
        self._positions = np.where(positions < self._size, positions, -1)
        limit = max(case["B"] // width, 1)
        self.batch = max(n for n in range(1, limit + 1) if case["texts"] % n == 0)

    def compiled(self, model: jspec.Decoder) -> jax.stages.Compiled:
        """The program of a batch, for a thread of its own."""
        ids = jax.ShapeDtypeStruct((self.batch, self._size), jnp.int32)
        jitted = jax.jit(digests, static_argnames="config")
        with _LOWERING:
            lowered = jitted.lower(model, ids, self._positions, config=self._config)
        return lowered.compile()

    def of(self, program: jax.stages.Compiled, model: jspec.Decoder, ids: np.ndarray) -> np.ndarray:
        """Digests of the logits after each of ``ids [texts, S]``, uint32 ``[texts, S, 2]``."""
        batches = ids.reshape(-1, self.batch, self._size)
        parts = []
        with bar(f"passes of {self._name}", len(batches)) as advance:
            for batch in batches:
                part = np.moveaxis(np.asarray(program(model, batch, self._positions)), 0, 1)
                parts.append(part.reshape(self.batch, -1, 2)[:, : self._size])
                advance()
        return np.concatenate(parts)


def digests(model: jspec.Decoder, ids: Array, positions: Array, config: jspec.StepConfig) -> Array:
    """The digests of passes at ``positions [passes, T]``, uint32 ``[passes, B, T, 2]``."""
    factors = jax.random.bits(jax.random.key(0), (2, model.config.vocab_size)) | 1
    policy = config.draft.collect_policy
    width, capacity = positions.shape[1], rounded_capacity(positions.size)
    layouts = layouts_for(model, capacity, width, rings=not config.exact)
    empty = Cache.create(model.config.layers, layouts, len(ids), model.dtype)

    def one_pass(cache: Cache, at: Array) -> tuple[Cache, Array]:
        tokens = ids[:, at]
        of_rows = jnp.broadcast_to(at, tokens.shape)
        with config.of_target():
            if policy is None:
                hidden, cache = model(tokens, of_rows, DenseAttend(of_rows), cache)
            else:
                hidden, cache, _ = run_collecting(model, tokens, of_rows, cache, policy=policy)
            logits = model.logits(hidden)
        return cache, digest(logits, factors)

    return jax.lax.scan(one_pass, empty, positions)[1]


def digest(logits: Array, factors: Array) -> Array:
    """Two sums of the bits of ``logits [..., V]``, weighted by odd ``factors [2, V]``, mod 2^32.

    A difference in one logit changes both; others are missed with a chance of about 2^-64.
    """
    bits = jax.lax.bitcast_convert_type(logits.astype(jnp.float32), jnp.uint32)
    sums = [(bits * jnp.broadcast_to(x, bits.shape)).sum(-1, dtype=jnp.uint32) for x in factors]
    return jnp.stack(sums, axis=-1)


PASSES = Benchmark(
    name="passes",
    default=DEFAULT,
    choices={"exact": tuple(EXACT)},
    gpu=["texts=2016"],
    quick=["texts=252,B=252"],
    cpu=["S=192,texts=2,B=2,exact=no", "S=512,texts=8,B=8,exact=no"],
    complete=complete,
    names=NAMES,
    rows=rows,
)
