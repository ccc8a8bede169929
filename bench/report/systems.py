"""The tables on whole steps: real models' shapes, drafting, serving, several devices, quality."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from bench import acceptance, breakdown, families, parity, ruler, serving, throughput
from bench.cases import kilo
from bench.decode import drafting, lossy
from bench.decode.tables import ms, of_kind
from bench.point import Row, spread
from bench.report import layers
from bench.report.runs import Run
from bench.report.text import case_words, merged, microseconds, ratio, table
from bench.table import number

Line = tuple[str, ...]


def chosen(headings: Sequence[str], cells: Sequence[str], columns: Iterable[str]) -> Line:
    """The cells under some of the headings."""
    by_heading = dict(zip(headings, cells, strict=True))
    return tuple(by_heading[heading] for heading in columns)


def slower(cell: str) -> str:
    """A cell such as 0.98x, called slower where it is."""
    return ratio(float(cell.removesuffix("x"))) if cell else ""


POLICIES = ("hata", "quest_32", "loki", "magicpig", "exact_topk", "streaming")


def policies(runs: Sequence[Run]) -> str:
    """Layers and steps that read what a policy selects, over dense ones; the first result of a
    case stands."""
    rows: dict[tuple[str, str], Line] = {}
    for run in runs:
        groups = layers.groups(run.result["rows"]) if run.suite in ("hata", "hata-layer") else []
        for group in filter(lambda group: group.fastest and "hata" in group.policies, groups):
            assert group.fastest is not None
            name, time = group.fastest
            words = f"layer, {case_words({key: group.case[key] for key in layers.CASE}, ())}"
            dense = f"{number(time)} us ({name})"
            hata = f"{number(microseconds(group.policies['hata']))} us"
            speeds = [ratio(group.speedup(policy)) for policy in POLICIES]
            rows.setdefault((run.card, words), (run.card, words, dense, hata, *speeds))
        steps = lossy.steps(run.result["rows"]) if run.suite == "hata-e2e" else []
        for case in dict.fromkeys(step.case for step in steps):
            of_case = {step.policy: step for step in steps if step.case == case}
            model, _, batch, context = lossy.case_cells(next(iter(of_case.values())))
            words = f"step, {model}, B={batch}, S={context}"
            times = [
                f"{ms(of_case[name].time.median)} ms" if name in of_case else ""
                for name in ("dense", "hata")
            ]
            speeds = [ratio(of_case[x].speedup) if x in of_case else "" for x in POLICIES]
            rows.setdefault((run.card, words), (run.card, words, *times, *speeds))
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
                f"{statistics.median(row['bus_ns']) / 1e6:.2f}",
                *(f"{row[key] / 1e9:.2f}" for key in ("device_bytes", "host_bytes")),
            )
            rows.append(cells)
    headings = ("card", "model", "context", "step ms", "speed over dense", "moved", "bus ms")
    return table((*headings, "device GB", "host GB"), merged(rows, columns=3), left=3)


def quality(runs: Sequence[Run]) -> str:
    """Scores by budget and accepted lengths of each policy, of the first run of a machine."""
    rows: list[Line] = []
    budgets = sorted(ruler.BUDGETS + ruler.MORE_BUDGETS)
    for run in _first(runs):
        by_policy: dict[tuple[int, str], dict[tuple[str, float], Row]] = {}
        for row in run.result["rows"]:
            at = by_policy.setdefault((row["case"]["S"], row["name"]), {})
            at[row["case"]["kind"], row["case"]["budget"] or 1.0] = row
        for (length, name), of_policy in by_policy.items():
            read = [of_policy.get(("read", budget)) for budget in (*budgets, 1.0)]
            scores = ["" if row is None else f"{row['score']:.1f}" for row in read]
            draft = of_policy.get(("draft", budgets[2]))
            accepted = "" if draft is None else f"{draft['mean_accepted_length']:.2f}"
            size = next(f"{x['bytes']:g}" for x in read if x is not None)
            rows.append((run.card, kilo(length), name, size, *scores, accepted))
    shares = [f"{budget:.2%}" for budget in budgets]
    headings = ("card", "context", "policy", "bytes", *shares, "all", "accepted length")
    return table(headings, merged(rows, columns=2), left=3)


def accepted(runs: Sequence[Run]) -> str:
    """Of each drafter but variants of Vegas, on the texts of the first plan."""
    rows: list[Line] = []
    for run in _first(runs):
        plan, lines = next(iter(acceptance.by_plan(run.result).items()))
        at = f"{run.card}, {plan}"
        rows += [(at, *line[:5]) for line in lines if not line[0].startswith("Vegas,")]
    return table(("card and texts", *acceptance.HEADINGS[:5]), merged(rows, columns=1), left=2)


PASSES = (1, 10)


def steps(runs: Sequence[Run]) -> str:
    """A pass of one token and one of ten, over the time to read their bytes: the largest case of
    each model, and the worst of all."""
    by_case: dict[tuple[str, str, int, int], dict[int, tuple[float, float]]] = {}
    for run in runs:
        for row in of_kind(run.result["rows"], "decode_step"):
            time, case = spread(row, "step"), row["case"]
            if time is not None and case["T"] in PASSES:
                at = (run.card, case["model"], case["B"], case["context"])
                over = time.median * 1e3 / row["floor_ns"]
                by_case.setdefault(at, {}).setdefault(case["T"], (time.median, over))
    shown = {max((x for x in by_case if x[:2] == at[:2]), key=_size) for at in by_case}
    if by_case:
        shown.add(max(by_case, key=lambda at: max(over for _, over in by_case[at].values())))
    rows = []
    for at in (at for at in by_case if at in shown):
        card, model, batch, context = at
        cells = [
            f"{ms(by_case[at][tokens][0])} ms, {by_case[at][tokens][1]:.2f}"
            if tokens in by_case[at]
            else ""
            for tokens in PASSES
        ]
        rows.append((card, model, str(batch), kilo(context), *cells))
    passes = (f"T={tokens}, over its floor" for tokens in PASSES)
    return table(("card", "model", "B", "context", *passes), merged(rows, columns=2), left=2)


def _size(at: tuple[str, str, int, int]) -> int:
    return at[2] * at[3]


def iterations(runs: Sequence[Run]) -> str:
    """Iterations by vegas and by what selects otherwise, and the parts of each."""
    rows: dict[Line, Line] = {}
    for run in runs:
        every = families.parts(run.result)[1]["rows"]
        plain = {drafting.case_cells(row): row for row in every if row["name"] == "plain"}
        for row in every:
            parts, time = breakdown.parts_of(row, every), spread(row, "step")
            if time is None or row["name"] not in breakdown.DRAFTS or not parts:
                continue
            case = model, _, batch, context = drafting.case_cells(row)
            alone = None if case not in plain else spread(plain[case], "step")
            selecting = breakdown.overhead(row, parts)
            at = (run.card, model, batch, context, "" if alone is None else ms(alone.median))
            cells = (
                str(row["case"]["gamma"]),
                ms(time.median),
                f"{time.median * 1e3 / sum(row['floors_ns'].values()):.2f}",
                *(ms(parts[name] / 1e3) for name in ("draft passes", "verification")),
                "" if selecting is None else f"{selecting:.1%}",
            )
            if row["name"] in ("vegas", "quest"):
                rows.setdefault((*at[:4], row["name"]), (*at, row["name"], *cells))
    headings = ("card", "model", "B", "context", "plain step", "draft", "gamma")
    parts_of = ("draft passes", "verification", "selecting adds")
    return table(
        (*headings, "iteration", "over floor", *parts_of), merged(rows.values(), columns=5), left=2
    )


def imposed(runs: Sequence[Run]) -> str:
    """Tokens a second of vegas, the fastest and the slowest drafter of each case, of the first run
    that has it."""
    by_case: dict[Line, dict[str, Line]] = {}
    columns = ("draft", "gamma", "tokens", "iteration", "tok/s", "vs plain")
    for run in runs:
        result = families.parts(run.result)[2] if run.suite == "families" else run.result
        for line in throughput.lines(result["rows"], "imposed"):
            model, _, batch, context, *cells = line[: 4 + len(throughput.HEADINGS)]
            name, *rest, speed = chosen(throughput.HEADINGS, cells, columns)
            if name != "plain" and not name.endswith("-exact"):
                of_case = by_case.setdefault((run.card, model, batch, context), {})
                of_case.setdefault(name, (name, *rest, speed))
    rows: list[Line] = []
    for at, of_case in by_case.items():
        speeds = {name: float(cells[-1].removesuffix("x")) for name, cells in of_case.items()}
        shown = {"vegas", max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)}
        rows += [
            (*at, *cells[:-1], slower(cells[-1]))
            for name, cells in of_case.items()
            if name in shown
        ]
    headings = ("card", "model", "B", "context", *columns)
    return table(headings, merged(rows, columns=4), left=5)


def served(runs: Sequence[Run]) -> str:
    """The engine with all requests there at once, each mix and drafter once; and whole batches of
    `jspec.generate`, the fastest and the slowest case of a machine."""
    rows: dict[Line, Line] = {}
    for run in runs:
        if run.suite == "step":
            drafted = [row for row in run.result["rows"] if row["checked"] and row["gamma"]]
            ends = [pick(drafted, key=lambda row: row["speedup"]) for pick in (max, min)]
            for row in ends if drafted else ():
                at = (run.card, f"generate, {kilo(row['context'])}", str(row["batch"]))
                rate = f"{row['decode_tokens_per_s']:,.0f}"
                length = f"{row['mean_accepted_length']:.2f}"
                cells = (row["source"], length, rate, ratio(row["speedup"]), "", "", "")
                rows.setdefault((*at, row["source"]), (*at, *cells))
            continue
        timed = serving.timed(run.result["rows"])
        columns = ("length", "tok/s", "vs none", "token", "first", "of step")
        for row in timed:
            if row["case"]["load"] == "full" and row["name"] != "none":
                length, rate, speed, *rest = chosen(
                    serving.HEADINGS, serving.cells(row, timed), columns
                )
                model, mix, slots, *_ = serving.case_cells(row)
                at = (run.card, mix if model == "bundled" else f"{mix}, {model}", slots)
                cells = (row["name"], length, rate, slower(speed), *rest)
                rows.setdefault((*at, row["name"]), (*at, *cells))
    headings = ("card", "mix", "rows", "drafter", "tokens/step", "tok/s", "vs no drafts")
    more = ("ms/token", "first token, ms", "of steps")
    return table((*headings, *more), merged(rows.values(), columns=3), left=4)


# Several devices


def collectives(runs: Sequence[Run]) -> str:
    by_size: dict[tuple[str, int, int], dict[str, str]] = {}
    for run in _first(runs):
        for row in run.result["rows"]:
            if (time := spread(row, "step")) is not None:
                at = (run.card, row["case"]["P"], row["case"]["bytes"])
                by_size.setdefault(at, {})[row["operation"]] = number(time.median)
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
        lambda row: row["case"].get("part") == "layer" and row["case"].get("up") != "after",
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
            row["case"]["overlap"] == 1
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
    """Greedy tokens that differ from exact plain decoding where a drafter decodes, by model and
    mode."""
    by_mode: dict[Line, list[Row]] = {}
    for run in runs:
        for row in parity.counted(run.result):
            if row["kind"] != "forced":
                at = (run.card, row["case"]["model"], row["mode"])
                by_mode.setdefault(at, []).append(row)
    rows: list[Line] = []
    for at, of_mode in by_mode.items():
        compared, turned = (sum(row[key] for row in of_mode) for key in ("compared", "flips"))
        margins = [margin for row in of_mode for margin in row["margins"]]
        spread_of = (
            (f"{statistics.median(margins):.3f}", f"{max(margins):.3f}") if margins else ("", "")
        )
        counts = (
            str(len(of_mode)),
            f"{compared:,}",
            str(turned),
            f"{1000 * turned / compared:.3f}",
        )
        rows.append((*at, *counts, *spread_of))
    headings = ("card", "model", "mode", "settings", "tokens", "flips", "per 1000")
    return table((*headings, "margin", "largest"), merged(rows, columns=2), left=3)


def _first(runs: Sequence[Run]) -> list[Run]:
    """The first run of each machine."""
    return list({run.machine: run for run in reversed(runs)}.values())[::-1]
