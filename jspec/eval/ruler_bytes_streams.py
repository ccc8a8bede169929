"""Streams of synthetic evidence: each writes lines of text and asks about the lines it wrote.

One stream serves the evaluation (one question at the end) and the training documents (dozens of
questions in between), so both have the same surface form. Everything is bytes, drawn from a NumPy
generator; nothing is downloaded.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

_ADJECTIVES = (
    "amber ancient azure bitter brave bright broken calm clever cold copper coral crimson curious "
    "dusty eager early empty faint fancy fierce gentle giant golden grand green hidden hollow "
    "honest humble icy ivory jolly keen late lazy little lonely lucky mellow merry misty modest "
    "narrow noble odd olive pale plain polite proud purple quiet rapid rare rough royal rusty "
    "salty scarlet secret sharp shiny silent silver simple sleepy slow smooth solid sour steady "
    "stormy sunny sweet tall tender tiny vivid warm wild wise young"
)
_NOUNS = (
    "anchor apple arrow badger basket beacon bridge bucket candle canyon castle cedar cliff cloud "
    "comet cotton cradle desert dragon eagle ember engine falcon feather fiddle forest fountain "
    "garden glacier hammer harbor hazel helmet heron island jacket kettle ladder lagoon lantern "
    "lemon lily magnet maple marble meadow mirror mountain needle nickel oasis ocean orchard otter "
    "paddle pebble pepper piano pillow planet pocket prairie puzzle rabbit ribbon river rocket "
    "saddle shadow shelter signal spider spruce stable summit temple thunder ticket timber tunnel "
    "turtle valley velvet violin walnut window"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
CLOSE = b".\n"  # what follows an answer
MAX_LINE_BYTES = 96  # no line of evidence is longer
MAX_ASK_BYTES = 224  # no question with its answer and `CLOSE` is longer


class Ask(NamedTuple):
    """A question, ending where its answer begins, and the answers in canonical order."""

    question: bytes
    answers: tuple[bytes, ...]

    @property
    def answer(self) -> bytes:
        """The answers as they stand in the text: one space between two."""
        return b" ".join(self.answers)

    @property
    def size(self) -> int:
        """Bytes of the question, its answer and `CLOSE`."""
        return len(self.question) + len(self.answer) + len(CLOSE)


class Stream(Protocol):
    """Writes evidence line by line and asks about it."""

    def line(self) -> bytes:
        """The next line of evidence, with its newline."""
        ...

    def ask(self, *, final: bool = False) -> Ask | None:
        """A question not asked before, or None; ``final`` asks as early as it can be answered."""
        ...


def _question(question: str, lead: str, answers: tuple[str, ...]) -> Ask:
    text = f"Question: {question}\nAnswer: {lead} "
    return Ask(text.encode(), tuple(answer.encode() for answer in answers))


def _pick(rng: np.random.Generator, items):
    return items[int(rng.integers(len(items)))]


def _pop(rng: np.random.Generator, items: list):
    """Remove and return a random item in constant time; the order of the rest changes."""
    index = int(rng.integers(len(items)))
    items[index], items[-1] = items[-1], items[index]
    return items.pop()


def _name(rng: np.random.Generator) -> str:
    return f"{_pick(rng, ADJECTIVES)}-{_pick(rng, NOUNS)}"


def _letters(rng: np.random.Generator, size: int, first: int) -> str:
    return (rng.integers(26, size=size, dtype=np.uint8) + first).tobytes().decode()


def _fresh(used: set[str], draw) -> str:
    """A draw that is not in ``used`` yet; it is added."""
    while (item := draw()) in used:
        pass
    used.add(item)
    return item


class CodeFacts:
    """Facts with two-word keys and seven-digit values (the needle of RULER's NIAH tasks)."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.used: set[str] = set()
        self.open: list[tuple[str, str]] = []

    def line(self) -> bytes:
        key = _fresh(self.used, lambda: _name(self.rng))
        value = str(self.rng.integers(1_000_000, 10_000_000))
        self.open.append((key, value))
        return f"The access code of {key} is {value}.\n".encode()

    def ask(self, *, final: bool = False) -> Ask | None:
        if not self.open:
            return None
        key, value = _pop(self.rng, self.open)
        return _question(
            f"What is the access code of {key}?", f"The access code of {key} is", (value,)
        )


class RecordFacts:
    """Facts whose keys and values are UUIDs."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.open: list[tuple[str, str]] = []

    def _uuid(self) -> str:
        digits = self.rng.bytes(16).hex()
        return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def line(self) -> bytes:
        key, value = self._uuid(), self._uuid()
        self.open.append((key, value))
        return f"Record {key} points to {value}.\n".encode()

    def ask(self, *, final: bool = False) -> Ask | None:
        if not self.open:
            return None
        key, value = _pop(self.rng, self.open)
        return _question(f"Where does record {key} point?", f"Record {key} points to", (value,))


class Chains:
    """Variable tracking: a number goes into a name, that name into the next, `NAMES` in all.

    The answer lists the names that hold the number, in the order in which they got it.
    """

    NAMES = 5
    OPEN = 3  # chains that grow side by side

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.used: set[str] = set()
        self.growing: list[list[str]] = []
        self.open: list[list[str]] = []

    def line(self) -> bytes:
        if len(self.growing) < self.OPEN:
            number = _fresh(self.used, lambda: str(self.rng.integers(10_000, 100_000)))
            self.growing.append([number])
            chain = self.growing[-1]
        else:
            chain = _pick(self.rng, self.growing)
        name = _fresh(self.used, lambda: _letters(self.rng, 5, ord("A")))
        chain.append(name)
        if len(chain) > self.NAMES:
            self.growing.remove(chain)
            self.open.append(chain)
        return f"Put {chain[-2]} into {name}.\n".encode()

    def ask(self, *, final: bool = False) -> Ask | None:
        if not self.open:
            return None
        number, *names = _pop(self.rng, self.open)
        return _question(
            f"Which names hold {number}?", f"The names that hold {number} are", tuple(names)
        )


class FrequentCodes:
    """Frequent words extraction: codes drawn from a Zipf law with exponent 2 over `CODES` codes.

    The answer lists the three most frequent, the most frequent first. Each list has a label and is
    asked about once, after a random number of lines.
    """

    CODES = 50
    ROW = 8
    MIN_LINES = 4

    def __init__(self, rng: np.random.Generator, max_lines: int):
        self.rng = rng
        self.max_lines = max(max_lines, self.MIN_LINES + 1)
        weights = np.arange(1, self.CODES + 1) ** -2.0
        self.cumulative = np.cumsum(weights / weights.sum())
        self._restart()

    def _restart(self) -> None:
        self.label = _name(self.rng)
        used: set[str] = set()
        self.codes = [
            _fresh(used, lambda: _letters(self.rng, 5, ord("a"))) for _ in range(self.CODES)
        ]
        self.counts = np.zeros(self.CODES, np.int64)
        self.lines = 0
        self.goal = _log_uniform(self.rng, self.MIN_LINES, self.max_lines)

    def line(self) -> bytes:
        ranks = np.searchsorted(self.cumulative, self.rng.random(self.ROW))
        ranks = np.minimum(ranks, self.CODES - 1)
        np.add.at(self.counts, ranks, 1)
        self.lines += 1
        return f"Log {self.label}: {' '.join(self.codes[rank] for rank in ranks)}\n".encode()

    def ask(self, *, final: bool = False) -> Ask | None:
        order = np.argsort(-self.counts, kind="stable")
        top = self.counts[order[:4]]
        clear = bool(np.all(top[:3] >= top[1:] + np.maximum(1, top[1:] // 4)))
        if self.lines < self.MIN_LINES or not clear or (self.lines < self.goal and not final):
            return None
        ask = _question(
            f"Which three codes are most frequent in log {self.label}?",
            f"The three most frequent codes in log {self.label} are",
            tuple(self.codes[rank] for rank in order[:3]),
        )
        self._restart()
        return ask


class CommonWords:
    """Common words extraction: ten words come once in each round of twenty, others at most twice.

    The ten begin with different letters and the answer lists them in alphabetical order. Each list
    has a label and is asked about once, after a random number of lines.
    """

    CONSONANTS = "bdfgklmnprstvz"
    SYLLABLES = tuple(c + v for c in CONSONANTS for v in "aeiou")
    COMMON = 10
    ROW = 8
    MIN_ROUNDS = 3

    def __init__(self, rng: np.random.Generator, max_lines: int):
        self.rng = rng
        self.max_lines = max(max_lines, 9)
        self._restart()

    def _restart(self) -> None:
        self.label = _name(self.rng)
        self.used: set[str] = set()
        initials = self.rng.permutation(list(self.CONSONANTS))[: self.COMMON]
        self.common = sorted(_fresh(self.used, lambda c=c: self._word(str(c))) for c in initials)
        self.once: list[str] = []  # words that came once so far
        self.queue: list[str] = []
        self.rounds = self.lines = 0
        self.goal = _log_uniform(self.rng, 8, self.max_lines)

    def _word(self, initial: str = "") -> str:
        parts = [_pick(self.rng, self.SYLLABLES) for _ in range(3)]
        return (initial + parts[0][1:] if initial else parts[0]) + parts[1] + parts[2]

    def _round(self) -> list[str]:
        words = list(self.common)
        for _ in range(self.COMMON):
            if self.once and self.rng.random() < 0.5:
                words.append(_pop(self.rng, self.once))
            else:
                words.append(_fresh(self.used, self._word))
                self.once.append(words[-1])
        self.rounds += 1
        return [words[i] for i in self.rng.permutation(len(words))]

    def line(self) -> bytes:
        if len(self.queue) < self.ROW:
            self.queue += self._round()
        row, self.queue = self.queue[: self.ROW], self.queue[self.ROW :]
        self.lines += 1
        return f"List {self.label}: {' '.join(row)}\n".encode()

    def ask(self, *, final: bool = False) -> Ask | None:
        # A round may be cut by the last line, so one more than the least has been begun.
        if self.rounds <= self.MIN_ROUNDS or (self.lines < self.goal and not final):
            return None
        ask = _question(
            f"Which ten words are most common in list {self.label}?",
            f"The ten most common words in list {self.label} are",
            tuple(self.common),
        )
        self._restart()
        return ask


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(max(high, low + 1))))))
