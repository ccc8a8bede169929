"""RULER's 13 tasks: answers are recomputed from the prompt, and forms are NVIDIA's."""

import json
import re
from collections import Counter

import pytest

import jspec
from jspec.eval import ruler
from jspec.eval.fitting import ruler_questions
from jspec.eval.jsonl import read_questions
from jspec.eval.questions import Question, encoded, score, tokenized_questions
from jspec.eval.ruler_documents import read_documents
from jspec.models.chat import ChatTemplate
from tests.models import tokenizers

LENGTH = 16384
SYNTHETIC = [task for task in ruler.TASKS if task not in ruler.QA]
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    {},
    "a test",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Of several bytes a token, which has spaces at the start of words."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    return jspec.load_tokenizer(folder)


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Files in the forms of SQuAD and HotpotQA."""
    folder = tmp_path_factory.mktemp("qa")
    articles = []
    for article in range(4):
        paragraphs = []
        for part in range(5):
            fact = f"Fact {article}{part} is number-{article}{part}. " + "It is so. " * 20
            asked = {"question": f"What is fact {article}{part}?", "is_impossible": False}
            answers = [{"text": f"number-{article}{part}"}, {"text": f"{article}{part}"}]
            never = {"question": "What is not?", "is_impossible": True, "answers": []}
            paragraphs.append({"context": fact, "qas": [never, asked | {"answers": answers}]})
        articles.append({"title": str(article), "paragraphs": paragraphs})
    squad = folder / "squad.json"
    squad.write_text(json.dumps({"version": "v2.0", "data": articles}))
    items = [
        {
            "question": f"Who wrote book {item}?",
            "answer": f"writer-{item}",
            "context": [
                [f"Book {item}", [f"Book {item} is by writer-{item}.", " It is long."]],
                [f"Shelf {item}", ["It holds books. " * 30]],
            ],
        }
        for item in range(8)
    ]
    hotpotqa = folder / "hotpotqa.json"
    hotpotqa.write_text(json.dumps(items))
    return dict(map(read_documents, (squad, hotpotqa)))


def words_in(text: str) -> Counter:
    return Counter(re.findall(r"\d+\. (\S+)", text))


def solve(task: str, question: Question) -> set[str]:
    """The answers, from the prompt alone."""
    prompt = question.prompt
    if task.startswith("niah"):
        facts = re.findall(
            r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", prompt
        )
        asked = prompt[prompt.rindex("\n") :]
        return {value for key, value in facts if re.search(rf"\b{key}\b(?!-)", asked)}
    if task == "vt":
        own = prompt[prompt.rindex("Memorize and track") :]
        (value,) = re.findall(r"assigned the value (\d{5}) in the text above", own)
        names = set()
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", own):
            if source == value or source in names:
                names.add(name)
        return names
    if task == "cwe":
        counts = words_in(prompt[prompt.rindex("Below is a numbered list") :])
        return {word for word, _ in counts.most_common(10)}
    body = prompt.partition("coded words. ")[2].partition("\nQuestion")[0]
    counts = Counter(word for word in body.split() if word != "...")
    return {word for word, _ in counts.most_common(3)}


@pytest.mark.parametrize("task", SYNTHETIC)
def test_answers_follow_from_the_prompt(task, tokenizer):
    first, second = ruler_questions(tokenizer, [task], LENGTH, 2, seed=5)
    for asked in (first, second):
        question = asked.question
        assert question.task == task
        assert set(question.answers) == solve(task, question)
        assert LENGTH * 0.98 < len(asked.prompt) + asked.room <= LENGTH
        assert score(question, " " + "\n".join(question.answers)) == 1
    assert first.question.answers != second.question.answers
    assert ruler_questions(tokenizer, [task], LENGTH, 1, seed=6)[0] == second


# Of NVIDIA's synthetic.yaml and constants.py: values a needle, needles, and tokens of an answer.
NIAH = {
    "niah_single_1": (1, 1),
    "niah_single_2": (1, 1),
    "niah_single_3": (1, 1),
    "niah_multikey_1": (1, 4),
    "niah_multivalue": (4, 4),
    "niah_multiquery": (4, 4),
}


def test_the_forms_are_those_of_nvidia(tokenizer):
    asked = {x.question.task: x for x in ruler_questions(tokenizer, SYNTHETIC, LENGTH, 1)}
    for task, (answers, needles) in NIAH.items():
        question = asked[task].question
        assert len(question.answers) == answers
        assert question.prompt.count("One of the special magic") == needles
    rooms = {task: x.room for task, x in asked.items()}
    assert (rooms["vt"], rooms["cwe"], rooms["fwe"], rooms["niah_single_1"]) == (30, 120, 50, 128)
    assert asked["niah_multikey_2"].question.prompt.count("One of the special magic") > 100
    one, many = (asked[x].question for x in ("niah_single_3", "niah_multiquery"))
    assert one.prompt.startswith("A special magic uuid is hidden within the following text. Make")
    assert re.search(
        r"\nWhat is the special magic uuid for \S+ mentioned in the provided", one.prompt
    )
    assert re.fullmatch(
        r" The special magic uuid for \S+ mentioned in the provided text is", one.answer_prefix
    )
    keys = r"\S+, \S+, \S+, and \S+"
    assert many.prompt.startswith("Some special magic numbers are hidden within the following")
    assert re.search(rf"\nWhat are all the special magic numbers for {keys} mentioned", many.prompt)
    assert re.fullmatch(
        rf" The special magic numbers for {keys} mentioned in the provided text are",
        many.answer_prefix,
    )
    shot, _, own = asked["vt"].question.prompt.partition("\n\nMemorize")
    assert re.search(
        r"5 variables are assigned the value \d{5}, they are:  (\w{3} ){4}\w{3}$", shot
    )
    assert len(re.findall(r"VAR [A-Z]{5} = ", own)) == 5
    assert asked["vt"].question.answer_prefix.endswith(
        "5 variables are assigned the value "
        + (re.findall(r"the value (\d+) in", own)[0] + ", they are: ")
    )
    listed = words_in(asked["cwe"].question.prompt.rpartition("Below is")[2])
    assert Counter(listed.values())[30] == 10
    assert set(listed.values()) == {3, 30}
    (short,) = ruler_questions(tokenizer, ["cwe"], 4000, 1)
    listed = words_in(short.question.prompt.rpartition("Below is")[2])
    assert Counter(listed.values())[6] == 10
    assert set(listed.values()) == {1, 6}


@pytest.mark.parametrize("task", ruler.QA)
def test_documents_hold_the_answer_once_or_repeat(task, documents, tokenizer):
    for length in (1500, 6000):
        for asked in ruler_questions(tokenizer, [task], length, 3, documents=documents):
            question = asked.question
            assert (asked.room, question.metric) == (32, "contains")
            assert len(asked.prompt) + asked.room <= length
            number = re.findall(r"(\d+)\?$", question.prompt)[0]
            assert question.answers[0] == f"{'number' if task == 'qa_1' else 'writer'}-{number}"
            assert f"{question.answers[0]}." in question.prompt
            assert re.search(r"\n\nDocument 2:\n", question.prompt)
            assert question.prompt.startswith("Answer the question based on the given documents.")
            assert question.answer_prefix == " Answer:"
            assert score(question, question.answers[-1]) == 1


def test_files_that_have_no_questions_are_refused(tmp_path):
    file = tmp_path / "qa.json"
    for text, message in (
        ("{}", "must be SQuAD's object with 'data', or HotpotQA's list"),
        ("[]", "has no questions with answers"),
        ('[{"question": 1, "answer": "x", "context": []}]', "is neither SQuAD's nor"),
        ('{"data": [{"paragraphs": 3}]}', "is neither SQuAD's nor"),
        ('{"data"', "is not valid JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"qa\.json") as error:
            read_documents(file)
        assert message in str(error.value)


@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["base", "chat"])
def test_a_prompt_ends_without_a_space(template, tokenizer):
    """The answer brings its own, as the words of most vocabularies do."""
    for task in SYNTHETIC:
        (asked,) = ruler_questions(tokenizer, [task], 8192, 1, template=template)
        text, question = tokenizer.decode(asked.prompt), asked.question
        prefix = question.answer_prefix.rstrip(" ")
        user = question.prompt if template is None else f"<user>{question.prompt}</user><assistant>"
        assert text == user + prefix
        assert not text.endswith(" ")


def test_a_file_s_prompt_gets_the_template_where_its_benchmark_has_one(tokenizer, tmp_path):
    few = {"input": "Type:", "context": "x", "answers": ["a"], "dataset": "trec"}
    lines = [few | {"all_classes": ["a"]}, few | {"dataset": "passage_count"}]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, lines)))
    trec, count = read_questions(tmp_path / "own.jsonl")
    decode = tokenizer.decode
    assert decode(encoded(tokenizer, trec, TEMPLATE)) == trec.prompt
    chat = f"<user>{count.prompt}</user><assistant>"
    assert decode(encoded(tokenizer, count, TEMPLATE)) == chat
    assert decode(encoded(tokenizer, count)) == count.prompt.removesuffix(" ")


def test_the_middle_of_a_chat_is_left_out_and_not_its_template(tokenizer):
    text = " ".join(map(str, range(500)))
    question = Question("t", text, ("y",), answer_prefix=" So:")
    (asked,) = tokenized_questions(tokenizer, [question], 200, 20, TEMPLATE)
    shown = tokenizer.decode(asked.prompt)
    assert shown.startswith("<user>0 1 2")
    assert shown.endswith(" 498 499</user><assistant> So:")
    assert 170 < len(asked.prompt) <= 180
    with pytest.raises(ValueError, match="too few for the chat template"):
        tokenized_questions(tokenizer, [question], 25, 20, TEMPLATE)
