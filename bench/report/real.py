"""The tables on real models: acceptance and speed as they happen, win or lose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.cases import kilo
from bench.drafters import ALL, BY_HASHES, LOSSY, PLAIN
from bench.real.figures import (
    Row,
    batch_rate,
    committed_per_step,
    floor_rate,
    limits,
    plain_of,
    steady_rate,
    step_ms,
)
from bench.real.tables import with_error
from bench.report.markdown import Line, ratio
from bench.report.real_cells import (
    MORE,
    VARIANTS,
    VEGAS,
    Cell,
    cells,
    fastest_pairs,
    headlines,
    pairs,
)
from bench.report.runs import Run

DECODERS = {
    PLAIN: "jspec",
    "transformers": "transformers `generate`",
    "torch_graph": "torch, FlashAttention-3, CUDA graph",
}
SAMPLED = {"greedy": "greedy", "t0.8": "T=0.8", "paper": "T=0.6, top-p 0.95, top-k 20"}


def labels(card: str, case: Row) -> dict[str, str]:
    """A cell as cells of a table."""
    rows, context = str(case["B"]), kilo(case["S"])
    return {"card": card, "model": case["model"], "rows": rows, "context": context}


def rows_of(case: Row) -> str:
    return f"{case['B']} row" + ("s" if case["B"] > 1 else "")


def per_step(row: Row, *, error: bool = False) -> str:
    """Tokens per step of answers that do not repeat themselves, in brackets of all where those
    are none; with the standard ``error``."""
    mean, every = (committed_per_step(row, repetitive=x) for x in (False, True))
    if mean is not None:
        return with_error(mean) if error else f"{mean.mean:.2f}"
    return "" if every is None else f"({every.mean:.2f})"


def speeds(runs: Sequence[Run]) -> Iterator[Line]:
    """The fastest drafter and vegas, greedy and at T=0.8, at the fastest gamma."""
    for run in runs:
        every = fastest_pairs(run.result)
        shown_first = headlines(every)
        for pair in every:
            plain = pair.cells[0].plain
            assert plain is not None
            rate = steady_rate(plain)
            floor = "" if rate is None else f" ({rate / floor_rate(plain):.2f})"
            line = labels(run.card, pair.case) | {
                "gamma": str(pair.case["gamma"]),
                "plain tok/s": f"{tokens_per_second(plain)}{floor}",
            }
            for cell, word in ((pair.greedy, ""), (pair.sampled, ", T=0.8")):
                line |= {f"{heading}{word}": x for heading, x in _speeds(cell).items()}
            yield Line(line, headline=pair in shown_first)


def _speeds(cell: Cell | None) -> dict[str, str]:
    headings: list[str] = ["fastest", "vegas, tokens/step", "vs plain", "batch"]
    line = dict.fromkeys(headings, "")
    if cell is None:
        return line
    for first in cell.ranked[:1]:
        line["fastest"] = f"{first['name']} {ratio(cell.speed(first))}"
    row = cell.shown.get(VEGAS)
    if row is None:
        return line | ({"vegas, tokens/step": "not timed"} if VEGAS in cell.not_timed else {})
    steady, batch = (ratio(cell.speed(row, rate)) for rate in (steady_rate, batch_rate))
    return line | {"vegas, tokens/step": per_step(row), "vs plain": steady, "batch": batch}


def tokens_per_second(row: Row) -> str:
    """Steady tokens per second."""
    rate = steady_rate(row)
    return "" if rate is None else f"{rate:,.0f}"


def drafters(runs: Sequence[Run]) -> Iterator[Line]:
    """A line a drafter, for each case with more drafters than everywhere, the fastest first: of the
    run with most of them."""
    lines: dict[str, dict[str, str]] = {}
    for run in runs:
        for pair in pairs(run.result):
            if not any(name in cell.drafters for cell in pair.cells for name in MORE):
                continue
            at = labels(run.card, pair.case)
            heading = f"{at['card']}, {at['model']}, {rows_of(pair.case)} of {at['context']}"
            every = [cell.of_most_drafters for cell in pair.cells]
            fastest = [row["name"] for cell in every[:1] for row in cell.by_speed]
            for name in dict.fromkeys([*fastest, *ALL, *BY_HASHES, *LOSSY]):
                known = [
                    cell
                    for cell in every
                    if name in {**cell.drafters, **cell.lossy, **cell.not_timed}
                ]
                if known and name not in (PLAIN, *VARIANTS):
                    words = [_drafter(cell, name) for cell in known]
                    lines.setdefault(name, {})[heading] = "; ".join(words)
    for name, line in lines.items():
        yield Line({"drafter": name} | line)


def _drafter(cell: Cell, name: str) -> str:
    if name in cell.lossy:
        row = cell.lossy[name]
        return f"lossy, {row['agreement']:.0%} as plain; {ratio(cell.speed(row))}"
    if name not in cell.drafters:
        return "not timed"
    row, is_greedy = cell.drafters[name], cell.case["sampling"] == "greedy"
    return (f"{per_step(row)}; " if is_greedy else "T=0.8 ") + ratio(cell.speed(row))


def not_timed(runs: Sequence[Run]) -> str:
    """What has no times, and why, each reason once."""
    places: dict[str, dict[str, None]] = {}
    for run in runs:
        for cell in cells(run.result):
            at = ", ".join(labels(run.card, cell.case).values())
            for name, reason in cell.not_timed.items():
                place = f"{name} ({at}, {SAMPLED[cell.case['sampling']]})"
                places.setdefault(reason, {})[place] = None
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in places.items()]
    return f"Not timed: {'; '.join(reasons)}." if reasons else ""


def acceptance(runs: Sequence[Run]) -> Iterator[Line]:
    """By position of the draft, in the shortest and the longest context of a model, of the largest
    batch that has vegas."""
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for run in runs:
        for pair in pairs(run.result):  # by rows, so that the last one is of the largest batch
            for cell in pair.cells:
                row = cell.drafters.get(VEGAS)
                if row is not None:
                    heading = f"{run.card}, {SAMPLED[cell.case['sampling']]}"
                    at = rows.setdefault((cell.model, cell.case["S"]), {})
                    at[heading] = _by_position(row)
    for (model, context), line in sorted(rows.items()):
        contexts = [other for name, other in rows if name == model]
        if context in (min(contexts), max(contexts)):
            yield Line({"model": model, "context": kilo(context)} | line)


def _by_position(row: Row) -> str:
    counts = zip(row["accepted_at"], row["attempts_at"], strict=True)
    shares = [f"{100 * accepted / attempts:.0f}" for accepted, attempts in counts if attempts]
    return f"{per_step(row, error=True)}: {' '.join(shares)}"


def decoders(runs: Sequence[Run]) -> Iterator[Line]:
    """Greedy decoding in exact mode and by other libraries, over jspec's plain decoding."""
    for run in runs:
        every = cells(run.result)
        for cell in every:
            at = labels(run.card, cell.case)
            case = cell.case | {"exact": "no", "drafts": ""}
            usual = next((x for x in every if x.case | {"drafts": ""} == case), None)
            if cell.exact and usual is not None and usual.plain is not None:
                yield Line(at | _exact(cell, usual))
            for row in cell.rivals.values():
                speed = {"tok/s": tokens_per_second(row), "vs jspec": ratio(cell.speed(row))}
                same = {"with vegas": "", "same answers": _same(row), "vegas without exact": ""}
                yield Line(at | {"decoder": DECODERS[row["name"]]} | speed | same)


def _exact(cell: Cell, usual: Cell) -> dict[str, str]:
    """Plain decoding and vegas with a level of ``exact``, over plain decoding without one."""
    row, vegas = cell.plain, cell.drafters.get(VEGAS)
    line = {"decoder": f"jspec, exact {cell.case['exact']}"}
    if row is not None:
        line |= {"tok/s": tokens_per_second(row), "vs jspec": _over(row, usual)}
    if vegas is not None:
        without = usual.of_result(vegas).drafters.get(VEGAS)
        line |= {"with vegas": _over(vegas, usual), "same answers": _same(vegas)}
        line |= {} if without is None else {"vegas without exact": _same(without)}
    return line


def _over(row: Row, usual: Cell) -> str:
    """The speed over plain decoding without ``exact``, of the same result if that has it."""
    usual_plain = usual.of_result(row).plain
    plain = None if usual_plain is None else steady_rate(usual_plain)
    rate = steady_rate(row)
    return "" if plain is None or rate is None else ratio(rate / plain)


def _same(row: Row) -> str:
    return f"{row['identical_rows']}/{row['rows']}"


def limited(runs: Sequence[Run]) -> Iterator[Line]:
    """Where the time of greedy steps of plain decoding and of vegas goes, of the largest and the
    slowest cell of each model."""
    for run in runs:
        for pair in headlines(fastest_pairs(run.result)):
            cell = pair.greedy
            vegas = None if cell is None else cell.shown.get(VEGAS)
            if cell is None or cell.plain is None or vegas is None:
                continue
            plain_row, time = plain_of(vegas, cell.rows), step_ms(vegas)
            plain_time = None if plain_row is None else step_ms(plain_row)
            cost = "" if time is None or plain_time is None else f"{time / plain_time:.2f}"
            line = {
                "gamma": str(cell.case["gamma"]),
                "plain: bytes, kernels, gaps": _spent(cell.plain),
                "vegas: bytes, kernels, gaps; longest part": _spent(vegas),
                "tokens/step": per_step(vegas),
                "plain steps": cost,
                "vs plain": ratio(cell.speed(vegas)),
            }
            yield Line(labels(run.card, cell.case) | line)


def _spent(row: Row) -> str:
    shares = limits(row)
    if shares is None:
        return ""
    parts = (shares.floor, shares.kernels - shares.floor, 1 - shares.kernels)
    words = ", ".join(f"{part:.0%}" for part in parts)
    longest = f"; {shares.part} {shares.part_time:.0%}"
    return words if row["name"] == PLAIN else words + longest
