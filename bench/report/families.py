"""The operations and cases of docs/comparison.md, by family."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from bench.point import Row, best_clock, spread
from bench.report.whole import COLUMNS


@dataclasses.dataclass(frozen=True)
class Entry:
    """A table of one operation.

    Attributes:
        operation: its name.
        purpose: what it does, as the first table says it.
        cases: what the cases of its lines have, a line each.
        work: the ceiling that its bytes are compared with, None where launching it takes longer.
        without: why a backend does not exist, by its name.
        in_loop: whether times are of a step in a jitted loop, since a call by itself copies what
            it updates.
    """

    operation: str
    purpose: str
    cases: Sequence[Mapping[str, Any]]
    work: str | None = "read"
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_loop: bool = False

    def time(self, row: Row) -> float | None:
        """The median in microseconds, None where the row has none."""
        time = spread(row, "step") if self.in_loop else best_clock(row)
        return time and time.median

    @property
    def enough(self) -> int:
        """Backends that have to run a case before one of them is called the fastest."""
        return min(3, len(COLUMNS) - len(self.without))


VERIFY = {"B": 32, "alpha": 0.9}
CACHE = {"cache": "bfloat16"}
HEADS = {"heads": "32/8", "H": 128} | CACHE
EIGHT_BITS = {"cache": "float8_e4m3fn"}
CODES = {"B": 8, "R": 128, "T": 1}
LONG_CODES = CODES | {"S": 32768}
FAMILIES: dict[str, Sequence[Entry]] = {
    "verification": (
        Entry(
            "verify_greedy",
            "greedy verification",
            [VERIFY | {"gamma": g, "l2": "warm"} for g in (8, 128)],
            None,
        ),
        Entry(
            "acceptance_scan",
            "count of accepted tokens alone",
            [VERIFY | {"gamma": g} for g in (8, 128)],
            None,
            dict.fromkeys(("pallas", "triton"), "the paper compares its two CUDA kernels"),
        ),
        Entry(
            "verify_and_commit",
            "verification from logits",
            [{"B": 32, "T": t, "V": 128256} for t in (1, 9)],
        ),
        Entry(
            "verify_tree",
            "verification of a tree",
            [{"B": 32, "gamma": gamma} for gamma in (7, 15)],
            None,
        ),
    ),
    "packing": (
        Entry(
            "pack",
            "packing",
            [VERIFY | {"gamma": 128, "D": d, "l2": "cold"} for d in (128, 2048)],
            "copy",
        ),
        Entry(
            "verify_and_pack",
            "verification with packing",
            [
                VERIFY | {"gamma": 8, "D": 128, "l2": "cold"},
                VERIFY | {"gamma": 128, "D": 2048, "l2": "cold"},
            ],
            "copy",
        ),
        Entry(
            "pack_path",
            "packing of a tree's path",
            [{"B": 32, "n": 8, "layers": 36, "heads": "32/8", "H": 128}],
            None,
            in_loop=True,
        ),
    ),
    "sampling": (
        Entry(
            "verify_stochastic",
            "stochastic verification",
            [{"B": 32, "V": 128256, "draft": d, "l2": "cold"} for d in ("one-hot", "logits")],
        ),
        Entry("sample", "sampling", [{"B": 32, "V": 128256}]),
    ),
    "hashes": (
        Entry(
            "hash_encode",
            "hash encoding",
            [CODES | {"heads": h} for h in ("32/32", "32/8")],
            None,
        ),
        Entry(
            "rotate_append_encode",
            "encoding with the append",
            [CODES | {"heads": h} for h in ("32/32", "32/8")],
            None,
            {"cuda": "the CUDA kernel that encodes as it appends is a part of hash_attention"},
        ),
        Entry(
            "hamming_scores",
            "hash scoring",
            [LONG_CODES | {"heads": h} for h in ("32/32", "32/8")],
        ),
        Entry(
            "hash_select",
            "hash scoring with selection",
            [LONG_CODES | {"heads": h, "n": 512} for h in ("32/32", "32/8")],
        ),
    ),
    "attention": (
        Entry(
            "attention",
            "long-context attention",
            [{"B": 4, "S": 131072, "T": t} | HEADS for t in (1, 10)]
            + [{"B": 8, "S": 32768, "T": 1} | HEADS],
        ),
        Entry(
            "attention",
            "the same, one row and KV head",
            [{"B": 1, "S": 262144, "T": t, "heads": "8/1", "H": 128} | CACHE for t in (1, 10)],
        ),
        Entry(
            "attention",
            "the same, heads of 64 channels",
            [
                {"B": 8, "S": 32768, "T": 12, "heads": "64/8", "H": 64} | CACHE,
                {"B": 96, "S": 7168, "T": 6, "heads": "9/3", "H": 64} | CACHE,
            ],
        ),
        Entry(
            "attention",
            "the same, an 8-bit cache",
            [{"B": 4, "S": 131072, "T": t} | HEADS | EIGHT_BITS for t in (1, 10)],
        ),
        Entry(
            "scored_attention",
            "attention that scores keys",
            [{"B": 4, "S": 131072, "T": 10} | HEADS],
        ),
        Entry(
            "gathered_attention",
            "attention to selected keys",
            [{"B": 8, "S": 131072, "n": 8192, "indices": "shared", "T": 1} | HEADS],
        ),
        Entry(
            "gathered_attention",
            "the same, selected per head",
            [{"B": 8, "S": 32768, "n": 512, "indices": "per-head", "heads": "32/32"} | CACHE],
        ),
    ),
    "matmuls": tuple(
        Entry(
            "linear",
            f"matmuls of {name}",
            [
                {"model": model, "part": part, "rows": rows, "weights": "bfloat16"}
                for part in ("output", "gate_up")
                for rows in batches
            ],
            without={"pallas": "matmuls are no kernel of the papers"},
        )
        for name, model, batches in (
            ("SmolLM2-135M", "smollm2-135m", (12, 96)),
            ("Qwen2.5-Coder-0.5B", "qwen2.5-coder-0.5b", (16, 64)),
        )
    ),
}
