"""`jspec generate --demo`: a document that ships with jspec, with a question about it."""

from __future__ import annotations

import re
from importlib import resources

END = "\n"  # the answer is a line
_PUT = re.compile(r"^Put (\w+) into (\w+)\.$", re.MULTILINE)
_QUESTION = re.compile(r"^Question: Which names hold (\d+)\?\n\Z", re.MULTILINE)
_ANSWER = re.compile(r"^Answer: The names that hold (\d+) are (.+)\.", re.MULTILINE)


def prompt() -> bytes:
    """The document, followed by a question about it."""
    return (resources.files("jspec.cli") / "demo.txt").read_bytes()


def introduction() -> str:
    """The text that is printed before the answer."""
    text = prompt().decode()
    question = text[text.rindex("Question: ") :]
    return (
        f"The model reads a text of {len(text):,} bytes, in which numbers are put into names and\n"
        "these into others: Put 71905 into GZWEN. Put GZWEN into YWSQB. It is asked:\n\n"
        f"{question}"
    )


def expected() -> tuple[str, list[str]]:
    """The number that is asked about, and the names that hold it by the document."""
    text = prompt().decode()
    into = dict(_PUT.findall(text))
    (number,) = _QUESTION.findall(text)
    names = [into[number]]
    while names[-1] in into:
        names.append(into[names[-1]])
    return number, names


def verdict(answer: str) -> str:
    """Whether ``answer`` is what the document says."""
    number, names = expected()
    if _ANSWER.findall(answer) == [(number, " ".join(names))]:
        return f"right: these {len(names)} names, in this order"
    return f"wrong: the text says {' '.join(names)}"
