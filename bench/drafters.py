"""The drafters that suites compare, by the names of their tables, and sampling settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jspec
from jspec.decode.state import Exact
from jspec.policies import named_policy

RATIO = 0.07  # of the context, which sparse drafters read
PLAIN = "none"


def drafts(ratio: float = RATIO) -> dict[str, str]:
    """The text of every drafter, as `jspec.named_draft` takes it, by its name.

    The paper's Vegas, ``vegas-first``, scores the first and the bonus token. ``vegas`` scores all
    verified ones, and a position counts as much as the best of the two before it.
    """
    guided, scored = f"budget={ratio},least=0", f"budget={ratio},dense_layers=0"
    vegas = f"vegas:{guided},collect=all,ahead=2"
    return {
        PLAIN: PLAIN,
        "ngram": "ngram",
        "ngram-1": "ngram:min_match=1",
        "ngram-tree": "ngram:min_match=1,branches=16",
        "suffix": "suffix",
        "vegas": vegas,
        "vegas-first": f"vegas:{guided}",
        "vegas-weight": f"vegas:{guided},score=weight",
        "streaming": f"streaming:window={ratio}",
        "specextend": f"specextend:{guided}",
        "sparsespec": f"sparsespec:{guided}",
        "quest": f"quest:{scored}",
        "exact-topk": f"exact_topk:{scored},sinks=0,recent=0",
        "suffix>vegas": f"suffix > {vegas}",
        "ngram>vegas": f"ngram > {vegas}",
        "vegas-int8": f"{vegas},quantized=int8",
        "vegas-mxfp4": f"{vegas},quantized=mxfp4",
    }


ALL = drafts()
# Drafters by a second model, which the suite `real` takes by ``--draft-model``.
BY_A_MODEL = {"model": "model", "model>vegas": f"model > {ALL['vegas']}"}
# Drafters by trained hashes, and the lossy policy, which the suite `real` takes by ``--hashes``.
BY_HASHES = {
    "hata": f"hata:budget={RATIO},dense_layers=0",
    "vegas-refresh": f"vegas:budget={RATIO},least=0,collect=all,refresh=2,ahead=1,per_head=true",
}
LOSSY = {"hata-lossy": f"hata:budget={RATIO}"}
TREES = {"ngram-tree": "ngram-1"}  # drafters whose drafts are trees, and the same as chains
FEW = (PLAIN, "ngram", "suffix", "vegas")  # everywhere; the others at headline cells alone

DEFAULT_BACKENDS = "default"  # the measured orders of `jspec.tuned`
BACKENDS = (DEFAULT_BACKENDS, "pallas", "cuda", "triton", "xla")

# By the words of ``sampling=``; "paper": as Yue et al. 2026 sample.
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "t0.8": {"temperature": 0.8},
    "paper": {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
}
# Of the time of a step alone: what logits processors and log-probabilities cost.
STEP_SAMPLING = SAMPLING | {
    "bias": {"logit_bias": {1: 1.0}, "banned_tokens": (2, 3)},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "logprobs": {"logprobs": 0},
    "top5": {"logprobs": 5},
    "top5-paper": {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "logprobs": 5},
}


# Levels of exactness, by their names in cases.
EXACT: dict[str, Exact | None] = {"no": None, "tokens": "tokens", "bits": "bits"}


def preferring(name: str) -> jspec.Backends:
    """The backends of a step by one of `BACKENDS`."""
    return jspec.Backends() if name == DEFAULT_BACKENDS else jspec.Backends.prefer(name)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A drafter: its ``name`` in tables, and the step that drafts by it."""

    name: str
    config: jspec.StepConfig

    @classmethod
    def of(
        cls, name: str, gamma: int, exact: str = "no", backends: str = DEFAULT_BACKENDS
    ) -> Drafting:
        """The drafter of a name in `ALL`, `BY_A_MODEL` or `BY_HASHES`, or the policy in `LOSSY`.

        Its steps are of a level of `EXACT`, and prefer ``backends``, one of `BACKENDS`.
        """
        if name in LOSSY:
            target = named_policy(LOSSY[name])
            config = jspec.StepConfig(0, jspec.NoDraft(), preferring(backends), target)
            return cls(name, config)
        text = (ALL | BY_A_MODEL | BY_HASHES)[name]
        draft, gamma = jspec.named_draft(text), 0 if name == PLAIN else gamma
        return cls(name, jspec.StepConfig(gamma, draft, preferring(backends), exact=EXACT[exact]))


def params_of(sampling: str, new: int, rows: int) -> list[jspec.SamplingParams]:
    """Requests of at most ``new`` tokens, with the seed of their row."""
    settings = SAMPLING[sampling]
    return [jspec.SamplingParams(max_new_tokens=new, seed=row, **settings) for row in range(rows)]


def drafter_names(cells: str, only: Sequence[str], others: Iterable[str] = ()) -> list[str]:
    """The drafters of a cell: ``few`` or ``all``, of which ``only`` names some, if any.

    ``others``: those that need something, as those of `BY_A_MODEL` do, where it is there. Plain
    decoding is always first, as all others are compared with it in the same run.
    """
    return [
        name
        for name in [*(FEW if cells == "few" else ALL), *others]
        if name == PLAIN or not only or name in only
    ]
