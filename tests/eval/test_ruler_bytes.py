"""RULER-kind tasks: answers are recomputed from the text by a parser of the test's own."""

import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.eval import ruler_bytes
from jspec.eval.ruler_bytes_streams import ADJECTIVES, MAX_ASK_BYTES, MAX_LINE_BYTES, NOUNS

LENGTHS = st.integers(ruler_bytes.MIN_LENGTH, 6000)
SEEDS = st.integers(0, 2**32 - 1)


def solve(text: str) -> list[str]:
    """The answers to the question at the end of ``text``, from the lines before it."""
    evidence, _, question = text.rpartition("Question: ")
    if key := re.match(r"What is the access code of ([a-z-]+)\?", question):
        return re.findall(rf"^The access code of {key[1]} is (\d{{7}})\.$", evidence, re.M)
    if key := re.match(r"Where does record ([0-9a-f-]{36}) point\?", question):
        return re.findall(rf"^Record {key[1]} points to ([0-9a-f-]{{36}})\.$", evidence, re.M)
    if key := re.match(r"Which names hold (\d{5})\?", question):
        moves = re.findall(r"^Put (\w{5}) into ([A-Z]{5})\.$", evidence, re.M)
        holders = [key[1]]
        for source, target in moves:
            if source in holders:
                holders.append(target)
        return holders[1:]
    key = re.search(r"in (log|list) ([a-z-]+)\?", question)
    assert key is not None
    rows = re.findall(rf"^{key[1].title()} {key[2]}: (.*)$", evidence, re.M)
    counts = Counter(" ".join(rows).split())
    top = [word for word, _ in counts.most_common(3 if key[1] == "log" else 10)]
    return top if key[1] == "log" else sorted(top)


@pytest.mark.parametrize("name", ruler_bytes.TASKS)
@settings(max_examples=25, deadline=None)
@given(length=LENGTHS, seed=SEEDS)
def test_answers_follow_from_the_prompt(name, length, seed):
    example = ruler_bytes.make_task(name, length, seed)
    assert len(example.prompt) + len(example.answer) <= length
    assert solve(example.prompt.decode()) == [answer.decode() for answer in example.answers]


@pytest.mark.parametrize("name", ruler_bytes.TASKS)
def test_long_examples_fill_their_length(name):
    example = ruler_bytes.make_task(name, 32768, 0)
    assert 32768 - 2 * MAX_ASK_BYTES < len(example.prompt) + len(example.answer) <= 32768
    assert solve(example.prompt.decode()) == [answer.decode() for answer in example.answers]


@pytest.mark.parametrize("name", ruler_bytes.TASKS)
def test_examples_are_deterministic_and_differ_by_seed(name):
    assert ruler_bytes.make_task(name, 2048, 7) == ruler_bytes.make_task(name, 2048, 7)
    assert ruler_bytes.make_task(name, 2048, 7) != ruler_bytes.make_task(name, 2048, 8)


@pytest.mark.parametrize("name", ["single_needle", "multikey_uuids"])
def test_needles_lie_at_all_depths(name):
    depths = []
    for seed in range(200):
        example = ruler_bytes.make_task(name, 4096, seed)
        depths.append(example.prompt.index(example.answer) / len(example.prompt))
    share, _ = np.histogram(depths, bins=4, range=(0, 1))
    assert share.min() >= 25  # of 50 expected; p < 1e-5 for a uniform depth


@settings(max_examples=100, deadline=None)
@given(length=st.integers(ruler_bytes.MIN_LENGTH // 2, 8000), seed=SEEDS)
def test_training_answers_follow_from_the_text_before(length, seed):
    text, spans = ruler_bytes.training_document(length, np.random.default_rng(seed))
    assert len(text) <= length
    assert spans == sorted(spans)
    asked = set()
    for start, end in spans:
        assert solve(text[:start].decode()) == text[start:end].decode().split(" ")
        assert text[end : end + 2] == b".\n"
        question = text[:start].rpartition(b"Question: ")[2]
        assert question not in asked
        asked.add(question)


def test_training_documents_cover_all_kinds_and_often_end_with_a_question():
    rng = np.random.default_rng(0)
    documents = [ruler_bytes.training_document(16384, rng) for _ in range(60)]
    asked = b"".join(text for text, _ in documents)
    for form in (b"What is", b"Where does", b"Which names", b"Which three", b"Which ten"):
        assert asked.count(b"Question: " + form) >= 20
    assert sum(bool(spans) and spans[-1][1] + 2 == len(text) for text, spans in documents) >= 55
    assert np.mean([len(spans) for _, spans in documents]) >= 24
    assert min(len(text) for text, _ in documents) > 15000


def test_question_forms_are_those_of_training():
    rng = np.random.default_rng(1)
    trained = b"".join(ruler_bytes.training_document(16384, rng)[0] for _ in range(40)).decode()

    def form(question: str) -> str:
        return re.sub(
            r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{5}|[a-z]+-[a-z]+", "#", question
        )

    forms = set(map(form, re.findall(r"Question: .*\nAnswer: .*? (?:is|to|are) ", trained)))
    for name in ruler_bytes.TASKS:
        question = ruler_bytes.make_task(name, 4096, 0).prompt.decode().rpartition("Question: ")
        assert form("".join(question[1:])) in forms


def test_bounds_on_lines_and_questions_hold():
    rng = np.random.default_rng(2)
    longest = 0
    for _ in range(60):
        text, _ = ruler_bytes.training_document(8192, rng)
        for match in re.finditer(rb"Question: .*\nAnswer: .*\n", text):
            longest = max(longest, len(match[0]))
        listed = [line for line in text.splitlines(keepends=True) if line[:3] in (b"Log", b"Lis")]
        assert all(len(line) <= MAX_LINE_BYTES for line in listed)
    name = max(map(len, ADJECTIVES)) + 1 + max(map(len, NOUNS))
    assert longest <= MAX_ASK_BYTES
    assert (
        len("Question: Which ten words are most common in list ?\n")
        + 2 * name
        + len("Answer: The ten most common words in list  are .\n")
        + 69
        <= MAX_ASK_BYTES
    )
    assert len("List : ") + name + 8 * 7 <= MAX_LINE_BYTES


def test_a_custom_filler_is_the_haystack():
    def filler(rng, size):
        return b"x = 1\n" * (size // 6)

    example = ruler_bytes.make_task("single_needle", 2048, 0, filler)
    assert example.prompt.count(b"x = 1\n") > 200
    text, _ = ruler_bytes.training_document(4096, np.random.default_rng(5), filler)
    assert not any(sentence in text for sentence in ruler_bytes.SENTENCES)


def test_unknown_names_and_short_lengths_are_refused():
    with pytest.raises(ValueError, match="multikey_words"):
        ruler_bytes.make_task("niah", 2048, 0)
    with pytest.raises(ValueError, match="at least 1024"):
        ruler_bytes.make_task("single_needle", 1023, 0)
    with pytest.raises(ValueError, match="at least 512"):
        ruler_bytes.training_document(100, np.random.default_rng(0))


def test_no_jax_is_imported_by_the_tasks():
    code = (
        "import sys, importlib.util as u\n"
        "import jspec.eval.ruler_bytes as r, jspec.eval.ruler_bytes_streams as s\n"
        "assert not any('jax' in vars(m) for m in (r, s))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
