"""The tables on quality, accepted lengths, serving, several devices and exactness."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bench.cases import kilo
from bench.drafters import DEFAULT_BACKENDS
from bench.point import Row, spread
from bench.quality import REFERENCE
from bench.report.markdown import Line, ratio, us
from bench.report.runs import Run
from bench.serving import ROLLOUT
from bench.table import number

BUDGET = 1 / 64  # the share of a context on the first page
BUDGETS = (1 / 256, BUDGET, 1 / 16)
ALONE = "one device"
STRATEGIES = {"tp": "tensor parallel", "gather": "gathered queries"}  # by their words
NO_SHARE = {"suffix", "n-gram", "QuantSpec, all in 4 bits"}  # by their names in results
LONG = 2**20  # positions of the first table's cases


def quality(runs: Sequence[Run]) -> Iterator[Line]:
    """Scores of each policy by budget, and accepted lengths; a machine's first run of a model."""
    scored = [run for run in runs if any(map(_is_by_budget, run.rows))]
    first_runs: dict[tuple[str, str], Run] = {}
    for run in scored:
        first_runs.setdefault((run.machine, _model_of(run)), run)
    for (_, model), run in first_runs.items():
        by_context: dict[int, dict[str, dict[str, str]]] = {}
        budgets = {row["case"]["budget"] for row in run.rows if _is_by_budget(row)}
        shares = sorted(budgets & {*BUDGETS})
        for row in run.rows:
            if _is_by_budget(row):
                budget, lines = row["case"]["budget"], by_context.setdefault(row["case"]["S"], {})
                if budget is not None and budget not in shares:
                    continue
                if row["operation"] == "read":
                    size = lines.setdefault("bytes of a key", {})
                    size[row["name"]] = f"{row['bytes']:g}"
                    for share in shares if budget is None else (budget,):
                        lines.setdefault(f"{share:.2%}", {})[row["name"]] = f"{row['score']:.1f}"
                elif budget == BUDGET:
                    lengths = lines.setdefault("accepted length", {})
                    lengths[row["name"]] = f"{row['length']:.2f}"
        for context, lines in by_context.items():
            names = dict.fromkeys(lines["bytes of a key"], "")
            for words, cells in lines.items():
                label = {"card": run.card, "model": model, "context": kilo(context), "read": words}
                yield Line(label | names | cells, words == f"{BUDGET:.2%}" and "hata" in cells)


def _model_of(run: Run) -> str:
    """The model of a run of `quality`."""
    return run.rows[0]["case"].get("model", "bundled")


def _is_by_budget(row: Row) -> bool:
    """Whether a row has the score of a policy, not of the depth of a needle."""
    return "score" in row and "budget" in row["case"]


def accepted(runs: Sequence[Run]) -> Iterator[Line]:
    """Tokens that a verification commits on the texts of the first case, the best drafter first.

    Of those that read a share of the context: real models have n-grams and suffixes too.
    """
    measured = [run for run in runs if any("accepted_at" in row for row in run.rows)]
    for run in {run.machine: run for run in reversed(measured)}.values():
        rows = [x for x in run.rows if x["checked"] and x["operation"] == "draft"]
        texts = _texts(rows[0])
        by_name: dict[str, dict[bool, Row]] = {}
        for row in rows:
            if _texts(row) == texts and row["name"] != "none":
                is_greedy = row["case"]["sampling"] == "greedy"
                by_name.setdefault(row["name"], {})[is_greedy] = row
        lengths = {x: [row["length"] for row in by_name[x].values()] for x in by_name}
        for name in sorted(by_name.keys() - NO_SHARE, key=lambda x: -statistics.mean(lengths[x])):
            cells = {"card and texts": f"{run.card}, {texts}", "drafter": name}
            for is_greedy, word in ((True, "greedy"), (False, "sampled")):
                row = by_name[name].get(is_greedy, {})
                over, error = (row.get(x) for x in (f"over {REFERENCE}", "standard error"))
                cells[word] = f"{row['length']:.2f}" if row else ""
                difference = "" if over is None else f"{over:+.2f}"
                difference += "" if error is None else f" ± {error:.2f}"
                cells[f"{word}, over Vegas"] = difference
            yield Line(cells)


def _texts(row: Row) -> str:
    case = row["case"]
    return (
        f"{case['texts']} texts of {case['S']:,} tokens, {case['new']} new ones each, gamma "
        f"{case['gamma']}, {case['percent']:g} % of the context"
    )


def served(runs: Sequence[Run]) -> Iterator[Line]:
    """The engine with all requests there at once, each mix but rollouts and drafter once; and whole
    batches of `jspec.generate`, the fastest and the slowest case of a machine.

    At a glance are the fastest batch, and the fastest and the slowest load of a machine.
    """
    speeds: dict[str, list[float]] = {}
    for run in runs:
        for row in run.rows:
            if row["checked"] and "vs_plain" in row and row["case"].get("load") == "full":
                speeds.setdefault(run.card, []).append(row["vs_plain"])
    for run in runs:
        drafted = [x for x in run.rows if x["checked"] and x["name"] != "none" and "vs_plain" in x]
        batches = [row for row in drafted if row["operation"] == "generate"]
        ends = [pick(batches, key=lambda row: row["vs_plain"]) for pick in (max, min) if batches]
        full = [
            row
            for row in drafted
            if row["case"].get("load") == "full" and row["case"]["mix"] != ROLLOUT
        ]
        for index, row in enumerate([*ends, *full]):
            case, load = row["case"], row.get("served")
            mix = case["mix"] if load else f"generate, {kilo(case['S'])}"
            cells = {"card": run.card, "mix": mix, "rows": str(case["B"]), "drafter": row["name"]}
            cells |= {
                "tokens/step": f"{row['length']:.2f}",
                "tok/s": f"{row['tokens_per_s']:,.0f}",
                "vs no drafts": ratio(row["vs_plain"]),
            }
            if load:
                words = {"token_s": "ms/token", "first_token_s": "first token, ms"}
                cells |= {heading: _median_and_tail(load[key]) for key, heading in words.items()}
                cells["of steps"] = f"{row['of_steps']:.2f}" if "of_steps" in row else ""
            of_card = speeds.get(run.card, [])
            is_end = bool(load) and row["vs_plain"] in (min(of_card), max(of_card))
            yield Line(cells, headline=is_end or (index == 0 and not load))


def _median_and_tail(seconds: Sequence[float]) -> str:
    """Median and 90th percentile in milliseconds."""
    return " / ".join(f"{1e3 * x:,.1f}" for x in np.quantile(seconds, (0.5, 0.9)))


def collectives(runs: Sequence[Run]) -> Iterator[Line]:
    """The smallest message of each number of devices, by each collective."""
    by_size: dict[tuple[str, int, int], dict[str, str]] = {}
    for run in runs:
        for row in run.rows:
            time = spread(row, "step")
            if time is not None and row["operation"] == "message":
                at = (run.card, row["case"]["P"], row["case"]["bytes"])
                by_size.setdefault(at, {}).setdefault(row["name"], number(time.median))
    for (card, devices, size), cells in by_size.items():
        if size == min(other for _, count, other in by_size if count == devices):
            yield Line({"card": card, "devices": str(devices), "bytes": kilo(size)} | cells)


def shared_attention(runs: Sequence[Run]) -> Iterator[Line]:
    """A layer's attention by two devices, over one that has all of the cache."""

    def shape(case: Row) -> str:
        return f"{case['heads']} heads" + (f", latent {case['latent']}" if case["latent"] else "")

    rows = _timed(runs, "attend")
    shown = [
        (card, row, time)
        for card, row, time in rows
        if row["case"]["up"] != "after" and row["case"]["kernel"] == DEFAULT_BACKENDS
    ]
    return _by_mesh(shown, shape, lambda case: case["kvp"] == case["tpa"] == 1, us)


def shared_steps(runs: Sequence[Run]) -> Iterator[Line]:
    """Whole steps by two devices, over tensor parallelism, by the fastest exchange and backends."""

    def is_shown(case: Row) -> bool:
        is_usual = case["overlap"] == 1 and case.get("exact", "no") == "no"
        return is_usual and case["draft"] != "verify"

    def shape(case: Row) -> str:
        return case["shape"] + (f", {case['draft']}" if case["draft"] != "plain" else "")

    def is_base(case: Row) -> bool:
        return case["kvp"] == 1 and case["tpa"] == 2

    rows = _timed(runs, "step")
    shown = [(card, row, time) for card, row, time in rows if is_shown(row["case"])]
    return _by_mesh(shown, shape, is_base, lambda time: f"{time / 1e3:.2f} ms")


def steps_of_shapes(runs: Sequence[Run]) -> Iterator[Line]:
    """Whole steps of shapes on several devices: the fastest mesh of each strategy."""
    by_size: dict[tuple[str, str, int, int, int], dict[str, tuple[float, str]]] = {}
    copied = set()  # where tensor parallelism has more devices than KV heads
    for card, row, time in _timed(runs, "step"):
        case = row["case"]
        if case.get("exact", "no") != "no":
            continue
        layers = f", {case['layers']} layers" if case["layers"] else ""
        draft = f", {case['draft']}" if case["draft"] != "plain" else ""
        devices = case["kvp"] * case["tpa"]
        at = (card, f"{case['shape']}{layers}{draft}", devices, case["B"], case["S"])
        if case["strategy"] == "tp":
            copied.add(at)
        splits_heads = case["strategy"] == "helix" and case["kvp"] == 1
        name = STRATEGIES["tp"] if splits_heads else _strategy(case)
        words = f"KVP={case['kvp']}, TPA={case['tpa']}"
        words += f", EP={case['ep']}" if case["ep"] > 1 else ""
        cells = by_size.setdefault(at, {})
        cells[name] = min(cells.get(name, (time, words)), (time, words))
    for at, times in by_size.items():
        card, shape, devices, batch, slots = at
        cells = {"card": card, "shape": shape, "GPUs": str(devices), "B": str(batch)}
        cells["S"] = kilo(slots)
        base = times.get(STRATEGIES["tp"])
        for name, (time, mesh) in times.items():
            cells[name] = f"{time / 1e3:.2f} ms, {mesh}"
            if base is not None and name != STRATEGIES["tp"]:
                cells[name] += f", {ratio(base[0] / time)}"
        yield Line(cells, headline=slots >= LONG and len(times) > 1 and at in copied)


Timed = tuple[str, Row, float]  # card, row and microseconds


def _timed(runs: Sequence[Run], operation: str) -> list[Timed]:
    rows = [(run.card, row) for run in runs for row in run.rows if row["operation"] == operation]
    return [(*pair, time.median) for pair in rows if (time := spread(pair[1], "step")) is not None]


def _by_mesh(
    rows: Sequence[Timed],
    shape: Callable[[Row], str],
    is_base: Callable[[Row], bool],
    words: Callable[[float], str],
) -> Iterator[Line]:
    """A line for each case with the shortest or the longest context, a column for each strategy
    and mesh, with its speed over the base's."""
    by_case: dict[tuple[str, str, int, int], dict[str, Timed]] = {}
    for timed in rows:
        card, row, _ = timed
        case = row["case"]
        of_case = by_case.setdefault((card, shape(case), case["B"], case["S"]), {})
        of_case[_mesh(case)] = min(of_case.get(_mesh(case), timed), timed, key=lambda x: x[2])
    sizes = [slots for *_, slots in by_case]
    for (card, kind, batch, slots), of_case in by_case.items():
        if slots not in (min(sizes), max(sizes)):
            continue
        bases = [time for _, row, time in of_case.values() if is_base(row["case"])]
        cells = {"card": card, "shape": kind, "B": str(batch), "S": kilo(slots)}
        for name, (_, row, time) in of_case.items():
            speed = None if is_base(row["case"]) or name == ALONE or not bases else bases[0] / time
            cells[name] = words(time) + ("" if speed is None else f", {ratio(speed)}")
        yield Line(cells, headline=slots >= LONG and len(of_case) > 1)


def _mesh(case: Row) -> str:
    if case["kvp"] == case["tpa"] == 1:
        return ALONE
    if case["strategy"] == "helix" and case["kvp"] == 1:
        return "by heads"
    return _strategy(case)


def _strategy(case: Row) -> str:
    name: str = case["strategy"]
    return STRATEGIES.get(name, name.capitalize())


def flips(runs: Sequence[Run]) -> Iterator[Line]:
    """Greedy tokens that differ from plain decoding where a drafter decodes, by model and level."""
    by_level: dict[tuple[str, str, str], list[Row]] = {}
    for run in runs:
        for row in (row for row in run.rows if row["operation"] == "draft" and "flips" in row):
            level = row["case"]["exact"]
            at = (run.card, row["case"].get("model", "bundled"), level)
            by_level.setdefault(at, []).append(row)
    for (card, model, level), rows in by_level.items():
        tokens, count = (sum(row[key] for row in rows) for key in ("compared", "flips"))
        margins = [margin for row in rows for margin in row.get("flip_margins", ())]
        cells = {
            "card": card,
            "model": model,
            "exact": level,
            "settings": str(len(rows)),
            "tokens": f"{tokens:,}",
            "flips": str(count),
            "per 1000": f"{1000 * count / tokens:.3f}",
            "margin": f"{statistics.median(margins):.3f}" if margins else "",
            "largest": f"{max(margins):.3f}" if margins else "",
        }
        yield Line(cells, headline=level != "no")
