"""Drafters on a real language model: real texts, acceptance and speed as they happen.

``--model`` is a GGUF file or a model directory with a chat template. Prompts are long texts that
every machine has, with a question in the model's chat template (`bench.real.texts`). Every batch is
prefilled once, and every drafter starts from there. Greedy answers must be those of plain decoding
but for near ties; sampled ones about as likely; those of a lossy policy are compared with plain
decoding's, and are not checked. Two speeds: *steady*, tokens per second while all
rows decode, at the acceptance of the answers that do not repeat themselves; *batch*, all tokens
over the time of `jspec.generate`, whose end is that of the slowest row. Rivals run where
``--backend`` names them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

import jspec
from bench import cases, ceilings, show
from bench.ceilings import Ceilings
from bench.decode.shapes import weight_bytes
from bench.drafters import (
    ALL,
    BACKENDS,
    BY_A_MODEL,
    BY_HASHES,
    DEFAULT_BACKENDS,
    EXACT,
    LOSSY,
    PLAIN,
    SAMPLING,
    Drafting,
    drafter_names,
)
from bench.machine import describe
from bench.program import failure
from bench.real import rivals, tables, texts
from bench.real.cell import Cell
from bench.real.figures import Row, where
from bench.settings import Settings, bar
from bench.suite import Suite
from jspec.cli.compile_cache import keep_programs
from jspec.models.draft_model import load_draft_model
from jspec.policies import Hata

# S: tokens of the longest prompt; new: of an answer at most; drafts: `few` everywhere, `all` at
# headline cells; backends: what the operations of a step prefer.
DEFAULT: cases.Case = {
    "B": 16,
    "S": 4096,
    "gamma": 5,
    "new": 128,
    "sampling": "greedy",
    "drafts": "few",
    "exact": "no",
    "backends": DEFAULT_BACKENDS,
}
CHOICES = {
    "sampling": tuple(SAMPLING),
    "drafts": ("few", "all"),
    "exact": tuple(EXACT),
    "backends": BACKENDS,
}
PROMPTS = 8  # of a cell at least: smaller batches are decoded one after the other
SHORT = 16384  # positions; a model with fewer has the cells of a small one
OF_A_CELL = ("B", "S", "gamma", "exact", "backends")


def case(text: str) -> cases.Case:
    """Parse a case of ``--case``; raises `ValueError` if it is invalid."""
    return cases.parse(text, DEFAULT, CHOICES)


def grid(max_context: int) -> list[str]:
    """The suite's own cells for a model with so many positions."""
    if max_context < SHORT:
        batches, contexts, headline, exact = (12, 96), ("2K", "7K"), (96, "7K"), (12, "2K")
    else:
        batches, contexts = (1, 16, 64), ("4K", "16K", "30K")
        headline, exact = (64, "30K"), (16, "4K")
    result = []
    for context in contexts:
        for batch in batches:
            cell = f"B={batch},S={context}"
            if (batch, context) == headline:
                result += [f"{cell},drafts=all,sampling={sampling}" for sampling in SAMPLING]
                result += [
                    f"{cell},new=1024,sampling={sampling}" for sampling in ("greedy", "t0.8")
                ]
            else:
                result += [f"{cell},sampling={sampling}" for sampling in ("greedy", "t0.8")]
    result += [f"B={headline[0]},S={headline[1]},backends={name}" for name in BACKENDS[1:]]
    return [*result, f"B={exact[0]},S={exact[1]},exact=tokens"]


Pair = tuple[jspec.Decoder, jspec.Decoder | None]  # a model, and one that drafts for it


class Refused(ValueError):
    """A model or an earlier result that this suite cannot take."""


def run(settings: Settings) -> dict[str, Any]:
    """Rows come one by one; with ``settings.resume`` those of an earlier run come first.

    Raises `Refused` before anything is measured.
    """
    assert settings.model is not None
    keep_programs()
    name = settings.model.stem
    second_name = settings.draft_model and settings.draft_model.stem
    earlier = _earlier(settings.resume, name, second_name)
    try:
        # A model without a tokenizer or template fails before its weights are read.
        tokenizer = jspec.load_tokenizer(settings.model)
        template = jspec.load_chat_template(settings.model)
        if template is None:
            raise Refused(f"{settings.model} has no chat template; real asks questions in one")
        model, second = jspec.load_model(settings.model), None
        if settings.draft_model is not None:
            second = load_draft_model(settings.draft_model, tokenizer)
        if settings.hashes is not None:
            Hata(hashes=str(settings.hashes)).prepare(model, None)  # checks that they fit
    except (jspec.CheckpointError, ValueError) as error:
        raise Refused(str(error)) from None
    limits = ceilings.measured()
    return {
        "model": {
            "name": name,
            "layers": model.config.num_layers,
            "weight_bytes": weight_bytes(model),
            "dtype": str(model.dtype),
        },
        "draft_model": second_name,
        "hashes": settings.hashes and settings.hashes.name,
        "read_ceiling_bytes_per_s": limits.read,
        "acceptance": "measured",
        "rows": _rows(settings, (model, second), tokenizer, template, limits, name, earlier),
    }


def _earlier(path: Path | None, name: str, second_name: str | None) -> list[Row]:
    """The rows of an earlier run of the same model on the same device, but for those that failed,
    which are measured again."""
    if path is None or not path.exists():
        return []
    try:
        result = show.read(path)
        of = result["suite"], result["model"]["name"], result["machine"]["device"]
        rows = result["rows"]
    except (show.NoResult, KeyError, TypeError) as error:
        raise Refused(f"--resume cannot read {path}: {type(error).__name__}: {error}") from None
    device = describe()["device"]
    if of != ("real", name, device):
        raise Refused(
            f"{path} is of {' and '.join(map(str, of))}, not of real, {name} and {device}; choose "
            "another --json"
        )
    if (second := result.get("draft_model")) not in (None, second_name):
        raise Refused(
            f"{path} has drafts by {second}, not by {second_name}; name it by --draft-model, or "
            "choose another --json"
        )
    return [row for row in rows if row["checked"] is not False]


def _rows(
    settings: Settings,
    models: Pair,
    tokenizer: jspec.Tokenizer,
    template: jspec.ChatTemplate,
    limits: Ceilings,
    name: str,
    earlier: list[Row],
) -> Iterator[Row]:
    yield from earlier
    run_number = 1 + max((row["run"] for row in earlier), default=-1)
    done = {(where(row)[:-1], row["name"]) for row in earlier}
    by_cell: dict[tuple[Any, ...], list[cases.Case]] = {}
    for asked in _cases(settings, models[0].config.max_context):
        by_cell.setdefault(tuple(asked[key] for key in OF_A_CELL), []).append(asked)
    with bar("real", len(by_cell)) as advance:
        for of_cell in by_cell.values():
            shared = {"model": name, "run": run_number}
            todo = _todo(settings, of_cell, shared, done)
            if todo:
                rows = texts.prompts(
                    tokenizer, template, max(of_cell[0]["B"], PROMPTS), of_cell[0]["S"]
                )
                yield from _of_cell(settings, models, tokenizer, rows, todo, limits, shared)
            advance()


def _cases(settings: Settings, max_context: int) -> list[cases.Case]:
    usual = grid(max_context)
    if jax.default_backend() == "cpu":
        usual = ["B=2,S=512,new=24", "B=2,S=512,new=24,sampling=t0.8"]
    elif settings.quick:
        usual = usual[:2]
    return [case(text) for text in settings.cases or usual]


def _todo(
    settings: Settings, asked: Sequence[cases.Case], shared: Row, done: set[Any]
) -> list[tuple[cases.Case, list[str]]]:
    """The cases of a cell with the drafters that have no row yet; plain decoding where any has."""
    result = []
    for one_case in asked:
        at = where({"case": one_case | shared, **shared})[:-1]
        usual = one_case["exact"] == "no" and one_case["backends"] == DEFAULT_BACKENDS
        usual = usual and one_case["sampling"] == "greedy"
        others = () if settings.draft_model is None else tuple(BY_A_MODEL)
        if settings.hashes is not None:
            others += (*BY_HASHES, *(LOSSY if usual else ()))
        names = drafter_names(one_case["drafts"], settings.only, others)
        if usual:
            # XLA keeps the memory that it once took, so rivals have a run of their own.
            names += [x for x in rivals.NAMES if x in settings.only]
        left = [x for x in names if (at, x) not in done]
        if left:
            result.append((one_case, left if PLAIN in left else [PLAIN, *left]))
    return result


def _of_cell(
    settings: Settings,
    models: Pair,
    tokenizer: jspec.Tokenizer,
    prompts: Sequence[texts.Prompt],
    todo: Sequence[tuple[cases.Case, list[str]]],
    limits: Ceilings,
    shared: Row,
) -> Iterator[Row]:
    """The rows of one cell; what cannot run is a row with its reason."""
    first = todo[0][0]

    def row(one_case: cases.Case, name: str, **rest: Any) -> Row:
        at = {"model": shared["model"], **one_case}
        return {"operation": "real", "case": at, "name": name, "run": shared["run"]} | rest

    about = {"texts": texts.digest(prompts)}
    try:
        settings_of_cell = {
            "exact": EXACT[first["exact"]],
            "limits": limits,
            "draft_model": models[1],
        }
        settings_of_cell["hashes"] = settings.hashes
        rows = [prompt.tokens for prompt in prompts]
        cell = Cell(models[0], tokenizer, rows, first["B"], **settings_of_cell)
    except Exception as error:
        yield row(first, PLAIN, checked=False, reason=failure(PLAIN, error).reason)
        return
    draftings = {
        name: Drafting.of(name, first["gamma"], first["exact"], first["backends"])
        for _, names in todo
        for name in names
        if name not in rivals.NAMES
    }
    pairs = [
        (draftings[x], one_case["sampling"])
        for one_case, names in todo
        for x in names
        if x in draftings
    ]
    cell.compile(list(dict.fromkeys(pairs)))
    for one_case, names in todo:
        for name in names:
            try:
                if name in rivals.NAMES:
                    assert settings.model is not None
                    measured = rivals.row(cell, name, one_case["new"], settings.model)
                else:
                    measured = cell.row(draftings[name], one_case["sampling"], one_case["new"])
            except Exception as error:
                measured = {"checked": False, "reason": failure(name, error).reason}
            yield row(one_case, name, **about, **measured)


SUITE = Suite(
    "real",
    "drafters on a real language model (--model): measured acceptance and speed at long context",
    run,
    tables.show,
    rivals=(*ALL, *BY_A_MODEL, *BY_HASHES, *LOSSY, *rivals.NAMES),
    custom_clocks=True,
    case=case,
)
