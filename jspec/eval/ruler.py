"""The 13 tasks of RULER (Hsieh et al. 2024), with NVIDIA's prompts, settings and answer lengths.

Two sources differ. Essays and words are from Python's language reference, which every installation
has (`pydoc_data.topics`), so that examples depend on the version of Python. Questions of qa_1 and
qa_2 are from a file that the user gives, SQuAD's or HotpotQA's. No JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
import re
import string
import uuid
from collections.abc import Callable, Sequence

from jspec.eval.questions import Question
from jspec.eval.ruler_bytes_streams import ADJECTIVES
from jspec.eval.ruler_documents import Documents


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the tasks of a kind share.

    Attributes:
        template: of the prompt.
        answer_prefix: with which the answer begins.
        max_new_tokens: tokens of an answer.
        marker: text that only prompts of this kind have.
        metric: a name of `jspec.eval.metrics.METRICS`.
    """

    template: str
    answer_prefix: str
    max_new_tokens: int
    marker: str
    metric: str = "recall"


_ONLY = "Only give me the answer and do not output any other words."
KINDS = {
    "niah": Kind(
        "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the {type} afterwards.\n{context}\nWhat are all the special magic "
        "{type} for {query} mentioned in the provided text?",
        " The special magic {type} for {query} mentioned in the provided text are",
        128,
        "special magic",
    ),
    "variable_tracking": Kind(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "{context}\nQuestion: Find all variables that are assigned the value {query} in the text "
        "above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {number} "
        "variables are assigned the value {query}, they are: ",
        30,
        "chain(s) of variable assignment",
    ),
    "common_words_extraction": Kind(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most "
        "common words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        120,
        "Below is a numbered list of words.",
    ),
    "freq_words_extraction": Kind(
        "Read the following coded text and track the frequency of each coded word. Find the three "
        "most frequently appeared coded words. {context}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
        "track the frequency of each coded word",
    ),
    "qa": Kind(
        f"Answer the question based on the given documents. {_ONLY}\n\nThe following are given "
        "documents.\n\n{context}\n\nAnswer the question based on the given documents. "
        f"{_ONLY}\n\nQuestion: {{query}}",
        " Answer:",
        32,
        "Answer the question based on the given documents.",
        "contains",
    ),
}
# Of the lines of NVIDIA's files.
FIELDS = {
    *("index", "input", "outputs", "length", "length_w_model_temp"),
    *("answer_prefix", "token_position_answer"),
}
NEEDLE = "One of the special magic {type} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DEPTHS = [round(100 * at / 39) for at in range(40)]  # percent of the sentences
ZETA_2 = math.pi**2 / 6  # zeta(2)
SHORT = 4096  # tokens below which lists of words are smaller
SHOT_TOKENS, SHOT_LEAST = 500, 5  # most tokens, least lines, of variable tracking's example


@dataclasses.dataclass(frozen=True)
class Scope:
    """What an example depends on, its random numbers and its size apart.

    Attributes:
        length: tokens of a prompt with its answer.
        seed: number of the example.
        shot_size: noise lines of the worked example of variable tracking.
        documents: questions and documents of qa_1 and qa_2, by task.
    """

    length: int
    seed: int
    shot_size: int
    documents: dict[str, Documents]


Maker = Callable[[random.Random, int, Scope], Question]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task: ``make(rng, size, scope)`` creates an example, ``least`` is the smallest size."""

    make: Maker
    least: int


def kind_of(prompt: str, answer_prefix: str) -> Kind | None:
    """The kind of a prompt from one of NVIDIA's files; None where it is of another origin."""
    if answer_prefix.strip() == "Answer:" and "Answer the question" in prompt:
        return KINDS["qa"]
    return next((kind for kind in KINDS.values() if kind.marker in prompt), None)


def make_question(task: str, size: int, scope: Scope) -> Question:
    """Create an example; the same arguments give the same example.

    Args:
        task: a name of `TASKS`.
        size: words (essays, cwe, fwe), lines (other haystacks) or documents (qa).
        scope: what else it depends on.
    """
    rng = random.Random(f"{task} {scope.seed}")
    return dataclasses.replace(TASKS[task].make(rng, size, scope), task=task)


def _question(kind: str, answers: Sequence[str], **values: object) -> Question:
    parts = KINDS[kind]
    template, prefix = parts.template, parts.answer_prefix
    if kind == "niah" and len(answers) == 1:
        template, prefix = _singular(template), _singular(prefix)
        values["type"] = str(values["type"]).removesuffix("s")
    return Question(
        *("", template.format(**values), tuple(answers), parts.metric),
        answer_prefix=prefix.format(**values),
        max_new_tokens=parts.max_new_tokens,
    )


def _singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


@functools.cache
def essay() -> list[str]:
    """The words of Python's language reference, in its order by topic."""
    from pydoc_data.topics import topics

    return " ".join(topics[name] for name in sorted(topics)).split()


@functools.cache
def words() -> list[str]:
    """The different words of `essay`, of four letters or more."""
    return sorted(set(re.findall(r"\b[a-z]{4,}\b", " ".join(essay()))))


def _pairs(rng: random.Random, count: int) -> list[str]:
    """Different keys such as ``silent-module``."""
    nouns = words()
    numbers = rng.sample(range(len(ADJECTIVES) * len(nouns)), count)
    return [f"{ADJECTIVES[x // len(nouns)]}-{nouns[x % len(nouns)]}" for x in numbers]


def _values(rng: random.Random, kind: str, count: int) -> list[str]:
    if kind == "words":
        return _pairs(rng, count)
    if kind == "numbers":
        return [str(rng.randint(10**6, 10**7 - 1)) for _ in range(count)]
    return [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(count)]


def _niah(
    haystack: str, keys: str, values: str, num_keys: int = 1, num_values: int = 1, queries: int = 1
) -> Task:
    """Needles in a haystack.

    Args:
        haystack: ``essay``, ``noise`` or ``needle``.
        keys: type of the keys: ``words`` or ``uuids``.
        values: type of the values: ``numbers`` or ``uuids``.
        num_keys: keys in the text.
        num_values: values of each key.
        queries: keys that are asked about.
    """
    num_keys = max(num_keys, queries)

    def make(rng: random.Random, size: int, scope: Scope) -> Question:
        lines = size if haystack == "needle" else 0
        names = _values(rng, keys, num_keys)
        by_key = [_values(rng, values, num_values) for _ in names]
        needles = [
            NEEDLE.format(type=values, key=key, value=value)
            for key, each in zip(names, by_key, strict=True)
            for value in each
        ]
        rng.shuffle(needles)
        asked = rng.sample(range(num_keys), queries)
        if haystack == "essay":
            context = _in_essay(rng, needles, size)
        else:
            others = _others(rng, keys, lines, set(names))
            text = [
                NEEDLE.format(type=values, key=key, value=value)
                for key, value in zip(others, _values(rng, values, lines), strict=True)
            ]
            context = _in_lines(rng, needles, text or [NOISE] * size)
        query = ", and ".join(
            x for x in (", ".join(names[i] for i in asked[:-1]), names[asked[-1]]) if x
        )
        answers = [value for i in asked for value in by_key[i]]
        return _question("niah", answers, type=values, context=context, query=query)

    return Task(make, 8)


def _others(rng: random.Random, keys: str, count: int, used: set[str]) -> list[str]:
    return [key for key in _values(rng, keys, count + len(used)) if key not in used][:count]


def _in_essay(rng: random.Random, needles: Sequence[str], size: int) -> str:
    source = essay()
    text = " ".join((source * (size // len(source) + 1))[:size])
    sentences = re.split(r"(?<=[.!?])\s+", text)
    places = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(needles)))
    parts, start = [], 0
    for place, needle in zip(places, needles, strict=True):
        parts += [*sentences[start:place], needle]
        start = place
    return " ".join(parts + sentences[start:])


def _in_lines(rng: random.Random, needles: Sequence[str], lines: list[str]) -> str:
    """Put each needle before a line of its own; their order is that of ``needles`` reversed."""
    places = sorted(rng.sample(range(len(lines)), len(needles)), reverse=True)
    for place, needle in zip(places, needles, strict=True):
        lines.insert(place, needle)
    return "\n".join(lines)


def _chain(rng: random.Random, size: int, letters: int) -> Question:
    """A number and five variables that it is assigned to, one from the other."""
    hops = 4
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        names += [] if name in names else [name]
    value = rng.randrange(10000, 99999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    lines = [NOISE] * size
    for moved, place in enumerate(sorted(rng.sample(range(size), len(chain)))):
        lines.insert(place + moved, chain[moved])
    settings = {"context": "\n".join(lines), "query": value, "number": hops + 1}
    return _question("variable_tracking", names, **settings)


def shot(rng: random.Random, size: int) -> str:
    """A worked example of variable tracking with ``size`` lines of noise."""
    made = _chain(rng, size, letters=3)
    return f"{made.prompt}{made.answer_prefix} {' '.join(made.answers)}\n"


def _variable_tracking(rng: random.Random, size: int, scope: Scope) -> Question:
    example = shot(rng, scope.shot_size)
    made = _chain(rng, size, letters=5)
    return dataclasses.replace(made, prompt=f"{example}\n{made.prompt}")


def _word_list(rng: random.Random, size: int, common: int, uncommon: int) -> Question:
    """A numbered list of words, ten of which come ``common`` times and the others ``uncommon``."""
    pool = words()
    drawn = rng.sample(pool, size) if size <= len(pool) else _pairs(rng, size)
    listed = drawn[:10] * common + drawn[10:] * uncommon
    rng.shuffle(listed)
    context = " ".join(f"{number}. {word}" for number, word in enumerate(listed, start=1))
    return _question("common_words_extraction", drawn[:10], context=context)


def _common_words(rng: random.Random, size: int, scope: Scope) -> Question:
    small = scope.length < SHORT
    shot = _word_list(rng, 20, 3, 1) if small else _word_list(rng, 40, 10, 3)
    made = _word_list(rng, size, 6, 1) if small else _word_list(rng, size, 30, 3)
    answer = " ".join(f"{number}. {word}" for number, word in enumerate(shot.answers, start=1))
    prompt = f"{shot.prompt}{shot.answer_prefix} {answer}\n{made.prompt}"
    return dataclasses.replace(made, prompt=prompt)


def _frequent_words(rng: random.Random, size: int, scope: Scope) -> Question:
    """Words of six letters by a zeta law with exponent 2, the most frequent written as dots."""
    count = max((scope.length - KINDS["freq_words_extraction"].max_new_tokens) // 50, 4)
    coded: set[str] = set()
    while len(coded) < count:
        coded.add("".join(rng.choices(string.ascii_lowercase, k=6)))
    vocabulary = sorted(coded)
    rng.shuffle(vocabulary)
    vocabulary[0] = "..."
    listed = [
        word
        for rank, word in enumerate(vocabulary, start=1)
        for _ in range(int(size * rank**-2.0 / ZETA_2))
    ]
    rng.shuffle(listed)
    return _question("freq_words_extraction", vocabulary[1:4], context=" ".join(listed))


def _documents(task: str) -> Task:
    def make(rng: random.Random, size: int, scope: Scope) -> Question:
        query, answers, texts = scope.documents[task].example(rng, scope.seed, size)
        context = "\n\n".join(f"Document {at}:\n{text}" for at, text in enumerate(texts, start=1))
        return _question("qa", answers, context=context, query=query)

    return Task(make, 1)


QA = ("qa_1", "qa_2")  # SQuAD's and HotpotQA's questions
TASKS = {
    "niah_single_1": _niah("noise", "words", "numbers"),
    "niah_single_2": _niah("essay", "words", "numbers"),
    "niah_single_3": _niah("essay", "words", "uuids"),
    "niah_multikey_1": _niah("essay", "words", "numbers", num_keys=4),
    "niah_multikey_2": _niah("needle", "words", "numbers"),
    "niah_multikey_3": _niah("needle", "uuids", "uuids"),
    "niah_multivalue": _niah("essay", "words", "numbers", num_values=4),
    "niah_multiquery": _niah("essay", "words", "numbers", queries=4),
    "vt": Task(_variable_tracking, 8),
    "cwe": Task(_common_words, 12),
    "fwe": Task(_frequent_words, 100),
    **{task: _documents(task) for task in QA},
}
