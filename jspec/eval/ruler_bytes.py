"""RULER-kind long-context tasks (Hsieh et al. 2024) over bytes, and documents to train for them.

The six kinds follow RULER; wording, sizes and haystacks are our own, so figures compare models
under jspec with each other and not with published RULER scores. No download, no tokenizer, no JAX.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from jspec.eval.ruler_bytes_streams import (
    CLOSE,
    MAX_ASK_BYTES,
    MAX_LINE_BYTES,
    Ask,
    Chains,
    CodeFacts,
    CommonWords,
    FrequentCodes,
    RecordFacts,
    Stream,
)

TASKS = (
    "single_needle",
    "multikey_words",
    "multikey_uuids",
    "variable_tracking",
    "frequent_words",
    "common_words",
)
NEEDLES = TASKS[:3]
MIN_LENGTH = 1024  # bytes; a list of common words with its question needs most of it

# filler(rng, size) -> lines of text, at most ``size`` bytes and close to it
Filler = Callable[[np.random.Generator, int], bytes]

SENTENCES = tuple(
    f"{text}.\n".encode()
    for text in (
        "The bakery opens before the first tram leaves the depot",
        "Rain is expected in the hills and nothing at all by the coast",
        "A cat slept on the warm stones until noon",
        "They painted the fence twice and it still looked grey",
        "Nobody could say who had moved the chairs",
        "The train was on time and almost empty",
        "Wind turned the pages faster than she could read them",
        "He took the long way home along the water",
        "Two boats came in and one went out again",
        "The soup needs more salt and a little patience",
        "Snow lay on the roofs and the street was quiet",
        "Somebody was practising scales on the second floor",
        "The meeting ended early because there was nothing left to say",
        "Bread, cheese and a few plums were all they carried",
        "It was late and the lamps went on one by one",
        "The old map showed a road that is no longer there",
    )
)


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt that ends where the answer begins, and the expected strings in canonical order.

    The canonical order is: as assigned (variable tracking), most frequent first (frequent words),
    alphabetical (common words). ``answer`` is the text a greedy decoder should give.
    """

    prompt: bytes
    answers: tuple[bytes, ...]

    @property
    def answer(self) -> bytes:
        return b" ".join(self.answers)


def sentences(rng: np.random.Generator, size: int) -> bytes:
    """Plain filler: short sentences in random order, at most ``size`` bytes."""
    shortest = min(map(len, SENTENCES))
    text = b"".join(SENTENCES[i] for i in rng.integers(len(SENTENCES), size=size // shortest + 1))
    return text[: text.rfind(b"\n", 0, size) + 1]


def make_task(name: str, length_bytes: int, seed: int, filler: Filler = sentences) -> Example:
    """Create an example of a task; the same arguments give the same example.

    Haystacks: one fact in filler (single needle), facts over half of the bytes (multi-key), at
    least three chains in filler (tracking), list lines alone (frequent and common words).

    Args:
        name: a name of `TASKS`.
        length_bytes: the most bytes of prompt and answer together.
        seed: seed of the example.
        filler: creates the text between the evidence.

    Raises:
        ValueError: the task is unknown, or ``length_bytes`` is below `MIN_LENGTH`.
    """
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; jspec has {', '.join(TASKS)}")
    if length_bytes < MIN_LENGTH:
        raise ValueError(f"length_bytes={length_bytes} must be at least {MIN_LENGTH}")
    rng = np.random.default_rng((zlib.crc32(name.encode()), length_bytes, seed))
    while True:
        stream = _streams(rng, length_bytes)[_STREAM_OF[name]]
        lines = list(_evidence(name, stream, length_bytes - MAX_ASK_BYTES))
        ask = stream.ask(final=True)
        if ask is not None:  # None: a draw of frequent words without three clear leaders
            break
    room = length_bytes - sum(map(len, lines)) - len(ask.question) - len(ask.answer)
    if name not in ("frequent_words", "common_words"):
        lines = _merge(rng, filler(rng, room).splitlines(keepends=True), lines)
    return Example(b"".join(lines) + ask.question, ask.answers)


def needle(length_bytes: int, depth: float, seed: int, filler: Filler = sentences) -> Example:
    """Create an example of ``single_needle`` with the needle at a depth.

    Args:
        length_bytes: the most bytes of prompt and answer together.
        depth: place of the needle: 0 is the first line of the text, 1 the last one before the
            question.
        seed: seed of the example.
        filler: creates the text around the needle.

    Raises:
        ValueError: ``length_bytes`` is below `MIN_LENGTH`, or ``depth`` is outside [0, 1].
    """
    if length_bytes < MIN_LENGTH:
        raise ValueError(f"length_bytes={length_bytes} must be at least {MIN_LENGTH}")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth} must be in [0, 1]")
    rng = np.random.default_rng((zlib.crc32(b"needle"), length_bytes, round(depth * 1e6), seed))
    stream = CodeFacts(rng)
    line, ask = stream.line(), stream.ask(final=True)
    assert ask is not None
    room = length_bytes - len(line) - len(ask.question) - len(ask.answer)
    lines = filler(rng, room).splitlines(keepends=True)
    place = round(depth * len(lines))
    return Example(b"".join([*lines[:place], line, *lines[place:]]) + ask.question, ask.answers)


def training_document(
    length_bytes: int, rng: np.random.Generator, filler: Filler = sentences
) -> tuple[bytes, list[tuple[int, int]]]:
    """Create a document that asks about its earlier lines many times, and once at its end.

    Kinds of evidence, the share of filler and the rate of questions vary between documents, so that
    they cover the forms of `make_task`. No question is repeated, so that no answer can be copied
    from an earlier one.

    Args:
        length_bytes: the most bytes of the document.
        rng: draws the document.
        filler: creates the text between the evidence.

    Returns:
        The text, and the span (start, end) of each answer in bytes.

    Raises:
        ValueError: ``length_bytes`` is below half of `MIN_LENGTH`.
    """
    if length_bytes < MIN_LENGTH // 2:
        raise ValueError(f"length_bytes={length_bytes} must be at least {MIN_LENGTH // 2}")
    streams = _choose(rng, length_bytes)
    filler_share = float(rng.choice([0.0, 0.2, 0.5, 0.8, 0.95], p=[0.25, 0.25, 0.2, 0.15, 0.15]))
    if len(streams) == 1 and isinstance(streams[0], FrequentCodes | CommonWords):
        filler_share = 0.0
    ask_share = float(rng.choice([0.15, 0.3, 0.45]))
    # From here on questions prevail, so that many of them reach back over most of the document.
    exam = float(rng.uniform(0.5, 1.2)) * length_bytes
    haystack = filler(rng, length_bytes).splitlines(keepends=True)[::-1]
    text, spans = bytearray(), []
    while (room := length_bytes - len(text) - MAX_ASK_BYTES) >= MAX_LINE_BYTES:
        if text and haystack and rng.random() < filler_share:
            line = haystack.pop()
            text += line if len(line) <= room else b""
            continue
        stream = streams[int(rng.integers(len(streams)))]
        ask = stream.ask() if rng.random() < (ask_share if len(text) < exam else 0.8) else None
        if ask is None:
            text += stream.line()
        else:
            _append(text, spans, ask)
    asks = (stream.ask(final=True) for stream in streams)
    final = next((ask for ask in asks if ask is not None), None)
    if final is not None and (room := length_bytes - len(text) - final.size) >= 0:
        for line in reversed(haystack):
            if len(line) <= room:
                text += line
                room -= len(line)
        _append(text, spans, final)
    return bytes(text), spans


_STREAM_OF = {
    "single_needle": "codes",
    "multikey_words": "codes",
    "multikey_uuids": "records",
    "variable_tracking": "chains",
    "frequent_words": "frequent",
    "common_words": "common",
}
_WEIGHT = {"codes": 0.3, "records": 0.25, "chains": 0.2, "frequent": 0.1, "common": 0.15}


def _streams(rng: np.random.Generator, length: int) -> dict[str, Stream]:
    lines = length // 128
    return {
        "codes": CodeFacts(rng),
        "records": RecordFacts(rng),
        "chains": Chains(rng),
        "frequent": FrequentCodes(rng, lines),
        "common": CommonWords(rng, lines),
    }


def _choose(rng: np.random.Generator, length: int) -> list[Stream]:
    """The streams of a training document: one in four of ten documents, else two, three or all."""
    count = int(rng.choice([1, 2, 3, 5], p=[0.4, 0.3, 0.15, 0.15]))
    names = rng.choice(list(_WEIGHT), size=count, replace=False, p=list(_WEIGHT.values()))
    streams = _streams(rng, length)
    return [streams[str(name)] for name in names]


def _evidence(name: str, stream: Stream, room: int) -> Iterator[bytes]:
    """The evidence lines of an evaluation example, at most ``room`` bytes."""
    if name in ("frequent_words", "common_words"):
        limit = room
    elif name in ("multikey_words", "multikey_uuids"):
        limit = room // 2
    else:
        count = 1 if name == "single_needle" else Chains.OPEN * (Chains.NAMES + 1)
        yield from (stream.line() for _ in range(count))
        return
    used = 0
    while used + MAX_LINE_BYTES <= limit:
        yield (line := stream.line())
        used += len(line)


def _merge(rng: np.random.Generator, filler: list[bytes], lines: list[bytes]) -> list[bytes]:
    """Put ``lines``, in their order, at random places between the lines of ``filler``."""
    places = np.sort(rng.integers(len(filler) + 1, size=len(lines)))
    merged, start = [], 0
    for place, line in zip(places, lines, strict=True):
        merged += [*filler[start:place], line]
        start = int(place)
    return merged + filler[start:]


def _append(text: bytearray, spans: list[tuple[int, int]], ask: Ask) -> None:
    text += ask.question
    spans.append((len(text), len(text) + len(ask.answer)))
    text += ask.answer + CLOSE
