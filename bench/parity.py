"""How often decoding flips a greedy token against exact plain decoding, and by how much.

The reference is exact plain decoding of each prompt, one at a time. A row is a mode, a drafter and
a batch. ``decode``: text is generated, and a prompt's first token that differs is its flip, since
what follows continues another text. ``forced``: passes read the reference's own text, so that every
token is compared. A flip's margin is the difference of the two highest exact logits there. The time
of exact decoding is in `bench.throughput`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.table import Table

import jspec
from bench import cases, decoding
from bench.at_once import Task, as_completed
from bench.decode.catalogue import MODELS
from bench.decode.shapes import first_layers, random_model
from bench.settings import Settings, bar, console
from bench.suite import Suite
from jspec.decode.draft.named import names
from jspec.decode.exact import check_exact
from jspec.decode.stats import Stats
from jspec.dispatch import BackendError
from jspec.eval.sample import prepared
from jspec.policies import Dense

MODES = ("exact", "ordinary")  # --backend chooses
EXACT, ORDINARY = MODES
CHAIN = "suffix > hata"
DRAFTS = (*(name for name in names() if name not in ("hata_off", "dense")), CHAIN)
BUNDLED = "bundled"
CHOICES = {"model": (BUNDLED, *MODELS), "draft": (*names(), CHAIN)}
# layers: of a model with random weights, 0 for all; S: tokens of a prompt; new: tokens after it.
DEFAULT: cases.Case = {
    "model": BUNDLED,
    "layers": 0,
    "draft": "none",
    "gamma": 8,
    "B": 8,
    "S": 512,
    "prompts": 64,
    "new": 512,
}
QUICK = {"S": 128, "prompts": 8, "new": 64}
FORCED = (1, 9)  # tokens of a pass over the reference's text
PIECE = 64  # tokens of a pass that only computes logits
BASELINE_KEYS = ("model", "layers", "S", "prompts", "new")
MAX_WORKERS = 8


def parse(text: str) -> cases.Case:
    """Parse a case such as ``draft=ngram,gamma=8,B=32``; raises `ValueError` if it is invalid."""
    return cases.parse(text, DEFAULT, CHOICES)


def cases_of(settings: Settings) -> list[cases.Case]:
    """The requested cases, else plain decoding and drafters, all gammas at the largest batch."""
    if settings.cases:
        return [parse(text) for text in settings.cases]
    if settings.quick:
        few = [("none", 8), ("ngram", 8), ("streaming", 4)]
        return [DEFAULT | QUICK | {"draft": draft, "gamma": gamma} for draft, gamma in few]
    drafts = [draft for draft in DRAFTS if draft != "none"]
    drafted = [
        {"draft": draft, "gamma": gamma, "B": batch}
        for batch, gammas in ((8, (4,)), (32, (1, 4, 16)))
        for draft, gamma in itertools.product(drafts, gammas)
    ]
    drafted += [{"draft": "ngram", "gamma": 16, "B": 1}, {"draft": "vegas", "gamma": 4, "B": 1}]
    plain = [{"draft": "none", "B": batch} for batch in (1, 8, 32)]
    return [DEFAULT | case for case in (*plain, *drafted)]


@dataclasses.dataclass(frozen=True)
class Flips:
    """``count`` flips among ``compared`` tokens, and the ``margins`` of those in exact logits."""

    compared: int
    margins: list[float]

    @property
    def count(self) -> int:
        return len(self.margins)

    @property
    def figures(self) -> dict[str, Any]:
        """The figures for a row."""
        figures: dict[str, Any] = {"compared": self.compared, "flips": self.count}
        figures["flips_per_1000"] = 1000 * self.count / max(self.compared, 1)
        return figures | {"margins": self.margins}


def first_flips(
    tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]], margins: np.ndarray
) -> Flips:
    """The first token of each text that differs; later ones are not compared.

    ``margins [prompts, new]``: of the reference. Raises `ValueError` for texts of unequal length.
    """
    compared, flip_margins = 0, []
    for text, expected, margin in zip(tokens, reference, margins, strict=True):
        differs = np.flatnonzero(np.asarray(text) != np.asarray(expected))
        if len(text) != len(expected):
            raise ValueError(f"a text has {len(text)} tokens and its reference {len(expected)}")
        compared += int(differs[0]) + 1 if len(differs) else len(text)
        flip_margins += [float(margin[differs[0]])] if len(differs) else []
    return Flips(compared, flip_margins)


def forced_flips(choices: np.ndarray, reference: np.ndarray, margins: np.ndarray) -> Flips:
    """All tokens of the reference's text for which a pass chooses another one."""
    return Flips(reference.size, margins[choices != reference].tolist())


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A model, its prompts, and the reference by exact plain decoding.

    ``tokens`` int32 and ``margins`` ``[prompts, new]``.
    """

    model: jspec.Decoder
    tokenizer: jspec.Tokenizer | None
    prompts: list[list[int]]
    tokens: np.ndarray
    margins: np.ndarray

    @property
    def workers(self) -> int:
        """Number of rows to make concurrently; one for a large model, whose caches fill the memory.

        Concurrency is harmless, since compiling on the CPU takes most of the time and rows have no
        speed.
        """
        is_bundled = self.tokenizer is not None
        return min(MAX_WORKERS, max((os.cpu_count() or 1) // 2, 1)) if is_bundled else 1

    @classmethod
    def of(cls, case: cases.Case) -> Baseline:
        """Make the reference of a case; raises `BackendError` if exact decoding is unavailable."""
        if case["model"] == BUNDLED:
            model, tokenizer = jspec.load_bundled()
            prompts = decoding.texts(tokenizer, case["prompts"], case["S"])
        else:
            config = MODELS[case["model"]]
            config = first_layers(config, case["layers"]) if case["layers"] else config
            check_exact(jspec.Decoder(config, dtype=jnp.bfloat16, rngs=None), Dense())
            model, tokenizer = random_model(config), None
            drawn = np.random.default_rng(0).integers(
                0, config.vocab_size, (case["prompts"], case["S"])
            )
            prompts = drawn.tolist()
        check_exact(model, Dense())
        tokens, _ = decoded(model, prompts, 1, case["new"], draft=None, exact=True)
        tokens = np.array(tokens)
        choices, margins = forced(model, prompts, tokens, PIECE, case["B"], exact=True)
        if (choices != tokens).any():
            raise RuntimeError("exact passes over the reference's own text chose other tokens")
        return cls(model, tokenizer, prompts, tokens, margins)


def decoded(
    model: jspec.Decoder, prompts: list[list[int]], batch: int, new: int, **settings: Any
) -> tuple[list[tuple[int, ...]], Stats]:
    """``new`` tokens of each prompt, ``batch`` of them at a time, and the statistics of all."""
    params = jspec.SamplingParams(max_new_tokens=new, ignore_eos=True)
    parts = [
        jspec.generate(model, prompts[begin : begin + batch], params, **settings)
        for begin in range(0, len(prompts), batch)
    ]
    return [tokens for part in parts for tokens in part.tokens], Stats.merged(
        [part.stats for part in parts]
    )


def forced(
    model: jspec.Decoder,
    prompts: list[list[int]],
    tokens: np.ndarray,
    piece: int,
    batch: int,
    *,
    exact: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Greedy choices of passes of ``piece`` tokens over ``tokens [prompts, new]``, and margins."""
    config = jspec.StepConfig(piece - 1, jspec.NoDraft(), exact=exact)
    new, by_batch = tokens.shape[1], []
    for begin in range(0, len(prompts), batch):
        batch_rows = slice(begin, begin + batch)
        params = jspec.SamplingParams(max_new_tokens=new, ignore_eos=True)
        state = jspec.start_decoding(model, prompts[batch_rows], params, config)
        lasts = [prompt[-1:] for prompt in prompts[batch_rows]]
        # A token is chosen from the logits of the token before it.
        fed = np.concatenate([lasts, tokens[batch_rows, :-1]], axis=1).astype(np.int32)
        cache, parts = state.cache, []
        for at in range(0, new, piece):
            read = np.zeros((len(fed), piece), np.int32)
            read[:, : new - at] = fed[:, at : at + piece]
            index = at + np.arange(piece)
            cache, *part = _forced_pass(
                model, cache, read, np.where(index < new, index, -1), config
            )
            parts.append([np.asarray(x)[:, : new - at] for x in part])
        by_batch.append([np.concatenate(x, axis=1) for x in zip(*parts, strict=True)])
    choices, margins = (np.concatenate(x) for x in zip(*by_batch, strict=True))
    return choices, margins


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def _forced_pass(model, cache, tokens, index, config):
    """Append ``tokens [B, T]`` at ``index [T]`` after the cache's length.

    Returns the cache, the greedy choice after each token, and the margin of its logit.
    """
    index = index[None]
    positions = jnp.where(index >= 0, cache.lengths[:, None] + index, -1)
    with config.of_target():
        attend = jspec.policies.DenseAttend(positions)
        hidden, cache = model(tokens, positions, attend, cache)
        logits = model.logits(hidden)
    choices, best = jnp.argmax(logits, axis=-1), jnp.max(logits, axis=-1)
    is_choice = jnp.arange(logits.shape[-1])[None, None] == choices[..., None]
    others = jnp.where(is_choice, -jnp.inf, logits)
    return cache, choices, best - jnp.max(others, axis=-1)


def run(settings: Settings) -> dict[str, Any]:
    """Every case, exact and ordinary; an exact row with a flip fails the run."""
    return {"rows": _rows(settings)}


def _rows(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield each row as it completes."""
    grouped = itertools.groupby(
        cases_of(settings), key=lambda case: [case[key] for key in BASELINE_KEYS]
    )
    groups = [list(group) for _, group in grouped]
    makers = [_makers(group, settings) for group in groups]
    with bar("parity", sum(map(len, makers))) as advance:
        for group, named in zip(groups, makers, strict=True):
            reference = Task("exact plain decoding", functools.partial(Baseline.of, group[0]))
            try:
                (baseline,) = as_completed("parity", [reference], 1)
            except BackendError as error:
                for case in group:
                    yield {"case": case, "mode": EXACT, "reason": str(error), "checked": None}
                    advance()
                continue
            tasks = [Task(name, functools.partial(maker, baseline)) for name, maker in named]
            for row in as_completed("parity", tasks, baseline.workers):
                yield row
                advance()


def _makers(
    group: Sequence[cases.Case], settings: Settings
) -> list[tuple[str, Callable[[Baseline], dict[str, Any]]]]:
    """Functions that make the rows of these cases, with names."""
    makers, batches = [], set()
    for case in group:
        batch = case["B"]
        for mode in filter(settings.wants, MODES):
            maker = functools.partial(_of_drafter, case=case, mode=mode, settings=settings)
            makers.append((f"{mode} {case['draft']} gamma={case['gamma']} B={batch}", maker))
        if settings.wants(ORDINARY) and batch not in batches:
            batches.add(batch)
            for piece in FORCED:
                maker = functools.partial(_of_passes, case=case, piece=piece)
                makers.append((f"passes of {piece} B={batch}", maker))
    return makers


def _of_drafter(
    baseline: Baseline, case: cases.Case, mode: str, settings: Settings
) -> dict[str, Any]:
    """The row of generated text."""
    draft = jspec.named_draft(case["draft"])
    is_plain, arrays = isinstance(draft, jspec.NoDraft), None
    if baseline.tokenizer is not None:
        arrays = prepared(draft.cache_policy, baseline.model, baseline.tokenizer)
    tokens, stats = decoded(
        baseline.model,
        baseline.prompts,
        case["B"],
        case["new"],
        draft=draft,
        gamma=0 if is_plain else case["gamma"],
        draft_model=baseline.model if draft.traits.needs_model else None,
        policy_params=arrays,
        exact=mode == EXACT,
    )
    flips = first_flips(tokens, baseline.tokens.tolist(), baseline.margins)
    row = {"case": case | ({"gamma": 0} if is_plain else {}), "mode": mode, "kind": "decode"}
    row["dtype"] = str(baseline.model.dtype)
    row |= flips.figures | {"mean_accepted_length": stats.mean_accepted_length}
    right = mode == ORDINARY or flips.count == 0
    return row | {"checked": right if settings.check else None}


def _of_passes(baseline: Baseline, case: cases.Case, piece: int) -> dict[str, Any]:
    """The row of ordinary passes over the reference's text."""
    choices, _ = forced(
        baseline.model, baseline.prompts, baseline.tokens, piece, case["B"], exact=False
    )
    row = {"case": case | {"draft": "", "gamma": piece - 1}, "mode": ORDINARY, "kind": "forced"}
    row["dtype"] = str(baseline.model.dtype)
    return (
        row | forced_flips(choices, baseline.tokens, baseline.margins).figures | {"checked": True}
    )


def key(row: dict[str, Any]) -> str:
    """The key that identifies a row."""
    return str((sorted(row["case"].items()), row["mode"], row.get("kind")))


def compare(result: dict[str, Any], earlier: dict[str, Any]) -> int:
    """Write into each row its flips in the earlier result; returns how many had one."""
    before = {key(row): row["flips"] for row in counted(earlier)}
    rows = [row for row in counted(result) if key(row) in before]
    for row in rows:
        row["flips_before"] = before[key(row)]
    return len(rows)


HEADINGS = (
    *("model", "B", "mode", "draft", "gamma", "length", "tokens", "flips", "per 1000"),
    *("margin", "most"),
)
FOOT = (
    "length: tokens that a pass commits, the mean; tokens: compared with exact plain decoding; "
    "flips: of a text its first, of passes over its text (forced) every one; margin, most: of a "
    "flip's two highest exact logits, median and largest"
)


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row under `HEADINGS`."""
    case, margins = row["case"], row["margins"]
    is_forced = row["kind"] == "forced"
    draft = "forced" if is_forced else case["draft"]
    length = "" if is_forced or draft == "none" else f"{row['mean_accepted_length']:.2f}"
    spread = (f"{statistics.median(margins):.3f}", f"{max(margins):.3f}") if margins else ("", "")
    flips = "WRONG" if row["checked"] is False else str(row["flips"])
    counts = (f"{row['compared']:,}", flips, f"{row['flips_per_1000']:.3f}")
    return (
        *(case["model"], str(case["B"]), row["mode"], draft, str(case["gamma"]), length),
        *(*counts, *spread),
    )


def counted(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that ran."""
    return [row for row in result["rows"] if "flips" in row]


def show(result: dict[str, Any]) -> None:
    """Print one line per row, and why others did not run."""
    table = Table(title=result["machine"]["device"], box=None, padding=(0, 1, 0, 0))
    rows, screen = counted(result), console()
    compared = any("flips_before" in row for row in rows)
    for heading in (*HEADINGS, *(["before"] if compared else [])):
        words = heading in ("model", "mode", "draft")
        table.add_column(heading, justify="left" if words else "right")
    for row in rows:
        table.add_row(*cells(row), *([str(row.get("flips_before", ""))] if compared else []))
    if rows:
        screen.print(table)
        screen.print(FOOT, markup=False)
    for reason in dict.fromkeys(row["reason"] for row in result["rows"] if "reason" in row):
        screen.print(f"not run: {reason}", markup=False)


SUITE = Suite(
    "parity",
    "how often decoding flips a greedy token against exact plain decoding",
    run,
    show,
    rivals=MODES,
    compare=compare,
    custom_clocks=True,
    case=parse,
)
