"""The tables on whole steps: real models' shapes, drafting, serving, several devices, quality."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from bench.cases import kilo
from bench.point import Row, spread
from bench.report import layers, records
from bench.report.records import PLAIN, Step
from bench.report.runs import Run
from bench.report.text import case_words, merged, microseconds, ratio, table
from bench.table import number

Line = tuple[str, ...]
POLICIES = ("hata", "quest_32", "loki", "magicpig", "exact_topk", "streaming")


def ms(microseconds: float) -> str:
    """Milliseconds, with two or three decimals."""
    return f"{microseconds / 1e3:.{2 if microseconds >= 1e3 else 3}f}"


def policies(runs: Sequence[Run]) -> str:
    """Layers and steps that read what a policy selects, over dense ones; the first result of a
    case stands."""
    rows: dict[tuple[str, str], Line] = {}
    for run in runs:
        for group in layers.groups(run.result["rows"]):
            if group.fastest is None or "hata" not in group.policies:
                continue
            name, time = group.fastest
            words = f"layer, {case_words({key: group.case[key] for key in layers.CASE}, ())}"
            times = (
                f"{number(time)} us ({name})",
                f"{number(microseconds(group.policies['hata']))} us",
            )
            speeds = [ratio(group.speedup(policy)) for policy in POLICIES]
            rows.setdefault((run.card, words), (run.card, words, *times, *speeds))
    reads = records.by_place(records.steps((run.result for run in runs), "read"))
    for place, of_place in reads.items():
        card, model, batch, context = records.words(place)
        words, dense = f"step, {model}, B={batch}, S={context}", of_place.get("dense")
        times = [f"{ms(of_place[x].us)} ms" if x in of_place else "" for x in ("dense", "hata")]
        speeds = [
            ratio(dense.us / of_place[x].us) if dense and x in of_place else "" for x in POLICIES
        ]
        rows.setdefault((card, words), (card, words, *times, *speeds))
    headings = ("card", "case", "dense", "hata", *(f"{policy}, speed" for policy in POLICIES))
    return table(headings, merged(rows.values(), columns=1), left=2)


def in_host_memory(runs: Sequence[Run]) -> str:
    rows: list[Line] = []
    for run in runs:
        for row, step, dense in layers.host_steps(run.result["rows"]):
            cells = (
                *(run.card, row["case"]["model"], kilo(layers.context_of(row))),
                *(f"{step:.2f}", "" if dense is None else ratio(dense / step)),
                f"{row['moved']:.0%}" if "moved" in row else "",
                f"{statistics.median(row['bus_ns']) / 1e6:.2f}" if "bus_ns" in row else "",
                *(f"{size / 1e9:.2f}" for size in layers.cache_bytes_of(row)),
            )
            rows.append(cells)
    headings = ("card", "model", "context", "step ms", "speed over dense", "moved", "bus ms")
    return table((*headings, "device GB", "host GB"), merged(rows, columns=3), left=3)


BUDGETS = (1 / 256, 1 / 128, 1 / 64, 1 / 32, 1 / 16)


def quality(runs: Sequence[Run]) -> str:
    """Scores by budget and accepted lengths of each policy, of the first run of a machine."""
    rows: list[Line] = []
    for run in records.first([x for x in runs if any("score" in row for row in x.result["rows"])]):
        by_policy: dict[tuple[int, str], dict[tuple[str, float], Row]] = {}
        for row in run.result["rows"]:
            if "score" in row:
                at = by_policy.setdefault((row["case"]["S"], row["name"]), {})
                at[row["case"].get("kind", "read"), row["case"]["budget"] or 1.0] = row
        for (length, name), of_policy in by_policy.items():
            read = [of_policy.get(("read", budget)) for budget in (*BUDGETS, 1.0)]
            scores = ["" if row is None else f"{row['score']:.1f}" for row in read]
            draft = of_policy.get(("draft", BUDGETS[2]))
            accepted = "" if draft is None else f"{draft['mean_accepted_length']:.2f}"
            size = next(f"{x['bytes']:g}" for x in read if x is not None)
            rows.append((run.card, kilo(length), name, size, *scores, accepted))
    shares = [f"{budget:.2%}" for budget in BUDGETS]
    headings = ("card", "context", "policy", "bytes", *shares, "all", "accepted length")
    return table(headings, merged(rows, columns=2), left=3)


PUBLISHED = ("Vegas (first + bonus token, logits)", "vegas-first")


def accepted(runs: Sequence[Run]) -> str:
    """Tokens that a verification commits on the texts of the first case, the best drafter first."""
    rows: list[Line] = []
    by_run = {
        run.machine: (run, every)
        for run in reversed(runs)
        if (every := [x for x in run.result["rows"] if x["checked"] and "accepted_at" in x])
    }
    for run, every in list(by_run.values())[::-1]:
        cases = dict.fromkeys(_texts(row["case"]) for row in every)
        for case in list(cases)[:1]:
            by_name: dict[str, dict[bool, Row]] = {}
            for row in (row for row in every if _texts(row["case"]) == case):
                sampled = row["case"].get("sampling", row["case"].get("temperature"))
                by_name.setdefault(row["name"], {})[sampled not in GREEDY] = row
            published = next((by_name[x] for x in PUBLISHED if x in by_name), {})
            names = [x for x in by_name if not x.startswith("Vegas,") and x != "none"]
            for name in sorted(
                names, key=lambda x: -statistics.mean(map(_length, by_name[x].values()))
            ):
                cells = [f"{run.card}, {case}", name]
                for sampled in (False, True):
                    row, base = by_name[name].get(sampled), published.get(sampled)
                    cells.append("" if row is None else f"{_length(row):.2f}")
                    cells.append(_difference(row, base) if row and base and row is not base else "")
                rows.append(tuple(cells))
    headings = ("card and texts", "drafter", "greedy", "over Vegas", "sampled", "over Vegas")
    return table(headings, merged(rows, columns=1), left=2)


GREEDY = ("greedy", 0.0)  # sampling, or temperature


def _texts(case: Row) -> str:
    context, ratio = case.get("context", case.get("S")), case.get("ratio")
    percent = case["percent"] if ratio is None else 100 * ratio
    return (
        f"{case['texts']} texts of {context:,} tokens, {case['new']} new ones each, gamma "
        f"{case['gamma']}, {percent:g} % of the context"
    )


def _length(row: Row) -> float:
    """Tokens that a verification commits."""
    return row["length"] if "length" in row else row["committed"] / row["steps"]


def _difference(row: Row, other: Row) -> str:
    """The mean difference of the lengths of the same texts, and its standard error."""
    lengths, base = (
        np.array(x["per_text"]) if "per_text" in x else np.divide(x["tokens"], x["steps"])
        for x in (row, other)
    )
    error = (lengths - base).std(ddof=1) / len(base) ** 0.5 if len(base) > 1 else np.nan
    return f"{(lengths - base).mean():+.2f} ± {error:.2f}"


PASSES = (1, 10)  # tokens


def steps(runs: Sequence[Run]) -> str:
    """A pass of one token and one of ten, over the time to read their bytes: the largest case of
    each model, and the worst of all."""
    by_place: dict[records.Place, dict[int, Step]] = {}
    for step in records.steps((run.result for run in runs), "pass"):
        if step.gamma + 1 in PASSES:
            by_place.setdefault(step.place, {}).setdefault(step.gamma + 1, step)
    shown = {max((x for x in by_place if x[:2] == at[:2]), key=_size) for at in by_place}
    if by_place:
        worst = max(by_place, key=lambda at: max(x.over_floor for x in by_place[at].values()))
        shown.add(worst)
    rows = [
        (
            *records.words(at),
            *(
                f"{ms(of_place[x].us)} ms, {of_place[x].over_floor:.2f}" if x in of_place else ""
                for x in PASSES
            ),
        )
        for at, of_place in by_place.items()
        if at in shown
    ]
    passes = (f"T={tokens}, over its floor" for tokens in PASSES)
    return table(("card", "model", "B", "context", *passes), merged(rows, columns=2), left=2)


def _size(at: records.Place) -> int:
    return at[2] * at[3]


def iterations(runs: Sequence[Run]) -> str:
    """Iterations by vegas and by quest, and the parts of each."""
    rows: dict[tuple[records.Place, str], Line] = {}
    for run in runs:
        for place, of_place in records.by_place(records.steps([run.result], "draft")).items():
            plain = of_place.get(PLAIN)
            for name in ("vegas", "quest"):
                step = of_place.get(name)
                parts = records.parts_us(step, of_place) if step else {}
                if step is None or not parts:
                    continue
                cells = (
                    *(name, str(step.gamma), ms(step.us), f"{step.over_floor:.2f}"),
                    *(ms(parts[x]) for x in ("draft passes", "verification")),
                    f"{records.selecting(step, parts):.1%}",
                )
                at = (*records.words(place), "" if plain is None else ms(plain.us))
                rows.setdefault((place, name), (*at, *cells))
    headings = ("card", "model", "B", "context", "plain step", "draft", "gamma", "iteration")
    parts_of = ("over floor", "draft passes", "verification", "selecting adds")
    return table((*headings, *parts_of), merged(rows.values(), columns=5), left=2)


def imposed(runs: Sequence[Run]) -> str:
    """Tokens a second of vegas, the fastest and the slowest drafter of each case, of the first run
    that has it."""
    rows: list[Line] = []
    every = [x for x in records.steps((run.result for run in runs), "draft") if is_imposed(x)]
    for place, of_place in records.by_place(every).items():
        plain = of_place.get(PLAIN)
        drafts = {x: step for x, step in of_place.items() if x != PLAIN and "-exact" not in x}
        rates = {name: step.row["tokens_per_s"] for name, step in drafts.items()}
        ends = {pick(rates, key=rates.__getitem__) for pick in (max, min)} if rates else set()
        for name, step in drafts.items():
            if name in {"vegas", *ends}:
                speed = None if plain is None else rates[name] / plain.row["tokens_per_s"]
                cells = (name, str(step.gamma), f"{step.tokens:.2f}", ms(step.us))
                rows.append((*records.words(place), *cells, f"{rates[name]:,.0f}", ratio(speed)))
    headings = ("card", "model", "B", "context", "draft", "gamma", "tokens", "iteration")
    return table((*headings, "tok/s", "vs plain"), merged(rows, columns=4), left=5)


def is_imposed(step: Step) -> bool:
    """Whether a step has tokens a second, by no measured acceptance."""
    return "tokens_per_s" in step.row and step.row.get("acceptance") != "measured"


def served(runs: Sequence[Run]) -> str:
    """The engine with all requests there at once, each mix and drafter once; and whole batches of
    `jspec.generate`, the fastest and the slowest case of a machine."""
    rows: dict[Line, Line] = {}
    for run in runs:
        drafted = [x for x in run.result["rows"] if x["checked"] and "source" in x and x["gamma"]]
        ends = [pick(drafted, key=lambda row: row["speedup"]) for pick in (max, min) if drafted]
        for row in ends:
            at = (run.card, f"generate, {kilo(row['context'])}", str(row["batch"]))
            rate, length = (
                f"{row['decode_tokens_per_s']:,.0f}",
                f"{row['mean_accepted_length']:.2f}",
            )
            cells = (row["source"], length, rate, ratio(row["speedup"]), "", "", "")
            rows.setdefault((*at, row["source"]), (*at, *cells))
        for row, plain in at_full_load(run.result["rows"]):
            case, share = row["case"], of_steps(row)
            mix = case["mix"] if case["model"] == "bundled" else f"{case['mix']}, {case['model']}"
            at, load = (run.card, mix, str(case["B"])), row.get("served", row)
            cells = (
                f"{load['mean_accepted_length']:.2f}",
                f"{row['tokens_per_s']:,.0f}",
                ratio(row["tokens_per_s"] / plain["tokens_per_s"]),
                *(_median_and_tail(load[key]) for key in ("token_s", "first_token_s")),
                "" if share is None else f"{share:.2f}",
            )
            rows.setdefault((*at, row["name"]), (*at, row["name"], *cells))
    headings = ("card", "mix", "rows", "drafter", "tokens/step", "tok/s", "vs no drafts")
    more = ("ms/token", "first token, ms", "of steps")
    return table((*headings, *more), merged(rows.values(), columns=3), left=4)


def at_full_load(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The rows of drafters with all requests there at once, each with that of plain decoding."""
    full = [x for x in rows if x["checked"] and x.get("case", {}).get("load") == "full"]
    plain = {str(row["case"]): row for row in full if row["name"] == "none"}
    return [
        (row, plain[str(row["case"])])
        for row in full
        if row["name"] != "none" and str(row["case"]) in plain
    ]


def of_steps(row: Row) -> float | None:
    """Tokens a second while all slots are taken, over what the steps alone would give."""
    if "of_steps" in row or row.get("full_tokens_per_s") is None or "step_s" not in row:
        return row.get("of_steps")
    alone = row["case"]["B"] * row["mean_accepted_length"] / row["step_s"]
    return row["full_tokens_per_s"] / alone


def _median_and_tail(seconds: Sequence[float]) -> str:
    """Median and 90th percentile in milliseconds."""
    return " / ".join(f"{1e3 * x:,.1f}" for x in np.quantile(seconds, (0.5, 0.9)))


# Several devices


def collectives(runs: Sequence[Run]) -> str:
    by_size: dict[tuple[str, int, int], dict[str, str]] = {}
    for run in runs:
        for row in run.result["rows"]:
            time = spread(row, "step")
            if time is not None and "P" in row["case"]:
                at = (run.card, row["case"]["P"], row["case"]["bytes"])
                by_size.setdefault(at, {}).setdefault(row["name"], number(time.median))
    names = list(dict.fromkeys(name for of_size in by_size.values() for name in of_size))
    sizes = sorted({size for *_, size in by_size})
    rows = [
        (card, str(devices), kilo(size), *(of_size.get(name, "") for name in names))
        for (card, devices, size), of_size in by_size.items()
        if size in (sizes[0], sizes[-1])
    ]
    return table(("card", "devices", "bytes", *names), merged(rows, columns=2))


def shared_attention(runs: Sequence[Run]) -> str:
    """A layer's attention by two devices, over one that has all of the cache."""

    return _by_mesh(
        runs,
        lambda row: (
            row["operation"] == "attend"
            and row["case"].get("part", "layer") == "layer"
            and row["case"].get("up") != "after"
        ),
        lambda case: (
            f"{case['heads']} heads" + (f", latent {case['latent']}" if case.get("latent") else "")
        ),
        lambda case: case["kvp"] == case["tpa"] == 1,
        lambda time: f"{number(time)} us",
    )


def shared_steps(runs: Sequence[Run]) -> str:
    """Whole steps by two devices, over tensor parallelism."""
    return _by_mesh(
        runs,
        lambda row: (
            row["operation"] == "step"
            and row["case"]["overlap"] == 1
            and row["case"].get("exchange", "xla") == "xla"
            and row["case"]["draft"] != "verify"
        ),
        lambda case: case["shape"] + (f", {case['draft']}" if case["draft"] != "plain" else ""),
        lambda case: case["kvp"] == 1 and case["tpa"] == 2,
        lambda time: f"{time / 1e3:.2f} ms",
    )


def _by_mesh(
    runs: Sequence[Run],
    is_shown: Callable[[Row], bool],
    shape: Callable[[Row], str],
    is_base: Callable[[Row], bool],
    words: Callable[[float], str],
) -> str:
    """A line for each case with the shortest or the longest context, a column for each strategy
    and mesh, with its speed over the base's."""
    by_case: dict[Line, dict[str, tuple[Row, float]]] = {}
    for run in runs:
        for row in run.result["rows"]:
            time, case = spread(row, "step"), row["case"]
            if time is not None and is_shown(row):
                at = (run.card, shape(case), str(case["B"]), kilo(case["S"]))
                by_case.setdefault(at, {}).setdefault(_mesh(case), (row, time.median))
    sizes = [row["case"]["S"] for of_case in by_case.values() for row, _ in of_case.values()]
    ends = {kilo(pick(sizes)) for pick in (min, max) if sizes}
    by_case = {at: of_case for at, of_case in by_case.items() if at[-1] in ends}
    names = list(dict.fromkeys(name for of_case in by_case.values() for name in of_case))
    rows = []
    for at, of_case in by_case.items():
        base = next((time for row, time in of_case.values() if is_base(row["case"])), None)
        cells = []
        for name in names:
            row, time = of_case.get(name, (None, 0.0))
            if row is None:
                cells.append("")
            elif base is None or is_base(row["case"]) or name == ALONE:
                cells.append(words(time))
            else:
                cells.append(f"{words(time)}, {ratio(base / time)}")
        rows.append((*at, *cells))
    return table(("card", "", "B", "S", *names), merged(rows, columns=2), left=2)


ALONE = "one device"


def _mesh(case: Row) -> str:
    if case["kvp"] == case["tpa"] == 1:
        return ALONE
    if case["strategy"] == "helix" and case["kvp"] == 1:
        return "by heads"
    return {"tp": "tensor parallel", "gather": "gathered queries"}.get(
        case["strategy"], case["strategy"].capitalize()
    )


# Exactness


def flips(runs: Sequence[Run]) -> str:
    """Greedy tokens that differ from plain decoding where a drafter decodes, by model and mode."""
    by_mode: dict[Line, list[Row]] = {}
    for run in runs:
        for row in compared(run.result["rows"]):
            at = (run.card, row["case"].get("model", "bundled"), mode_of(row))
            by_mode.setdefault(at, []).append(row)
    rows: list[Line] = []
    for at, of_mode in by_mode.items():
        tokens, flips = (sum(row[key] for row in of_mode) for key in ("compared", "flips"))
        margins = [x for row in of_mode for x in row.get("margins", row.get("flip_margins", ()))]
        spread_of = (
            (f"{statistics.median(margins):.3f}", f"{max(margins):.3f}") if margins else ("", "")
        )
        counts = (f"{tokens:,}", str(flips), f"{1000 * flips / tokens:.3f}")
        rows.append((*at, str(len(of_mode)), *counts, *spread_of))
    headings = ("card", "model", "mode", "settings", "tokens", "flips", "per 1000")
    return table((*headings, "margin", "largest"), merged(rows, columns=2), left=3)


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows of drafters whose greedy tokens were compared with plain decoding's."""
    return [row for row in rows if "flips" in row and row.get("kind") != "forced"]


def mode_of(row: Row) -> str:
    """``"exact"`` or ``"ordinary"``."""
    return row.get("mode") or ("exact" if row["case"]["exact"] == "yes" else "ordinary")
