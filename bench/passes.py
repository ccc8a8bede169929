"""Whether the logits of a position have the same bits in passes of every length.

Texts are fed token by token, and then by passes of T tokens in another order of rows: position by
position, the logits of both are compared bit for bit. Equal tokens alone would prove less, since
the likeliest token is rarely close to the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jspec
from bench.cases import Case
from bench.drafters import EXACT
from bench.point import Row, row
from bench.program import Absent, Source, compile_all, failure, shapes
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

# texts: of S tokens, B of them at a time.
DEFAULT: Case = {"S": 2048, "texts": 96, "B": 96, "exact": "tokens"}
WIDTHS = range(2, 11)  # tokens of a pass
COLLECTING = "vegas"  # passes of `COLLECTED` tokens that score all keys for Vegas
COLLECTED = 6
PLAIN = "1"  # passes of one token, with which others are compared
NAMES = (*map(str, WIDTHS), COLLECTING)


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
    # A token of a model's own tokenizer may have more bytes than `texts` counts on.
    longer = texts(tokenizer, range(case["texts"]), 2 * case["S"])
    ids = np.array([text[: case["S"]] for text in longer], np.int32)
    batches = ids.reshape(-1, case["B"], case["S"])
    names = [name for name in NAMES if settings.wants(name)]
    passes = {name: Passes(model, name, exact, *batches.shape[1:]) for name in (PLAIN, *names)}
    programs = compile_all("passes", {name: each.source(model) for name, each in passes.items()})

    def digests_of(name: str, batch: np.ndarray) -> np.ndarray:
        program = programs[name]
        if isinstance(program, Absent):
            raise RuntimeError(program.reason)
        return passes[name].of(program, model, batch)

    expected = [digests_of(PLAIN, batch) for batch in batches]
    orders = [np.random.default_rng(i).permutation(case["B"]) for i in range(len(batches))]
    with bar("passes", len(names)) as advance:
        for name in names:
            try:
                differs = [
                    (digests_of(name, batch[order]) != want[order]).any(axis=-1)
                    for batch, order, want in zip(batches, orders, expected, strict=True)
                ]
            except Exception as error:
                reason = failure(name, error).reason
                yield row("passes", case, name, checked=False, reason=reason)
                continue
            differing = int(np.sum(differs))
            figures = {"compared": ids.size, "differing": differing}
            yield row("passes", case, name, checked=not differing if exact else None, **figures)
            advance()


class Passes:
    """Passes of one length over texts ``[batch, size]``; ``name``: of `NAMES` or `PLAIN`."""

    def __init__(self, model: jspec.Decoder, name: str, exact: Exact | None, batch: int, size: int):
        collects = name == COLLECTING
        width = COLLECTED if collects else int(name)
        draft = jspec.named_draft(COLLECTING) if collects else jspec.NoDraft()
        self._config = jspec.StepConfig(width - 1 if collects else 0, draft, exact=exact)
        count = -(-size // width)
        positions = np.arange(count * width, dtype=np.int32).reshape(count, width)
        self._positions = np.where(positions < size, positions, -1)
        self._batch, self._size = batch, size
        layouts = layouts_for(model, rounded_capacity(count * width), width, rings=not exact)
        self._cache = functools.partial(
            Cache.create, model.config.layers, layouts, batch, model.dtype
        )

    def source(self, model: jspec.Decoder) -> Source:
        ids = jax.ShapeDtypeStruct((self._batch, self._size), jnp.int32)
        arguments = shapes(model), jax.eval_shape(self._cache), ids, shapes(self._positions)
        return Source(functools.partial(digests, config=self._config), arguments)

    def of(self, program: jax.stages.Compiled, model: jspec.Decoder, ids: np.ndarray) -> np.ndarray:
        """Digests of the logits after each of ``ids [B, S]``, uint32 ``[B, S, 2]``."""
        found = np.asarray(program(model, self._cache(), ids, self._positions))
        return np.moveaxis(found, 0, 1).reshape(self._batch, -1, 2)[:, : self._size]


def digests(
    model: jspec.Decoder, cache: Cache, ids: Array, positions: Array, config: jspec.StepConfig
) -> Array:
    """The digests of passes at ``positions [passes, T]``, uint32 ``[passes, B, T, 2]``."""
    factors = jax.random.bits(jax.random.key(0), (2, model.config.vocab_size)) | 1
    policy = config.draft.collect_policy

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

    return jax.lax.scan(one_pass, cache, positions)[1]


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
    gpu=["texts=576"],
    quick=["texts=96"],
    cpu=["S=192,texts=2,B=2,exact=no", "S=512,texts=4,B=4,exact=no"],
    complete=complete,
    names=NAMES,
    rows=rows,
)
