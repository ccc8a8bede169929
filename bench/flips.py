"""Greedy tokens that speculation changes: flips against plain decoding at several batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jspec
from bench import ceilings
from bench.cases import Case
from bench.drafters import ALL, BY_HASHES, EXACT, FEW, PLAIN, Drafting
from bench.point import Row, row, row_without
from bench.program import compiler_pool, failure
from bench.real.cell import Cell
from bench.real.check import first_difference
from bench.settings import Settings, bar
from bench.suite import Benchmark
from bench.texts import model_and_prompts
from jspec.decode.options import usual_exact
from jspec.decode.state import Exact
from jspec.models.bundled import bundled_path
from jspec.models.hashes import FOLDER

# prompts of at most S tokens, each with `new` tokens after it whatever ends them, B at a time:
# plain decoding at the first of several batches is what all others are compared with.
DEFAULT: Case = {"S": 512, "prompts": 64, "B": (32, 96, 8, 1), "new": 512, "gamma": 5}
DEFAULT |= {"exact": "tokens"}
USUAL = (*FEW, "ngram>vegas", *BY_HASHES)  # where ``--backend`` names none
SHOWN = 4  # flips whose places are in a row
Answers = Sequence[Sequence[int]]


def rows(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each batch and drafter: rows that are not those of plain decoding.

    Prompts are prefilled once. Prompts come again where a batch has more rows.
    """
    path, count, level = settings.model, case["prompts"], EXACT[case["exact"]]
    model, tokenizer, prompts = model_and_prompts(path, count, case["S"])
    case = {"model": "bundled" if path is None else path.stem, **case}
    hashes = bundled_path() / FOLDER if path is None else settings.hashes
    known = ALL if hashes is None else ALL | BY_HASHES
    asked = [name for name in known if name in (settings.only or USUAL)]
    names = [PLAIN, *(name for name in asked if name != PLAIN)]
    draftings = [drafting_of(name, case["gamma"], model, level) for name in names]
    try:
        cell = Cell(
            *(model, tokenizer, prompts, count),
            exact=level,
            limits=ceilings.measured(),
            hashes=hashes,
            room=case["new"],
        )
    except jspec.BackendError as error:
        yield row("flips", case, PLAIN, checked=None, reason=str(error))
        return
    orders = {batch: [i % count for i in range(-(-count // batch) * batch)] for batch in case["B"]}
    cells = {batch: cell.batched(order, batch) for batch, order in orders.items()}
    expected = None
    with compiler_pool(len(draftings)) as pool:  # those of the first batch are ready first
        for each in cells.values():
            each.compiling(pool, [(drafting, "greedy") for drafting in draftings])
        for batch, each in cells.items():
            for drafting in draftings:
                at = case | {"B": batch}
                try:
                    answers, figures = decoded(each, drafting, case["new"])
                except Exception as error:
                    yield row_without("flips", at, failure(drafting.name, error))
                    if expected is None:
                        return
                    continue
                if expected is None:
                    expected = dict(zip(orders[batch], answers, strict=True))
                fell_back = drafting.config.exact != level
                figures = compared(answers, expected, orders[batch], fell_back) | figures
                checked = not figures["flips"] if level else None
                yield row("flips", at, drafting.name, checked=checked, **figures)


def drafting_of(name: str, gamma: int, model: jspec.Decoder, level: Exact | None) -> Drafting:
    """A drafter by its name; its steps are exact where ``level`` can serve them."""
    drafting = Drafting.of(name, gamma)
    config = drafting.config
    exact = usual_exact(model, config, level)
    return Drafting(name, dataclasses.replace(config, exact=exact))


def decoded(cell: Cell, drafting: Drafting, new: int) -> tuple[list[tuple[int, ...]], Row]:
    """The answers of all batches, and the steps that they took and milliseconds of each."""
    answers, steps, seconds = [], 0, 0.0
    with bar(f"{drafting.name} B={cell.batch}", len(cell.batches)) as advance:
        for index in range(len(cell.batches)):
            params = [
                jspec.SamplingParams(max_new_tokens=new, ignore_eos=True, seed=seed)
                for seed in range(cell.batch)
            ]
            generation = cell.generate(drafting, params, index)
            answers += generation.tokens
            steps += max(generation.steps)
            seconds += generation.stats.decode_s
            advance()
    return answers, {"steps": steps, "ms": 1e3 * seconds / steps}


def compared(
    answers: Answers, expected: Mapping[int, Sequence[int]], order: Sequence[int], fell_back: bool
) -> Row:
    """The rows whose answers are others than expected.

    Args:
        answers: of each row.
        expected: the answer to each prompt.
        order: the prompt of each row.
        fell_back: whether the rows were not exact, though it was asked for: all count as flips.

    Returns:
        ``flips``: such rows; ``fell_back``: rows that were not exact; ``tokens``: compared, of a
        row that differs up to the first one that does; ``first``: prompts and places of these.
    """
    places = [
        first_difference(answer, expected[prompt])
        for answer, prompt in zip(answers, order, strict=True)
    ]
    first = [[prompt, at] for prompt, at in zip(order, places, strict=True) if at is not None]
    tokens = [
        len(answer) if at is None else at + 1 for answer, at in zip(answers, places, strict=True)
    ]
    figures: Row = {"flips": len(answers) if fell_back else len(first)}
    figures |= {"fell_back": len(answers) if fell_back else 0, "tokens": sum(tokens)}
    return figures | ({"first": first[:SHOWN]} if first else {})


FLIPS = Benchmark(
    name="flips",
    default=DEFAULT,
    choices={"exact": tuple(EXACT)},
    gpu=["B=32/96/8/1"],
    quick=["B=32/8,prompts=16,new=128"],
    cpu=["S=256,prompts=2,B=2,new=12,gamma=3,exact=no"],
    names=(*ALL, *BY_HASHES),
    rows=rows,
)
