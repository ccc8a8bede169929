"""Whole greedy decoding by other libraries, on the prompts of a cell."""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from bench.program import Absent
from bench.real.answers import repeats
from bench.real.cell import Cell
from bench.rivals import decoding

NAMES = decoding.NAMES


def row(cell: Cell, name: str, new: int, path: Path) -> dict[str, Any]:
    """A rival's row: its tokens must be plain decoding's but for near ties. ``path``: its model."""
    if len(cell.batches) > 1:
        return {"checked": None, "reason": "it decodes one batch, and the cell has several"}
    if name == "transformers":
        decoded = decoding.decode_transformers(path, cell.model, cell.prompts, new)
    else:
        decoded = decoding.decode_torch_graph(path, cell.model, cell.prefilled[0], new)
    if isinstance(decoded, Absent):
        return {"checked": False if decoded.failed else None, "reason": decoded.reason}
    ends = set(cell.model.config.stop_tokens)
    answers = [_until_end(answer, ends) for answer in decoded.tokens]
    right = cell.check_greedy(answers, new)
    lengths = list(map(len, answers))
    return right | {
        "tokens": lengths,
        "steps": lengths,
        "repeats": list(map(repeats, answers)),
        "step_ns": [round(seconds / new * 1e9) for seconds in decoded.decode_s_samples],
        "decode_s_samples": decoded.decode_s_samples,
        "prefill_s": cell.prefill_s if decoded.prefill_s is None else decoded.prefill_s,
        "plain_floor_ns": cell.plain_floor_ns,
        "context": cell.mean_context,
        "note": decoded.note,
    }


def _until_end(tokens: Sequence[int], ends: Set[int]) -> tuple[int, ...]:
    """An answer up to its first end token: rivals decode on, as jspec's plain rows do not."""
    at = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tuple(tokens[: at + 1])
