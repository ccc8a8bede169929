"""RULER's questions, as long as a number of tokens allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from jspec.eval import ruler, ruler_bytes
from jspec.eval.questions import Asked, Question, encoded
from jspec.eval.ruler_documents import Documents
from jspec.models.chat import ChatTemplate
from jspec.models.tokenizer import Tokenizer

SLACK = 16  # tokens of an answer beyond those of the expected one, in `ruler_bytes`
_TRIES = 12
_CLOSE = 64  # a prompt is long enough when it lacks less than this part of its length


def ruler_questions(
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    length: int,
    examples: int,
    seed: int = 0,
    *,
    documents: Mapping[str, Documents] | None = None,
    template: ChatTemplate | None = None,
) -> list[Asked]:
    """Create examples of RULER's tasks.

    Args:
        tokenizer: the model's tokenizer.
        tasks: names of `jspec.eval.ruler.TASKS`.
        length: the most tokens of a prompt with its answer.
        examples: examples of each task.
        seed: number of the first example; the next ones follow it.
        documents: of qa_1 and qa_2, by task.
        template: the model's chat template; None for a model without one.

    Raises:
        ValueError: ``length`` is too short for a task, or a task lacks its documents.
    """
    documents = dict(documents or {})
    for task in tasks:
        if task in ruler.QA and task not in documents:
            raise ValueError(f"{task} needs --qa with the file of SQuAD (qa_1) or HotpotQA (qa_2)")
    shot_size = _shot_size(tokenizer) if "vt" in tasks else 0

    def maker(task: str, number: int) -> Callable[[int], Asked]:
        scope = ruler.Scope(length, number, shot_size, documents)

        def make(size: int) -> Asked:
            question = ruler.make_question(task, size, scope)
            room = question.max_new_tokens or 0
            return Asked(question, encoded(tokenizer, question, template), room)

        return make

    pairs = [(task, number) for task in tasks for number in range(seed, seed + examples)]
    makers = [maker(task, number) for task, number in pairs]
    leasts = [ruler.TASKS[task].least for task, _ in pairs]
    shortest = [make(least) for make, least in zip(makers, leasts, strict=True)]
    if shortest and _tokens(longest := max(shortest, key=_tokens)) > length:
        message = _too_short(length, longest)
        if tokenizer.byte_level:
            message += "; ruler-bytes has tasks for byte-level tokenizers"
        raise ValueError(message)
    return [
        _longest(make, least, first, length)
        for make, least, first in zip(makers, leasts, shortest, strict=True)
    ]


def _shot_size(tokenizer: Tokenizer) -> int:
    """Lines of noise in the worked example of variable tracking."""
    size = ruler.SHOT_LEAST
    while len(tokenizer.encode(ruler.shot(random.Random(0), size + 1))) <= ruler.SHOT_TOKENS:
        size += 1
    return size


def _longest(make: Callable[[int], Asked], least: int, best: Asked, length: int) -> Asked:
    """The longest of what ``make(size)`` returns that has at most ``length`` tokens, or nearly.

    ``best`` is ``make(least)``, which fits. Tokens grow about linearly with the size, so that a few
    interpolations find it.
    """
    low, tokens = least, _tokens(best)
    high, slope = None, tokens / least
    for _ in range(_TRIES):
        if length - tokens < length // _CLOSE or (high is not None and high - low <= 1):
            break
        size = low + max(int((length - tokens) / slope), 1)
        if high is not None:
            size = min(size, high - 1)
        trial = make(size)
        count = _tokens(trial)
        # Where documents differ in length, a larger example may be shorter.
        slope = max((count - tokens) / (size - low), count / size / 4)
        if count <= length:
            best, low, tokens = trial, size, count
        else:
            high = size
    return best


def ruler_bytes_questions(
    tokenizer: Tokenizer, tasks: Sequence[str], length: int, examples: int, seed: int = 0
) -> list[Asked]:
    """Create examples of the tasks that the bundled model was trained for.

    Args:
        tokenizer: the model's tokenizer.
        tasks: names of `jspec.eval.ruler_bytes.TASKS`.
        length: the most tokens of a prompt with its answer.
        examples: examples of each task.
        seed: seed of the first example; the next ones take the seeds after it.

    Raises:
        ValueError: ``length`` is too short for a task.
    """

    def asked(task: str, each: int) -> Asked:
        def make(size: int) -> Question:
            return _bytes_question(task, ruler_bytes.make_task(task, size, each))

        return fitted(tokenizer, length, make)

    return [asked(task, each) for task in tasks for each in range(seed, seed + examples)]


def needle_question(tokenizer: Tokenizer, length: int, depth: float, seed: int) -> Asked:
    """A single needle at a ``depth`` in [0, 1] of its haystack, of at most ``length`` tokens."""

    def make(size: int) -> Question:
        return _bytes_question("single_needle", ruler_bytes.needle(size, depth, seed))

    return fitted(tokenizer, length, make)


def shortest_needle(tokenizer: Tokenizer, depth: float, seed: int) -> int:
    """The fewest tokens that `needle_question` can take, with the answer."""
    prompt = ruler_bytes.needle(ruler_bytes.MIN_LENGTH, depth, seed)
    asked = _asked(tokenizer, _bytes_question("single_needle", prompt))
    return _tokens(asked)


def fitted(tokenizer: Tokenizer, length: int, make: Callable[[int], Question]) -> Asked:
    """Find the longest question that with its answer takes at most ``length`` tokens.

    Args:
        tokenizer: the model's tokenizer.
        length: limit in tokens, approached from below.
        make: ``make(size)`` creates a question of at most ``size`` bytes.

    Raises:
        ValueError: the shortest question is too long.
    """
    trial = make(max(length, ruler_bytes.MIN_LENGTH)).prompt
    size = length * len(trial) // len(tokenizer.encode(trial))
    for _ in range(_TRIES):
        if size <= ruler_bytes.MIN_LENGTH:
            break
        asked = _asked(tokenizer, make(size))
        over = _tokens(asked) - length
        if over <= 0:
            return asked
        size -= over * len(asked.question.prompt) // len(asked.prompt) + 1
    shortest = _asked(tokenizer, make(ruler_bytes.MIN_LENGTH))
    if _tokens(shortest) > length:
        raise ValueError(_too_short(length, shortest))
    return shortest


def _tokens(asked: Asked) -> int:
    """Tokens of a prompt with its answer."""
    return len(asked.prompt) + asked.room


def _too_short(length: int, shortest: Asked) -> str:
    return (
        f"length={length} tokens are too few for {shortest.question.task}, of which a question "
        f"takes {_tokens(shortest)} at least; raise the length (--length) or choose other tasks "
        "(--only)"
    )


def _asked(tokenizer: Tokenizer, question: Question) -> Asked:
    """As tokens; the bundled model was trained on prompts that end in a space."""
    text = question.prompt
    prompt = tokenizer.encode(text) if tokenizer.byte_level else encoded(tokenizer, question)
    room = len(tokenizer.encode(" ".join(question.answers), special=False)) + SLACK
    return Asked(question, prompt, room)


def _bytes_question(task: str, example: ruler_bytes.Example) -> Question:
    answers = tuple(answer.decode() for answer in example.answers)
    return Question(task, example.prompt.decode(), answers, chat=False, one_line=True)
