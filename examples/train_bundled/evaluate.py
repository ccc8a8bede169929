"""Held-out bits per byte and RULER accuracy, by forward passes alone.

An answer counts where the model's most likely next byte is right at every byte of it, given the
prompt and the answer so far. For one answer that is what greedy decoding would give, byte for byte.
For several (tracking, frequent and common words) they are expected in the canonical order of
`jspec.eval.ruler_bytes.Example`; each is scored given the right ones before it, and the mean is
reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, NamedTuple

import jax
import numpy as np

from examples.train_bundled.batches import BOS_TOKEN, PAD_TOKEN, TOKEN_OF_BYTE
from jspec.eval import ruler_bytes

Spans = list[list[tuple[int, int]]]


class Sheet(NamedTuple):
    """Examples of one task and length: tokens uint16 [N, L + 1], and each answer's target span."""

    tokens: np.ndarray
    spans: Spans


def make_sheet(name: str, length: int, count: int) -> Sheet:
    """Examples of a task with seeds 0 to ``count - 1``, each at most ``length`` bytes."""
    tokens = np.full((count, length + 1), PAD_TOKEN, np.uint16)
    tokens[:, 0] = BOS_TOKEN
    spans = []
    for seed in range(count):
        example = ruler_bytes.make_task(name, length, seed)
        text = np.frombuffer(example.prompt + example.answer, np.uint8)
        tokens[seed, 1 : 1 + len(text)] = text
        ends = len(example.prompt) + np.cumsum([len(answer) + 1 for answer in example.answers]) - 1
        spans.append(
            [(int(end) - len(a), int(end)) for a, end in zip(example.answers, ends, strict=True)]
        )
    return Sheet(tokens, spans)


def order_sheets(
    pool: Executor, lengths: Sequence[int], needles: int, others: int
) -> dict[tuple[str, int], Future[Sheet]]:
    """Have the sheets of all tasks and lengths made in the background."""
    return {
        (name, length): pool.submit(
            make_sheet, name, length, needles if name in ruler_bytes.NEEDLES else others
        )
        for length in lengths
        for name in ruler_bytes.TASKS
    }


def score_sheet(score: Callable, parameters: Any, sheet: Sheet, rows: int) -> float:
    """Mean share of right answers, in [0, 1]; ``score`` takes ``rows`` rows a call."""
    count, width = sheet.tokens.shape
    results = []
    for first in range(0, count, rows):
        tokens = np.full((rows, width), PAD_TOKEN, np.uint16)
        part = sheet.tokens[first : first + rows]
        tokens[: len(part)] = part
        results.append(score(parameters, tokens)[1])
    right = np.concatenate(jax.device_get(results))[:count]
    shares = [
        np.mean([right[row, first:last].all() for first, last in spans])
        for row, spans in enumerate(sheet.spans)
    ]
    return float(np.mean(shares))


def bits_per_byte(
    score: Callable, parameters: Any, data: np.ndarray, rows: int, length: int, batches: int
) -> dict[str, float]:
    """Bits per byte over rows of ``length`` spread over ``data``, at most ``batches`` batches."""
    whole = len(data) // length
    count = min(whole, batches * rows)
    if count == 0:
        raise ValueError(f"{len(data)} bytes held out are less than one row of {length}")
    losses = []
    places = np.linspace(0, whole - 1, count).astype(int) * length
    for first in range(0, count, rows):
        tokens = np.full((rows, length + 1), PAD_TOKEN, np.uint16)
        tokens[:, 0] = BOS_TOKEN
        for row, place in enumerate(places[first : first + rows]):
            tokens[row, 1:] = TOKEN_OF_BYTE[data[place : place + length]]
        losses.append(score(parameters, tokens)[0])
    nats = np.concatenate(jax.device_get(losses))[:count]
    return {"bits_per_byte": float(np.mean(nats, dtype=np.float64) / np.log(2)), "bytes": nats.size}


def evaluate(
    scores: Mapping[int, Callable],
    shapes: dict[int, int],
    parameters: Any,
    held_out: dict[str, np.ndarray],
    sheets: dict[tuple[str, int], Future[Sheet]],
    text_length: int,
    deadline: float,
) -> dict[str, Any]:
    """All figures there is time for; what ``deadline`` (`time.monotonic`) cuts off is left out."""
    began = time.monotonic()
    report: dict[str, Any] = {"text_length": text_length, "held_out": {}, "tasks": {}}
    for name, data in held_out.items():
        report["held_out"][name] = bits_per_byte(
            scores[text_length], parameters, data, shapes[text_length], text_length, batches=8
        )
        print(f"held-out {name}: {report['held_out'][name]}", flush=True)
    for (name, length), job in sheets.items():
        if time.monotonic() > deadline:
            print("no time left: the remaining tasks are not evaluated", flush=True)
            break
        sheet = job.result(timeout=60)
        accuracy = score_sheet(scores[length], parameters, sheet, shapes[length])
        entry = {"accuracy": accuracy, "examples": len(sheet.spans)}
        report["tasks"].setdefault(name, {})[str(length)] = entry
        print(f"{length:6d} {name:18s} {accuracy:.3f} ({len(sheet.spans)})", flush=True)
    report["seconds"] = time.monotonic() - began
    return report
