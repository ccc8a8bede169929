"""`jspec generate --demo`: a document that ships with jspec, with a question about it."""

from __future__ import annotations

import re
from importlib import resources

END = "\n"  # the answer is a line
# What the document states, and an answer to a question about it.
_FACT = re.compile(r"Record ([\w-]+) points to ([\w-]+)\.")


def prompt() -> bytes:
    """The document, and behind it a question that the model is to answer."""
    return (resources.files("jspec.cli") / "demo.txt").read_bytes()


def facts() -> dict[str, str]:
    """Where each record of the document points."""
    return dict(_FACT.findall(prompt().decode()))


def introduction() -> str:
    """What to say before the answer: what is read, and the question."""
    text = prompt().decode()
    question = text[text.rindex("Question: ") :]
    return (
        f"The model reads a text of {len(text):,} bytes, with {len(facts())} records in it, and is "
        f"asked:\n\n{question}"
    )


def verdict(answer: str) -> str:
    """Whether ``answer`` is what the document says."""
    known, given = facts(), _FACT.findall(answer)
    if not given:
        return "none"
    right = all(known.get(record) == target for record, target in given)
    return "right: the text says so" if right else "wrong: the text says something else"
