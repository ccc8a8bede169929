"""The drafters of `python -m bench real`, by the names of its tables, and its sampling settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jspec
from bench.decode.drafting import RATIO

PLAIN = "none"
GUIDED = f"budget={RATIO},least=0"
SCORED = f"budget={RATIO},dense_layers=0"
VEGAS = f"vegas:{GUIDED},collect=all"
# Everywhere; the others at headline cells alone. The paper's Vegas scores the first and the bonus
# token, `vegas` all verified ones.
FEW = {PLAIN: PLAIN, "ngram": "ngram", "suffix": "suffix", "vegas": VEGAS}
MORE = {
    "vegas-first": f"vegas:{GUIDED}",
    "vegas-weight": f"vegas:{GUIDED},score=weight",
    "streaming": f"streaming:window={RATIO}",
    "specextend": f"specextend:{GUIDED}",
    "sparsespec": f"sparsespec:{GUIDED}",
    "quest": f"quest:{SCORED}",
    "exact-topk": f"exact_topk:{SCORED},sinks=0,recent=0",
    "suffix>vegas": f"suffix > {VEGAS}",
    "ngram>vegas": f"ngram > {VEGAS}",
    "vegas-int8": f"{VEGAS},quantized=int8",
    "vegas-mxfp4": f"{VEGAS},quantized=mxfp4",
    "quantspec": "quantspec",
}
ALL = FEW | MORE

# By the words of ``sampling=``; "paper": as Yue et al. 2026 sample.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "t0.8": {"temperature": 0.8},
    "paper": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter: its ``name`` in tables, and the step that drafts by it."""

    name: str
    config: jspec.StepConfig

    @classmethod
    def of(cls, name: str, gamma: int, exact: bool) -> Drafting:
        draft = jspec.named_draft(ALL[name])
        return cls(name, jspec.StepConfig(0 if name == PLAIN else gamma, draft, exact=exact))


def params_of(sampling: str, new: int, rows: int) -> list[jspec.SamplingParams]:
    """Requests of at most ``new`` tokens, with the seed of their row."""
    settings = SAMPLING[sampling]
    return [jspec.SamplingParams(max_new_tokens=new, seed=row, **settings) for row in range(rows)]


def drafter_names(drafts: str, only: Sequence[str]) -> list[str]:
    """The drafters of a cell: ``few`` or ``all``, of which ``only`` names some, if any.

    Plain decoding is always first, as all others are compared with it in the same run.
    """
    names = FEW if drafts == "few" else ALL
    return [name for name in names if name == PLAIN or not only or name in only]
