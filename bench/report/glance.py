"""The first table of a machine: a line for each case that says most, beside a rival or a floor."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from bench import ceilings, hata_off, parity, serving
from bench.decode import lossy
from bench.layer import tables
from bench.point import Row, best_clock, spread
from bench.report import real
from bench.report.real_text import ratio
from bench.report.text import pick, table
from bench.table import cell, kilo, number, times

# A case in words, what was measured, and what it is held against.
Line = tuple[str, str, str]
Result = dict[str, Any]

RIVALS = {
    "torch": "PyTorch",
    "torch_graph": "PyTorch as a CUDA graph",
    "torch+torch": "PyTorch in two steps",
    "cudnn": "cuDNN",
    "fa3": "FlashAttention-3",
    "fa3_jax": "FlashAttention-3 for JAX",
    "flashinfer": "FlashInfer",
    "flashinfer_fa3": "FlashInfer's fa3",
    "lax.top_k": "lax.top_k",
    "cub": "CUB",
    "cub_stable": "CUB, ties in order",
    "cub_rows": "CUB, a row at a time",
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A case of an operation. ``work``: the ceiling that its bytes are held against, if any."""

    operation: str
    case: dict[str, Any]
    work: str | None = None

    def lines(self, result: Result) -> Iterator[Line]:
        """What `implementation=None` takes, beside the ceiling and the fastest rival."""
        rows = pick(result, self.operation, **self.case)
        chosen = next((row for row in rows.values() if row.get("chosen")), None)
        if chosen is None:
            return
        own = _median(chosen)
        beside = [*self._share(result, chosen, own), *_fastest_rival(rows, own)]
        words = ", ".join(f"{k}={cell(k, v)}" for k, v in self.case.items() if k not in UNSAID)
        yield words, f"{number(own)} us", "; ".join(beside)

    def _share(self, result: Result, chosen: Row, own: float) -> Iterator[str]:
        rate = self.work and ceilings.bandwidth(result["ceilings"], self.work)
        if rate:
            yield f"{chosen['bytes'] / own * 1e6 / rate:.0%} of the {self.work} ceiling"


BUDGET = 1 / 64  # of the context
UNSAID = ("l2", "part", "H", "lengths", "alpha")  # of a case, which its section says


def _median(row: Row) -> float:
    """Microseconds of a row that has a clock."""
    found = best_clock(row)
    assert found is not None
    return found.median


def _fastest_rival(rows: dict[str, Row], own: float) -> Iterator[str]:
    found = {name: _median(row) for name, row in rows.items() if name in RIVALS}
    if found:
        name = min(found, key=found.__getitem__)
        yield f"{times(found[name] / own)} as fast as {RIVALS[name]}, {number(found[name])} us"


def _points(*points: Point) -> Callable[[Result], Iterator[Line]]:
    def lines(result: Result) -> Iterator[Line]:
        for point in points:
            yield from point.lines(result)

    return lines


def _layer(result: Result) -> Iterator[Line]:
    """HATA's layer over the fastest dense attention."""
    for group in tables.groups(result["rows"]):
        speedup, fastest = group.speedup("hata"), group.fastest
        if speedup is None or fastest is None:
            continue
        words = ", ".join(f"{k}={cell(k, group.case[k])}" for k in tables.CASE)
        own = tables.time_of(group.policies["hata"]).median
        yield (
            words,
            f"{number(own)} us",
            f"{times(speedup)} as fast as dense attention, {number(fastest[1])} us",
        )


def _learning(result: Result) -> Iterator[Line]:
    for row in result["rows"]:
        case = row["case"]
        if "total_s" in row:
            yield f"{case['layers']} layers, {case['pairs']:,} pairs each", _seconds(row), ""


def _seconds(row: Row) -> str:
    return f"{row['total_s']:.1f} s"


def _host(result: Result) -> Iterator[Line]:
    """A step with keys and values in the host's memory, over the dense one on the device."""
    for row in result["rows"]:
        beside = hata_off.beside(result, row)
        if row["name"] == "hata_off" and "step_ns" in row and "dense" in beside:
            own, dense = (statistics.median(x["step_ns"]) / 1e6 for x in (row, beside["dense"]))
            words = f"{row['case']['model']}, {row['case']['context']:,} tokens"
            held = "dense decoding with the cache on the device"
            yield words, f"{own:.2f} ms a step", f"{times(dense / own)} as fast as {held}"


def _quality(result: Result) -> Iterator[Line]:
    """HATA's score at the paper's budget, beside reading all and the exact choice."""
    read = [row for row in result["rows"] if row["case"]["kind"] == "read"]
    for row in read:
        if row["name"] != "hata" or row["case"]["budget"] != BUDGET:
            continue
        at = {
            x["name"]: x["score"]
            for x in read
            if x["case"]["S"] == row["case"]["S"] and x["case"]["budget"] in (None, BUDGET)
        }
        named = {"dense": "reading all", "exact_topk": "the exact top k", "quest": "Quest"}
        beside = [f"{words} {at[name]:.1f}" for name, words in named.items() if name in at]
        words = f"{kilo(row['case']['S'])} tokens, {100 * BUDGET:.3g} % of them read"
        yield words, f"{row['score']:.1f} % right", ", ".join(beside)


def _decoding(result: Result) -> Iterator[Line]:
    """The best source of drafts for one row, the bundled model."""
    rows = [row for row in result["rows"] if row["checked"] and row["source"] != "none"]
    for batch in sorted({row["batch"] for row in rows}):
        best = max((r for r in rows if r["batch"] == batch), key=lambda row: row["speedup"])
        words = f"bundled model, B={batch}, {kilo(best['context'])} tokens, {best['source']}"
        speed = f"{best['decode_tokens_per_s']:,.0f} tokens/s"
        yield words, speed, f"{times(best['speedup'])} as fast as plain decoding"


def _exact(result: Result) -> Iterator[Line]:
    """Greedy tokens that exact decoding turned, over all its settings."""
    rows = [row for row in parity.counted(result) if row["mode"] == "exact"]
    if rows:
        flips, compared = (sum(row[key] for row in rows) for key in ("flips", "compared"))
        words = f"exact=True, {len(rows)} settings of drafter, gamma and batch"
        yield words, f"{flips} flips", f"in {compared:,} greedy tokens, against plain decoding"


def _steps(result: Result) -> Iterator[Line]:
    """Steps of long contexts against their floors."""
    for row in result["rows"]:
        time, case = spread(row, "step"), row["case"]
        if row["operation"] == "decode_step" and time and case["B"] * case["context"] >= 2**18:
            words = f"{case['model']}, B={case['B']}, {kilo(case['context'])} tokens, T={case['T']}"
            over = time.median * 1e3 / row["floor_ns"]
            floor = "the time to read its bytes at the ceiling"
            yield words, f"{time.median / 1e3:.2f} ms", f"{over:.2f} of {floor}"


def _lossy(result: Result) -> Iterator[Line]:
    """A step of HATA over the dense one."""
    for step in lossy.steps(result["rows"]):
        if step.policy == "hata" and step.speedup is not None:
            model, _, batch, context = lossy.case_cells(step)
            words = f"{model}, B={batch}, {context} tokens, hata"
            speed = f"{number(step.tokens)} tokens/s"
            yield words, speed, f"{times(step.speedup)} as fast as the dense step"


def _imposed(result: Result) -> Iterator[Line]:
    """Tokens a second at true shapes, by a stated acceptance, over plain decoding."""
    rows = [r for r in result["rows"] if r["acceptance"] == "imposed" and "tokens_per_s" in r]
    plain = {_shape(row): row["tokens_per_s"] for row in rows if row["name"] == "plain"}
    for row in rows:
        if row["name"] != "plain" and row["checked"] and _shape(row) in plain:
            case, own = row["case"], row["tokens_per_s"]
            words = f"{case['model']}, B={case['B']}, {kilo(case['S'])} tokens, {row['name']}"
            speed = f"{number(own)} tokens/s"
            compared = ratio(own / plain[_shape(row)], " plain decoding")
            yield words, speed, f"{compared}; imposed acceptance (the paper's)"


def _shape(row: Row) -> tuple[Any, ...]:
    return tuple(row["case"][key] for key in ("model", "layers", "B", "S"))


def _meshes(result: Result) -> Iterator[Line]:
    """Reading one cache by two devices, over the time of one."""
    keys = ("B", "S", "heads", "H", "T", "latent")
    alone = {}
    for row in result["rows"]:
        case, time = row["case"], spread(row, "step")
        if time is None or case.get("part") != "layer" or case["strategy"] != "helix":
            continue
        at = tuple(case.get(key) for key in keys)
        if case["kvp"] == case["tpa"] == 1:
            alone[at] = time.median
        elif case["kvp"] > 1 and at in alone and not case.get("latent"):
            words = f"B={case['B']}, S={kilo(case['S'])}, heads={case['heads']}, KVP={case['kvp']}"
            share = f"{time.median / alone[at]:.2f} of the time of one device"
            yield words, f"{number(time.median)} us", f"{share}, the exchange included"


def _mesh_steps(result: Result) -> Iterator[Line]:
    """A whole step by Helix, beside tensor parallelism on as many devices."""
    meshes = ("kvp", "tpa")
    found = {}
    for row in result["rows"]:
        case, time = row["case"], spread(row, "step")
        others = case["strategy"] != "helix" or case["overlap"] > 1 or case["draft"] == "verify"
        if time is None or others:
            continue
        at = tuple((key, case[key]) for key in case if key not in meshes)
        found[at, case["kvp"], case["tpa"]] = case, time.median / 1e3
    for (at, kvp, tpa), (case, own) in found.items():
        _, beside = found.get((at, 1, kvp * tpa), (None, None))
        if kvp > 1 and beside is not None:
            draft = "" if case["draft"] == "plain" else f", {case['draft']}, gamma={case['gamma']}"
            words = f"{case['shape']}, B={case['B']}, {kilo(case['S'])} tokens{draft}, KVP={kvp}"
            yield words, f"{own:.2f} ms a step", f"tensor parallelism {beside:.2f} ms"


def _served(result: Result) -> Iterator[Line]:
    """The engine with all requests there at once, by drafter."""
    rows = [row for row in serving.timed(result["rows"]) if row["case"]["load"] == "full"]
    plain = {str(row["case"]): row for row in rows if row["name"] == "none"}
    for row in rows:
        case, none = row["case"], plain.get(str(row["case"]))
        ratio = [] if none is None or none is row else [row["tokens_per_s"] / none["tokens_per_s"]]
        said = [f"{times(x)} as fast as without drafts" for x in ratio]
        if (share := serving.of_step(row)) is not None:
            said.append(f"{share:.2f} of the rate of the steps alone")
        words = f"{case['model']}, {case['mix']}, {case['B']} slots, {row['name']}"
        yield words, f"{row['tokens_per_s']:,.0f} tokens/s", "; ".join(said)


VERIFY = {"B": 32, "alpha": 0.9, "l2": "warm"}
SAMPLE = {"B": 32, "V": 128256, "l2": "cold"}
HEADS = {"heads": "32/8", "H": 128}
LINES: dict[str, Callable[[Result], Iterator[Line]]] = {
    "real": real.lines,
    "verify": _points(*(Point("verify_greedy", {"gamma": g} | VERIFY) for g in (8, 128))),
    "fused": _points(
        Point("verify_and_pack", {"gamma": 8, "D": 1024} | VERIFY),
        Point("verify_and_pack", {"gamma": 128, "D": 2048} | VERIFY | {"l2": "cold"}, "copy"),
    ),
    "sampling": _points(
        *(Point("verify_stochastic", {"draft": d} | SAMPLE, "read") for d in ("one-hot", "logits"))
    ),
    "attention": _points(
        *(
            Point("attention", {"B": b, "S": s, "T": t} | HEADS, "read")
            for b, s, t in ((8, 32768, 1), (4, 131072, 1), (4, 131072, 10))
        )
    ),
    "gather": _points(
        Point("gathered_attention", {"B": 8, "S": 131072, "n": 8192, "T": 1} | HEADS, "read")
    ),
    "select": _points(
        Point("select", {"rows": 256, "n": 32768, "k": 512, "scores": "float32"}),
        Point("select", {"rows": 8, "n": 2**20, "k": 8192, "scores": "float32"}),
    ),
    "hata-layer": _layer,
    "hash-training": _learning,
    "hata-off": _host,
    "ruler": _quality,
    "step": _decoding,
    "parity": _exact,
    "decode": _steps,
    "hata-e2e": _lossy,
    "throughput": _imposed,
    "families": _steps,
    "serving": _served,
    "helix-attention": _meshes,
    "helix-step": _mesh_steps,
}


def tables_of(found: list[tuple[str, Line]]) -> Iterator[str]:
    """A table a machine; ``found``: headings of sections, and lines from them.

    A heading is a title, the machine behind a colon, and the name of a further run behind a comma.
    """
    by_machine: dict[str, list[tuple[str, Line]]] = {}
    for heading, line in found:
        machine = heading.partition(": ")[2].partition(", ")[0]
        by_machine.setdefault(machine, []).append((heading, line))
    for machine, own in by_machine.items():
        rows, before = [], None
        for heading, line in own:
            title = heading.replace(f": {machine}", "")
            rows.append(("" if heading == before else f"[{title}](#{anchor(heading)})", *line))
            before = heading
        headings = ("", "case", "result", "compared with")
        yield f"## At a glance: {machine}\n\n{table(headings, rows, left=len(headings))}"


def anchor(heading: str) -> str:
    """What a link to a heading ends with, as GitHub and MkDocs make it."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")
