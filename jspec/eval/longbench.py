"""The prompts, answer lengths and metrics of LongBench and LongBench-v2 (Bai et al. 2023, 2024).

The prompts are the benchmarks' own, published under the MIT licence with their data sets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jspec.checks import shown
from jspec.eval.metrics import CHINESE, PARAGRAPH, PARAGRAPH_ZH, check_jieba
from jspec.eval.questions import Question
from jspec.models.files import Fields


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A data set of LongBench.

    Attributes:
        prompt: the template, with ``{context}`` and ``{input}``.
        max_new_tokens: tokens of an answer.
        metric: a name of `jspec.eval.metrics.METRICS`.
        chat: whether a chat template applies.
        one_line: whether only the first line of an answer counts.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    chat: bool = True
    one_line: bool = False


_BRIEFLY = "as concisely as you can, using a single phrase{} if possible.{} Do not provide any "
_BRIEFLY += "explanation."
_STORY = _BRIEFLY.format("", "")
_ARTICLE = _BRIEFLY.format(
    " or sentence",
    " If the question cannot be answered based on the information in the article, write "
    '"unanswerable". If the question is a yes/no question, answer "yes", "no", or "unanswerable".',
)
_ONLY = "Only give me the answer and do not output any other words."
_PASSAGES = (
    f"Answer the question based on the given passages. {_ONLY}\n\nThe following are given passages."
    f"\n{{context}}\n\nAnswer the question based on the given passages. {_ONLY}\n\n"
    "Question: {input}\nAnswer:"
)
_CODE = "Please complete the code given below. \n{context}%sNext line of code:\n"

DATASETS = {
    "narrativeqa": Dataset(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {_STORY}\n\nStory: {{context}}\n\nNow, answer the question based on "
        f"the story {_STORY}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        "f1",
    ),
    "qasper": Dataset(
        f"You are given a scientific article and a question. Answer the question {_ARTICLE}\n\n"
        "Article: {context}\n\n Answer the question based on the above article "
        f"{_ARTICLE}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
        "f1",
    ),
    "multifieldqa_en": Dataset(
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following "
        "question based on the above text, only give me the answer and do not output any other "
        "words.\n\nQuestion: {input}\nAnswer:",
        64,
        "f1",
    ),
    "multifieldqa_zh": Dataset(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n现在请基于上面的文章回答下面的问题，只告诉我答案，"
        "不要输出任何其他字词。\n\n问题：{input}\n回答：",
        64,
        "f1_zh",
    ),
    "hotpotqa": Dataset(_PASSAGES, 32, "f1"),
    "2wikimqa": Dataset(_PASSAGES, 32, "f1"),
    "musique": Dataset(_PASSAGES, 32, "f1"),
    "dureader": Dataset(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n请基于上述文章回答下面的问题。\n\n"
        "问题：{input}\n回答：",
        128,
        "rouge_l_zh",
    ),
    "gov_report": Dataset(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "qmsum": Dataset(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\nNow, answer the "
        "query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        512,
        "rouge_l",
    ),
    "multi_news": Dataset(
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n"
        "{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge_l",
    ),
    "vcsum": Dataset(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n{context}\n\n会议总结：",
        512,
        "rouge_l_zh",
    ),
    "trec": Dataset(
        "Please determine the type of the question below. Here are some examples of questions.\n\n"
        "{context}\n{input}",
        *(64, "classification", False, True),
    ),
    "triviaqa": Dataset(
        f"Answer the question based on the given passage. {_ONLY} The following are some examples."
        "\n\n{context}\n\n{input}",
        *(32, "f1", False, True),
    ),
    "samsum": Dataset(
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"
        "{context}\n\n{input}",
        *(128, "rouge_l", False, True),
    ),
    "lsht": Dataset(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        *(64, "classification", False, True),
    ),
    "passage_count": Dataset(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. "
        "Please carefully read these paragraphs and determine how many unique paragraphs there are "
        "after removing duplicates. In other words, how many non-repeating paragraphs are there in "
        "total?\n\n{context}\n\nPlease enter the final count of unique paragraphs after removing "
        "duplicates. The output format should only contain the number, such as 1, 2, 3, and so on."
        "\n\nThe final answer is: ",
        32,
        "count",
    ),
    "passage_retrieval_en": Dataset(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which "
        "paragraph the abstract is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}"
        "\n\nPlease enter the number of the paragraph that the abstract is from. The answer format "
        'must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
    ),
    "passage_retrieval_zh": Dataset(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n{context}\n\n"
        "下面是一个摘要\n\n{input}\n\n请输入摘要所属段落的编号。答案格式必须是"
        '"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval_zh",
    ),
    "lcc": Dataset(_CODE % "", 64, "code_similarity", chat=False),
    "repobench-p": Dataset(_CODE % "{input}", 64, "code_similarity", chat=False),
}
FIELDS = {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}
LETTERS = "ABCD"
FIELDS_V2 = {
    *("_id", "domain", "sub_domain", "difficulty", "length", "question"),
    *("answer", "context", *(f"choice_{letter}" for letter in LETTERS)),
}
PROMPT_V2 = (
    "Please read the following text and answer the question below.\n\n<text>\n{context}\n</text>"
    "\n\n"
    "What is the correct answer to this question: {question}\nChoices:\n(A) {choice_A}\n"
    "(B) {choice_B}\n(C) {choice_C}\n(D) {choice_D}\n\nFormat your response as follows: "
    '"The correct answer is (insert answer here)".'
)


def longbench_question(values: Mapping[str, Any]) -> Question:
    """The question of a line of LongBench or LongBench-E.

    Args:
        values: the line's fields.

    Raises:
        ValueError: a field is missing, or the data set is none of `DATASETS`.
    """
    fields = Fields(values, "a line of LongBench")
    task = fields.text("dataset")
    dataset = DATASETS.get(task.removesuffix("_e"))
    if dataset is None:
        raise ValueError(f"dataset={shown(task)} is none of LongBench's {', '.join(DATASETS)}")
    if dataset.metric in CHINESE:
        check_jieba()
    answers, classes = values["answers"], values.get("all_classes")
    if not is_texts(answers):
        raise ValueError("'answers' must be a list of texts, none of them empty")
    if dataset.metric == "classification" and not is_texts(classes):
        raise ValueError("'all_classes' must be a list of texts, none of them empty")
    pattern = {"retrieval": PARAGRAPH, "retrieval_zh": PARAGRAPH_ZH}.get(dataset.metric)
    if pattern is not None and not all(map(pattern.search, answers)):
        raise ValueError(f"'answers' of {task} must be such as 'Paragraph 3' or '段落3'")
    prompt = dataset.prompt.format(context=fields.text("context"), input=fields.text("input", ""))
    return Question(
        *(task, prompt, tuple(answers), dataset.metric),
        classes=tuple(classes or ()),
        max_new_tokens=dataset.max_new_tokens,
        chat=dataset.chat,
        one_line=dataset.one_line,
    )


def longbench_v2_question(values: Mapping[str, Any]) -> Question:
    """The question of a line of LongBench-v2, a choice among four answers.

    Args:
        values: the line's fields.

    Raises:
        ValueError: a field is missing, or the answer is none of A to D.
    """
    fields = Fields(values, "a line of LongBench-v2")
    names = ("context", "question", *(f"choice_{letter}" for letter in LETTERS))
    answer = fields.text("answer")
    if answer not in tuple(LETTERS):
        raise ValueError(f"answer={shown(answer)} must be one of A, B, C and D")
    prompt = PROMPT_V2.format(**{name: fields.text(name).strip() for name in names})
    return Question("longbench-v2", prompt, (answer,), "choice", max_new_tokens=128)


def is_texts(value: Any) -> bool:
    """Whether ``value`` is a list of texts, none of them empty."""
    return isinstance(value, list) and bool(value) and all(isinstance(x, str) and x for x in value)
