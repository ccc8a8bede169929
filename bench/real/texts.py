"""Long prompts from texts that every machine with jspec has, with a question in a chat template.

Three kinds of text: *code*, the source of one package; *docs*, Python's own documentation as pydoc
shows it; *metadata*, the descriptions that installed packages ship. Four questions: rewrite,
explain, summarise, find mistakes. Kinds and questions alternate so that every pair of them occurs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import pydoc
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from keyword import iskeyword
from pathlib import Path
from pydoc_data.topics import topics

from jspec.models.chat import ChatTemplate
from jspec.models.tokenizer import Tokenizer

KINDS = ("code", "docs", "code", "metadata")
PACKAGES = ("jax", "numpy", "scipy", "flax", "orbax", "optax", "rich", "jinja2")
MODULES = (
    "argparse ast asyncio collections concurrent.futures configparser csv ctypes datetime "
    "decimal difflib email.message enum fractions http.client inspect io ipaddress itertools "
    "json logging mailbox multiprocessing os pathlib pickle random re shutil socket sqlite3 "
    "ssl statistics string subprocess tarfile tempfile threading tokenize typing unittest "
    "unittest.mock urllib.request uuid xml.dom.minidom zipfile"
).split()
QUESTIONS = {
    "rewrite": (
        "Write the text above again from its beginning, word for word, but call `{name}` "
        "`{name}_renamed` wherever it occurs. Give the new text only."
    ),
    "explain": "Explain what the text above is about and how its parts work together.",
    "summarise": "Summarise the text above in ten sentences.",
    "mistakes": "List possible mistakes in the text above, and say how to fix each of them.",
}
RAGGED = 0.3  # the shortest prompt is this share shorter than the longest
HEAD = 4000  # characters in which the name to change is the most frequent one
CHARACTERS_PER_TOKEN = 8  # more than any of these texts has on average
_GOLDEN = 0.618034  # its multiples, modulo 1, fill [0, 1) evenly
# Addresses and the environment, which differ from process to process.
_OF_PROCESS = re.compile(r" (?:at 0x|handle )[0-9a-f]+|environb? = .*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]{4,}")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as token ids; ``kind`` of its text, and ``question``, a key of `QUESTIONS`."""

    tokens: list[int]
    kind: str
    question: str


def prompts(tokenizer: Tokenizer, template: ChatTemplate, count: int, context: int) -> list[Prompt]:
    """``count`` prompts of at most ``context`` tokens each, the first of them nearly as long.

    The others are up to `RAGGED` shorter. Each is a text followed by a question about it, in the
    chat template. The same arguments give the same prompts while the installed packages are the
    same (`digest` tells).
    """
    uses = Counter(_kind(row) for row in range(count))

    def prompt(row: int) -> Prompt:
        kind = _kind(row)
        index = sum(_kind(before) == kind for before in range(row))
        room = round(context * (1 - RAGGED * (row * _GOLDEN % 1)))
        text = _text(kind, index, uses[kind], room * CHARACTERS_PER_TOKEN)
        question = tuple(QUESTIONS)[(row + row // len(KINDS)) % len(QUESTIONS)]
        return Prompt(_fitted(tokenizer, template, text, question, room), kind, question)

    for read in (_packages, _documentation, _metadata):
        read()  # once, before threads ask for it
    with ThreadPoolExecutor() as pool:  # the tokenizer runs outside the interpreter's lock
        return list(pool.map(prompt, range(count)))


def digest(rows: Sequence[Prompt]) -> str:
    """A hash of the prompts' tokens: equal for equal prompts."""
    return hashlib.sha256(repr([row.tokens for row in rows]).encode()).hexdigest()[:16]


def _kind(row: int) -> str:
    return KINDS[row % len(KINDS)]


def _text(kind: str, index: int, count: int, size: int) -> str:
    """``size`` characters of a kind; ``count`` texts begin at places that are spread evenly."""
    if kind == "code":
        # Texts of one package begin at different files.
        package, place = index % len(_packages()), index // len(_packages())
        files = _packages()[package]
        places = -(-count // len(_packages()))
        first = place * len(files) // places
        return _joined(files[first:] + files[:first], size)
    whole = _documentation() if kind == "docs" else _metadata()
    begin = index * len(whole) // count
    repeated = (whole[begin:] + whole[:begin]) * (size // len(whole) + 1)
    return repeated[:size]


def _joined(files: Sequence[Path], size: int) -> str:
    """The first ``size`` characters of some source files, each under its name."""
    parts, length = [], 0
    while length < size:
        for file in files:
            source = file.read_text(encoding="utf-8", errors="replace")
            parts.append(f"# {file.parent.name}/{file.name}\n{source}\n")
            length += len(parts[-1])
            if length >= size:
                break
    return "".join(parts)[:size]


@functools.cache
def _packages() -> list[list[Path]]:
    """The source files of each of `PACKAGES` that is installed."""
    result = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        folders = [Path(x) for x in (spec.submodule_search_locations or ())] if spec else []
        files = sorted(path for folder in folders for path in folder.rglob("*.py"))
        files = [path for path in files if "test" not in str(path) and path.stat().st_size > 2000]
        if files:
            result.append(files)
    return result


@functools.cache
def _documentation() -> str:
    """The language reference, and the documentation of `MODULES`."""
    parts = [topics[name] for name in sorted(topics)]
    parts += [pydoc.plain(pydoc.render_doc(name)) for name in MODULES]
    return re.sub(_OF_PROCESS, "", "\n".join(parts))


@functools.cache
def _metadata() -> str:
    """The metadata and descriptions of all installed packages, by name."""
    files = {
        dist.metadata["Name"].lower(): dist.read_text("METADATA") or ""
        for dist in importlib.metadata.distributions()
        if dist.metadata["Name"]
    }
    return "\n".join(files[name] for name in sorted(files))


def _fitted(
    tokenizer: Tokenizer, template: ChatTemplate, text: str, question: str, room: int
) -> list[int]:
    """The prompt of as much of ``text`` as fits ``room`` tokens."""
    ids = tokenizer.encode(text, special=False)
    size = min(room, len(ids))
    while size > 0:
        part = tokenizer.decode(ids[:size])
        names = Counter(x for x in _NAME.findall(part[:HEAD]) if not iskeyword(x)).most_common(1)
        asked = QUESTIONS[question].format(name=names[0][0] if names else "it")
        message = {"role": "user", "content": f"{part}\n\n{asked}"}
        tokens = template.encode(tokenizer, [message])
        if len(tokens) <= room:
            return tokens
        size -= max(len(tokens) - room, 1)
    raise ValueError(f"a context of {room} tokens has no room for a question; take a larger S")
