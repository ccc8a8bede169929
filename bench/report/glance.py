"""The first table of a machine: a few cases, each against a rival, a ceiling or a floor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench import ceilings
from bench.point import Row, spread
from bench.report import layers, real, records, systems
from bench.report.runs import Run
from bench.report.text import case_words, microseconds, pick, ratio, table
from bench.table import cell, kilo, number

# A case in words, what was measured, and what it is compared with.
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
    """A case of an operation. ``work``: the ceiling of its bytes, if any."""

    operation: str
    case: dict[str, Any]
    work: str | None = None

    def lines(self, result: Result) -> Iterator[Line]:
        """What `implementation=None` takes, against the ceiling and the fastest rival."""
        rows = pick(result, self.operation, **self.case)
        chosen = next((row for row in rows.values() if row.get("chosen")), None)
        if chosen is None:
            return
        measured = microseconds(chosen)
        compared = [*self._share(result, chosen, measured), *_fastest_rival(rows, measured)]
        yield (
            f"{self.operation}, {case_words(self.case, UNSAID)}",
            f"{number(measured)} us",
            "; ".join(compared),
        )

    def _share(self, result: Result, chosen: Row, measured: float) -> Iterator[str]:
        rate = self.work and ceilings.bandwidth(result["ceilings"], self.work)
        if rate:
            yield f"{chosen['bytes'] / measured * 1e6 / rate:.0%} of the {self.work} ceiling"


BUDGET = 1 / 64  # of the context
LONG = 2**20  # slots: the contexts of several devices
UNSAID = ("l2", "part", "H", "lengths", "alpha")  # of a case, which its table says


def _fastest_rival(rows: dict[str, Row], measured: float) -> Iterator[str]:
    rivals = {name: microseconds(row) for name, row in rows.items() if name in RIVALS}
    if rivals:
        name = min(rivals, key=rivals.__getitem__)
        speed = ratio(rivals[name] / measured, f" as fast as {RIVALS[name]}")
        yield f"{speed}, {number(rivals[name])} us"


def _layer(result: Result) -> Iterator[Line]:
    """HATA's layer over the fastest dense attention."""
    for group in layers.groups(result["rows"])[:1]:
        speedup, fastest = group.speedup("hata"), group.fastest
        if speedup is None or fastest is None:
            continue
        words = ", ".join(f"{k}={cell(k, group.case[k])}" for k in layers.CASE)
        measured = microseconds(group.policies["hata"])
        yield (
            words,
            f"{number(measured)} us",
            f"{ratio(speedup, ' as fast as dense attention')}, {number(fastest[1])} us",
        )


def _host(result: Result) -> Iterator[Line]:
    """A step with keys and values in the host's memory, over the dense one on the device."""
    for row, step, dense in layers.host_steps(result["rows"]):
        if dense is not None:
            words = f"{row['case']['model']}, {layers.context_of(row):,} tokens"
            speed = ratio(dense / step, " as fast as dense decoding with the cache on the device")
            yield words, f"{step:.2f} ms a step", speed


def _quality(result: Result) -> Iterator[Line]:
    """HATA's score at the paper's budget, against reading all and the exact choice."""
    scored = [x for x in result["rows"] if "score" in x and x["case"].get("kind") != "draft"]
    for row in scored:
        if row["name"] != "hata" or row["case"]["budget"] != BUDGET:
            continue
        at = {
            x["name"]: x["score"]
            for x in scored
            if x["case"]["S"] == row["case"]["S"] and x["case"]["budget"] in (None, BUDGET)
        }
        named = {"dense": "reading all", "exact_topk": "the exact top k", "quest": "Quest"}
        compared = [f"{words} {at[name]:.1f}" for name, words in named.items() if name in at]
        words = f"{kilo(row['case']['S'])} tokens, {100 * BUDGET:.3g} % of them read"
        yield words, f"{row['score']:.1f} % right", ", ".join(compared)


def _decoding(result: Result) -> Iterator[Line]:
    """The best source of drafts for the largest batch, the bundled model."""
    rows = [row for row in result["rows"] if row["checked"] and row["source"] != "none"]
    for batch in sorted({row["batch"] for row in rows})[-1:]:
        best = max((r for r in rows if r["batch"] == batch), key=lambda row: row["speedup"])
        words = f"bundled model, B={batch}, {kilo(best['context'])} tokens, {best['source']}"
        speed = f"{best['decode_tokens_per_s']:,.0f} tokens/s"
        yield words, speed, ratio(best["speedup"], " as fast as plain decoding")


def _exact(result: Result) -> Iterator[Line]:
    """Greedy tokens that exact decoding turned, over all its settings."""
    rows = [row for row in systems.compared(result["rows"]) if systems.mode_of(row) == "exact"]
    if rows:
        flips, compared = (sum(row[key] for row in rows) for key in ("flips", "compared"))
        words = f"exact=True, {len(rows)} settings of drafter, gamma and batch"
        yield words, f"{flips} flips", f"in {compared:,} greedy tokens, against plain decoding"


def _steps(result: Result) -> Iterator[Line]:
    """Verification steps of long contexts against their floors, a step of HATA over the dense one,
    and tokens a second by a stated acceptance over plain decoding."""
    for step in records.steps([result], "pass"):
        _, model, batch, context = step.place
        if step.gamma == 9 and batch * context > 2**18:
            words = f"{model}, B={batch}, {kilo(context)} tokens, T=10"
            floor = "the time to read its bytes at the ceiling"
            yield words, f"{step.us / 1e3:.2f} ms", f"{step.over_floor:.2f} of {floor}"
    for place, of_place in records.by_place(records.steps([result], "read")).items():
        _, model, batch, context = records.words(place)
        if {"hata", "dense"} <= of_place.keys():
            hata, dense = of_place["hata"].us, of_place["dense"].us
            words = f"{model}, B={batch}, {context} tokens, hata"
            speed = ratio(dense / hata, " as fast as the dense step")
            yield words, f"{number(int(batch) / hata * 1e6)} tokens/s", speed
    drafts = (x for x in records.steps([result], "draft") if systems.is_imposed(x))
    for place, of_place in records.by_place(drafts).items():
        _, model, batch, context = records.words(place)
        if {"vegas", "plain"} <= of_place.keys():
            rate, plain = (of_place[x].row["tokens_per_s"] for x in ("vegas", "plain"))
            words = f"{model}, B={batch}, {context} tokens, vegas"
            compared = ratio(rate / plain, " plain decoding")
            yield words, f"{number(rate)} tokens/s", f"{compared}; imposed acceptance (the paper's)"


def _meshes(result: Result) -> Iterator[Line]:
    """Reading one cache by two devices, over the time of one."""
    keys = ("B", "S", "heads", "H", "T", "latent")
    alone = {}
    for row in result["rows"]:
        case, time = row["case"], spread(row, "step")
        is_layer = row["operation"] == "attend" and case.get("part", "layer") == "layer"
        if time is None or not is_layer or case["strategy"] != "helix" or case["S"] < LONG:
            continue
        at = tuple(case.get(key) for key in keys)
        if case["kvp"] == case["tpa"] == 1:
            alone[at] = time.median
        elif case["kvp"] > 1 and at in alone and not case.get("latent"):
            words = f"B={case['B']}, S={kilo(case['S'])}, heads={case['heads']}, KVP={case['kvp']}"
            share = f"{time.median / alone[at]:.2f} of the time of one device"
            yield words, f"{number(time.median)} us", f"{share}, the exchange included"


def _mesh_steps(result: Result) -> Iterator[Line]:
    """A whole step by Helix, against tensor parallelism on as many devices."""
    meshes = ("kvp", "tpa")
    steps = {}
    for row in result["rows"]:
        case, time = row["case"], spread(row, "step")
        if time is None or row["operation"] != "step" or case["S"] < LONG:
            continue
        if case["strategy"] != "helix" or case["overlap"] > 1 or case["draft"] == "verify":
            continue
        at = tuple((key, case[key]) for key in case if key not in meshes)
        steps[at, case["kvp"], case["tpa"]] = case, time.median / 1e3
    for (at, kvp, tpa), (case, measured) in steps.items():
        _, compared = steps.get((at, 1, kvp * tpa), (None, None))
        if kvp > 1 and compared is not None:
            draft = "" if case["draft"] == "plain" else f", {case['draft']}, gamma={case['gamma']}"
            words = f"{case['shape']}, B={case['B']}, {kilo(case['S'])} tokens{draft}, KVP={kvp}"
            speed = ratio(compared / measured, " as fast as tensor parallelism")
            yield words, f"{measured:.2f} ms a step", f"{speed}, {compared:.2f} ms"


def _served(result: Result) -> Iterator[Line]:
    """The engine with all requests there at once, by drafter."""
    for row, plain in systems.at_full_load(result["rows"]):
        case, speed = row["case"], row["tokens_per_s"] / plain["tokens_per_s"]
        parts = [ratio(speed, " as fast as without drafts")]
        if (share := systems.of_steps(row)) is not None:
            parts.append(f"{share:.2f} of the rate of the steps alone")
        words = f"{case['model']}, {case['mix']}, {case['B']} slots, {row['name']}"
        yield words, f"{row['tokens_per_s']:,.0f} tokens/s", "; ".join(parts)


VERIFY = {"B": 32, "alpha": 0.9, "l2": "warm"}
SAMPLE = {"B": 32, "V": 128256, "l2": "cold"}
HEADS = {"heads": "32/8", "H": 128}
VERIFICATION = (
    Point("verify_greedy", {"gamma": 128} | VERIFY).lines,
    Point("verify_and_pack", {"gamma": 128, "D": 2048} | VERIFY | {"l2": "cold"}, "copy").lines,
    Point("verify_stochastic", {"draft": "logits"} | SAMPLE, "read").lines,
)
ATTENTION = (
    Point("attention", {"B": 4, "S": 131072, "T": 1} | HEADS, "read").lines,
    Point("attention", {"B": 4, "S": 131072, "T": 10} | HEADS, "read").lines,
    Point("gathered_attention", {"B": 8, "S": 131072, "n": 8192, "T": 1} | HEADS, "read").lines,
    Point("select", {"rows": 8, "n": 2**20, "k": 8192, "scores": "float32"}).lines,
)
LINES: dict[str, tuple[Callable[[Result], Iterator[Line]], ...]] = {
    "real": (real.lines,),
    **dict.fromkeys(("verify", "pack", "fused", "sampling"), VERIFICATION),
    **dict.fromkeys(("attention", "gather", "select"), ATTENTION),
    **dict.fromkeys(("hata", "hata-layer"), (_layer,)),
    "hata-off": (_host,),
    **dict.fromkeys(("quality", "ruler", "parity"), (_quality, _exact)),
    **dict.fromkeys(("decode", "hata-e2e", "throughput"), (_steps,)),
    **dict.fromkeys(("helix", "helix-attention", "helix-step"), (_meshes, _mesh_steps)),
    "step": (_decoding,),
    "serving": (_served,),
}


def lines_of(suite: str, result: Result) -> list[Line]:
    """What the table shows of a suite's result."""
    return [line for lines in LINES.get(suite, ()) for line in lines(result)]


PREFERRED = {"select": "cub"}  # the run with the fastest rivals, where it is not the first


def tables_of(runs: Sequence[Run], titles: Mapping[str, str]) -> Iterator[str]:
    """A table for each GPU and a line for the CPU, of the first run of each suite in ``titles``.

    Args:
        runs: all results.
        titles: of the part of RESULTS.md on a suite, by its name, in the order of the page.
    """
    for device in dict.fromkeys(run.device for run in runs):
        rows, before = [], set()
        for suite, title in titles.items():
            of_suite = [run for run in runs if (run.device, run.suite) == (device, suite)]
            of_suite.sort(key=lambda run: run.name != PREFERRED.get(suite, run.name))
            for line in lines_of(suite, of_suite[0].result) if of_suite else ():
                link = "" if title in before else f"[{title}](#{anchor(title)})"
                rows.append((link, *line))
                before.add(title)
        if device == "cpu" and rows:
            parts = [
                f"{case}: {result} ({compared or 'no rival'})" for _, case, result, compared in rows
            ]
            yield f"## At a glance: CPU\n\n{'; '.join(parts)}.\n"
        elif rows:
            headings = ("", "case", "result", "compared with")
            yield f"## At a glance: {device}\n\n{table(headings, rows, left=len(headings))}"


def anchor(heading: str) -> str:
    """What a link to a heading ends with, as GitHub and MkDocs make it."""
    letters = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return letters.replace(" ", "-")
