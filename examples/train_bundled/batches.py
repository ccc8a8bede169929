"""Rows of tokens: packed source text and retrieval documents, made by background processes."""

from __future__ import annotations

import collections
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from examples.train_bundled.corpus import END, START
from jspec.eval import ruler_bytes

BOS_TOKEN, END_TOKEN, PAD_TOKEN = 256, 257, 258
TEXT, RETRIEVAL, ANSWER, IGNORED = range(4)  # what a target token is; see `Batch.kinds`

TOKEN_OF_BYTE = np.arange(256, dtype=np.uint16)
TOKEN_OF_BYTE[START], TOKEN_OF_BYTE[END] = BOS_TOKEN, END_TOKEN
_PLAIN = bytes.maketrans(bytes([START, END]), b"\n\n")

_data: np.ndarray  # the training split, opened once in each process


class Stage(NamedTuple):
    """A stretch of training: ``rows`` of ``length`` targets, ``share`` of the planned time."""

    length: int
    rows: int
    share: float
    retrieval: float  # share of rows that are retrieval documents


class Batch(NamedTuple):
    """``tokens`` uint16 [B, L + 1] and the kinds of its targets, uint8 [B, L]."""

    tokens: np.ndarray
    kinds: np.ndarray


class Loader:
    """Keeps a bounded number of batches in preparation; the batches depend on the seed alone."""

    def __init__(self, data_file: Path, workers: int, depth: int, seed: int):
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(workers, context, _open_data, (data_file,))
        self.depth = depth
        self.seed = seed
        self.waiting: collections.deque[Future[Batch]] = collections.deque()

    def batches(self, stage: Stage, first_step: int) -> Iterator[Batch]:
        """Batches of one stage without end. A failed worker raises here."""
        for future in self.waiting:
            future.cancel()
        self.waiting.clear()
        step = first_step
        while True:
            while len(self.waiting) < self.depth:
                self.waiting.append(self.pool.submit(make_batch, stage, (self.seed, step)))
                step += 1
            yield self.waiting.popleft().result(timeout=60)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)


def _open_data(path: Path) -> None:
    global _data
    _data = np.memmap(path, np.uint8, mode="r")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent has ended in any way, the watchdog's and SIGKILL included.

    A worker that waits for its next task does not notice by itself.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def make_batch(stage: Stage, seed: tuple[int, int]) -> Batch:
    """One batch in a worker process: retrieval rows first, then source rows."""
    rng = np.random.default_rng((*seed, stage.length))
    tokens = np.empty((stage.rows, stage.length + 1), np.uint16)
    kinds = np.full((stage.rows, stage.length), TEXT, np.uint8)
    # A share that is no whole number of rows holds on average.
    documents = int(stage.retrieval * stage.rows + rng.random())
    for row in range(stage.rows):
        if row < documents:
            tokens[row], kinds[row] = retrieval_row(_data, stage.length, rng)
        else:
            tokens[row] = source_row(_data, stage.length, rng)
    return Batch(tokens, kinds)


def source_row(data: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """``length + 1`` tokens from a random place, every second time from the start of a document."""
    at = int(rng.integers(max(1, len(data) - 2 * length)))
    if rng.random() < 0.5:
        starts = np.flatnonzero(data[at : at + length] == START)
        at += int(starts[0]) + 1 if len(starts) else 0
    row = np.full(length + 1, PAD_TOKEN, np.uint16)
    row[0] = BOS_TOKEN
    text = TOKEN_OF_BYTE[data[at : at + length]]
    row[1 : 1 + len(text)] = text
    return row


def retrieval_row(
    data: np.ndarray, length: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """A row of retrieval documents, and the kinds of its ``length`` targets.

    Two rows in three hold one document of full length, the others several shorter ones.
    """
    shortest = ruler_bytes.MIN_LENGTH // 2
    row = np.full(length + 1, PAD_TOKEN, np.uint16)
    kinds = np.full(length + 1, IGNORED, np.uint8)  # of the row's own tokens, shifted at the end
    whole = rng.random() < 2 / 3
    at = 0
    while (room := length - 1 - at) >= shortest:
        size = room if whole else round(float(np.exp(rng.uniform(np.log(shortest), np.log(room)))))
        filler = source_filler(data) if rng.random() < 0.5 else ruler_bytes.sentences
        document, spans = ruler_bytes.training_document(max(size, shortest), rng, filler)
        end = at + 1 + len(document)
        row[at], row[end] = BOS_TOKEN, END_TOKEN
        row[at + 1 : end] = np.frombuffer(document, np.uint8)
        kinds[at : end + 1] = RETRIEVAL
        for first, last in spans:
            kinds[at + 1 + first : at + 1 + last] = ANSWER
        at = end + 1
    return row, kinds[1:]


def source_filler(data: np.ndarray) -> ruler_bytes.Filler:
    """Lines of the training split as haystack, `jspec.eval.ruler_bytes.Filler`."""

    def filler(rng: np.random.Generator, size: int) -> bytes:
        at = int(rng.integers(max(1, len(data) - size)))
        text = data[at : at + size].tobytes().translate(_PLAIN)
        return text[: text.rfind(b"\n") + 1]

    return filler
