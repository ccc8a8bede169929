"""Draft settings on kinds of text: the default against plain decoding and every fixed gamma.

Kinds: *chats*, unrelated short prompts; *chat*, one of them; *repeats*, a document that asks about
its own earlier lines; *edit*, source code that is written again with one name changed; *long*, many
long rows. Each setting decodes the same prompts by `jspec.generate`, prefill included, after
everything is compiled; settings take turns, so that a drift of the machine meets all of them.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from keyword import iskeyword
from typing import Any

import jax
import numpy as np

import jspec
from bench.cases import Case
from bench.drafters import ALL, SAMPLING, params_of
from bench.point import Row, row
from bench.settings import Settings
from bench.suite import Benchmark, suite_of
from bench.texts import texts
from jspec.cli.compile_cache import keep_programs
from jspec.config import SamplingParams
from jspec.decode.generation import Generation
from jspec.decode.options import Gamma
from jspec.eval.ruler_bytes import training_document

GAMMAS: tuple[Gamma, ...] = (0, 1, 2, 4, 8, 16)
DEFAULT_NAME = "default"
KINDS = {"chats": (8, 128), "chat": (1, 128), "repeats": (1, 512), "edit": (1, 512)}
KINDS["long"] = (8, 1024) if jax.default_backend() == "cpu" else (64, 8192)  # rows, prompt tokens
WARMUPS = 2  # untimed runs, of which the last one may compile nothing
MOST_WARMUPS = 8
REPEATS = 7
_NAME = re.compile(r"[a-z_][a-z_0-9]{3,}")
# B and S: rows and tokens of a prompt, 0 for those of the text; new: tokens of each answer.
DEFAULT: Case = {"text": "chats", "B": 0, "S": 0, "new": 128, "draft": "ngram"}
DEFAULT |= {"sampling": "greedy"}
CHOICES = {"text": tuple(KINDS), "draft": tuple(ALL), "sampling": tuple(SAMPLING)}


def complete(case: Case) -> Case:
    """The case with the sizes of its text."""
    batch, size = KINDS[case["text"]]
    return case | {"B": case["B"] or batch, "S": case["S"] or size}


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """The default setting and every gamma: seconds of whole generations, in turns."""
    keep_programs()
    model, tokenizer = _loaded(settings)
    prompts = prompts_of(tokenizer, case)
    params = [
        dataclasses.replace(one, ignore_eos=True)
        for one in params_of(case["sampling"], case["new"], len(prompts))
    ]
    names: dict[str, Gamma] = {"plain" if not g else f"gamma {g}": g for g in GAMMAS}
    names[DEFAULT_NAME] = None
    draft = jspec.named_draft(ALL[case["draft"]])
    runs = {
        name: Setting(model, prompts, params, draft if gamma != 0 else jspec.NoDraft(), gamma)
        for name, gamma in names.items()
        if gamma == 0 or settings.wants(name)
    }
    for run in runs.values():
        run.warm()
    for _ in range(2 if settings.quick else REPEATS):
        for run in runs.values():
            run.time()
    plain = runs["plain"]
    for name, run in runs.items():
        fixed = [other for key, other in runs.items() if key != DEFAULT_NAME]
        # The median over rounds of the ratio in a round, which a drift of the machine leaves.
        best = max(fixed, key=lambda other: _ratio(other, plain))
        measured = {
            "tokens_per_s": len(prompts) * case["new"] / statistics.median(run.seconds),
            "vs_plain": _ratio(run, plain),
            "vs_best": _ratio(run, best),
            "length": run.last.stats.mean_accepted_length,
            "compile_s": run.compile_s,
            "programs": run.programs,
            "seconds": run.seconds,
            "identical": _identical(run.last, plain.last),
            "steps_at_gamma": run.last.stats.steps_at_gamma,
        }
        of_model = {"model": settings.model.stem if settings.model else "bundled", **case}
        yield row("defaults", of_model, name, checked=None, **measured)


@dataclasses.dataclass
class Setting:
    """Generations with one draft setting, and what they took.

    Attributes:
        seconds: of each timed run.
        compile_s: seconds of compiling, all before the timed runs.
        programs: programs that it compiled, but for those that other settings share.
        last: the last generation.
    """

    model: jspec.Decoder
    prompts: Sequence[Sequence[int]]
    params: Sequence[SamplingParams]
    draft: jspec.Drafter
    gamma: Gamma
    seconds: list[float] = dataclasses.field(default_factory=list)
    compile_s: float = 0.0
    programs: int = 0
    last: Generation = dataclasses.field(init=False)

    def warm(self) -> None:
        """Run until nothing compiles any more."""
        for runs in range(1, MOST_WARMUPS + 1):
            self._run()
            stats = self.last.stats
            self.compile_s, self.programs = (
                self.compile_s + stats.compile_s,
                self.programs + stats.compilations,
            )
            if runs >= WARMUPS and not stats.compilations:
                return

    def time(self) -> None:
        begin = time.perf_counter()
        self._run()
        # A program that is compiled late is no part of what later calls take.
        self.seconds.append(time.perf_counter() - begin - self.last.stats.compile_s)

    def _run(self) -> None:
        options: Any = {"draft": self.draft, "gamma": self.gamma}
        self.last = jspec.generate(self.model, self.prompts, self.params, **options)


def _ratio(one: Setting, other: Setting) -> float:
    """How many times as fast as ``other``: the median over pairs of runs that were next in turn."""
    return statistics.median(
        theirs / its for its, theirs in zip(one.seconds, other.seconds, strict=True)
    )


def _identical(one: Generation, plain: Generation) -> float:
    """The share of rows with plain decoding's tokens: all, but for near ties of rounded logits."""
    return float(np.mean([a == b for a, b in zip(one.tokens, plain.tokens, strict=True)]))


def _loaded(settings: Settings) -> tuple[jspec.Decoder, jspec.Tokenizer]:
    if settings.model is None:
        return jspec.load_bundled()
    return jspec.load_model(settings.model), jspec.load_tokenizer(settings.model)


def prompts_of(tokenizer: jspec.Tokenizer, case: Case) -> list[list[int]]:
    """``B`` prompts of ``S`` tokens of a kind of text."""
    count, size = case["B"], case["S"]
    if case["text"] == "repeats":
        documents = (training_document(8 * size, np.random.default_rng(i))[0] for i in range(count))
        return [tokenizer.encode(document)[:size] for document in documents]
    if case["text"] == "edit":
        return [
            edited(tokenizer, tokens, size)
            for tokens in texts(tokenizer, range(0, 2 * count, 2), size)
        ]
    return texts(tokenizer, range(0, 2 * count, 2), size)


def edited(tokenizer: jspec.Tokenizer, tokens: Sequence[int], size: int) -> list[int]:
    """Source code, and the begin of the same code with its most frequent name changed."""
    source = tokenizer.decode(tokens[: size // 2])
    names = Counter(name for name in _NAME.findall(source) if not iskeyword(name)).most_common(1)
    name = names[0][0] if names else "self"
    again = re.sub(rf"\b{name}\b", f"{name}_new", source)
    rest = f"\n\n# The same code with {name}_new in place of {name}:\n\n"
    first = tokenizer.encode(source + rest)
    return first + tokenizer.encode(again, special=False)[: max(size - len(first), 16)]


DEFAULTS = Benchmark(
    name="defaults",
    names=(DEFAULT_NAME, "plain", *(f"gamma {gamma}" for gamma in GAMMAS[1:])),
    rows=rows,
    complete=complete,
    default=DEFAULT,
    choices=CHOICES,
    gpu=[
        f"text={kind},new=256,sampling={sampling}"
        for kind in KINDS
        for sampling in ("greedy", "t0.8")
    ],
    quick=[f"text={kind}" for kind in KINDS],
    cpu=[f"text={kind},new=64" for kind in KINDS],
)
SUITE = dataclasses.replace(
    suite_of("defaults", "the default draft against plain decoding and every gamma", DEFAULTS),
    custom_clocks=True,
)
