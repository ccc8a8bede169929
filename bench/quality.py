"""How well a model answers when a policy reads for it, and how the bundled one's drafts do.

``op=read``: percent right on RULER's tasks by policy and budget, of the bundled model or of one
that ``--model`` names. ``op=draft``: tokens that a
verification commits, by drafter, and how answers differ from those of plain decoding.
``op=needle``: facts found by their place in the text. ``op=overlap``: the keys that a token and one
after it both select. ``op=rejected``: how likely rejected draft tokens were (`bench.rejected`).
``op=trees``: tokens that drafts with branches would commit (`bench.trees`). ``op=passes``:
positions whose logits depend on the length of a pass (`bench.passes`). ``op=flips``: rows that
drafters decode otherwise than plain decoding does (`bench.flips`). Rows do not depend on the
machine, but for rounding in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import jspec
from bench import cases, ceilings
from bench.cases import Case
from bench.drafters import EXACT, PLAIN, SAMPLING, Drafting, drafts
from bench.flips import FLIPS
from bench.passes import PASSES
from bench.point import Row, row
from bench.policies import scored_bytes
from bench.program import failure
from bench.real.cell import Cell
from bench.rejected import REJECTED
from bench.settings import Settings, bar
from bench.suite import Benchmark, suite_of
from bench.texts import texts
from bench.trees import TREES
from jspec.eval import ruler
from jspec.eval.evaluate import Run, Score, evaluate_all, with_budget
from jspec.eval.fitting import needle_question, ruler_bytes_questions, ruler_questions
from jspec.eval.heatmap import DEPTHS
from jspec.eval.questions import Asked
from jspec.eval.ruler_bytes import TASKS
from jspec.models.bundled import bundled_path
from jspec.models.hashes import FOLDER
from jspec.policies import Policy, named_policy
from jspec.policies.hata import with_hashes
from jspec.train.samples import prefill

DENSE = "dense"
# Policies by the names of rows: with their defaults, and with settings that read 16 bytes of a key
# and KV head to score it, in a cache of bfloat16 with H channels.
DEFAULTS = ("streaming", "exact_topk", "hata", "quest", "loki", "magicpig")
AT_16_BYTES = {
    "quest-16": "quest:page={page}",  # two keys a page of H / 4 positions
    "loki-16": "loki:channels=8",
    "magicpig-16": "magicpig:bits=4,tables=32",
}
RANDOM = "hata-random"  # HATA without the trained hashes that ``--hashes`` names
EQUAL_BYTES = ("hata", *AT_16_BYTES)
POLICIES = (*DEFAULTS, *AT_16_BYTES)
RULER = [task for task in ruler.TASKS if task not in ruler.QA]  # those need files of others
BUDGETS = (1 / 64, 1 / 32)  # 1.56 % and 3.1 % of the context
ABLATED = (1 / 256, 1 / 128, 1 / 16)  # only for exact top-k and policies at equal bytes
QUESTIONS = 12  # that are decoded at a time
REFERENCE = "vegas-first"  # as published

FINDING = ("exact_topk", "hata", "quest")  # whose needles are counted where none is named

READ: Case = {"S": 8192, "questions": 3}  # questions: of each task
NEEDLE: Case = {"S": 8192, "questions": 1}  # questions: of each depth
# texts, after the first `skip`: prompts of S tokens, B of them decoded together; percent: of the
# context that sparse drafters read.
DRAFT: Case = {"S": 8192, "texts": 16, "skip": 0, "B": 16, "new": 256, "gamma": 7, "percent": 7}
DRAFT |= {"sampling": "greedy", "rule": "token", "exact": "no"}
# Figure 7 of Yue et al. 2026; there 1024 keys, whatever the context.
OVERLAP: Case = {"S": 8192, "texts": 4, "gamma": 7, "percent": 7}
CHOICES = {"sampling": tuple(SAMPLING), "rule": ("token", "block"), "exact": tuple(EXACT)}


def drafters(percent: float) -> dict[str, str]:
    """The drafters by name, which read so many percent of the context; plain decoding first."""
    ratio = percent / 100
    return drafts(ratio) | {"hata": f"hata:budget={ratio},dense_layers=0"}


# Policies that read


def read(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each policy and budget; all share one prefill of a question."""
    path = settings.model or bundled_path()
    tokenizer, model = jspec.load_tokenizer(path), jspec.load_model(path)
    hashes = settings.hashes or path / FOLDER
    names = POLICIES if settings.hashes is None else (*POLICIES, RANDOM)
    pairs: list[tuple[str, float | None]] = [(DENSE, None)]
    pairs += [(name, budget) for budget in BUDGETS[: 1 if settings.quick else 2] for name in names]
    if not settings.quick:
        pairs += [(x, budget) for budget in ABLATED for x in ("exact_topk", *EQUAL_BYTES)]
    pairs = [pair for pair in pairs if pair[0] == DENSE or settings.wants(pair[0])]
    spec = model.config.layers[0]
    policies = [policy_of(*pair, spec.key_size, hashes) for pair in pairs]
    size = case["S"], case["questions"]
    if settings.model is None:
        questions = ruler_bytes_questions(tokenizer, TASKS, *size)
    else:
        case = case | {"model": path.stem}
        template = jspec.load_chat_template(path)
        questions = ruler_questions(tokenizer, RULER, *size, template=template)
    scores = scores_of(model, tokenizer, list(map(Run, policies)), questions, case["S"])
    for (name, budget), policy, score in zip(pairs, policies, scores, strict=True):
        read_bytes = scored_bytes(policy, spec, jnp.bfloat16) / spec.kv_heads
        figures = {"bytes": read_bytes, "score": score.score, "scores": score.scores}
        yield row("read", case | {"budget": budget}, name, checked=None, **figures)


def needles(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each policy: percent of needles found at each depth (HATA, figure 6)."""
    model, tokenizer = jspec.load_bundled()
    names = [DENSE, *(settings.only or FINDING)]
    sizes = model.config.layers[0].key_size, bundled_path() / FOLDER
    policies = [policy_of(name, BUDGETS[0], *sizes) for name in names]
    questions = [
        needle_question(tokenizer, case["S"], depth, seed)
        for depth in DEPTHS
        for seed in range(case["questions"])
    ]
    scores = scores_of(model, tokenizer, list(map(Run, policies)), questions, case["S"])
    for name, score in zip(names, scores, strict=True):
        found = 100 * np.reshape(score.each, (len(DEPTHS), -1)).mean(axis=1)
        depths = {
            f"{depth:.0%}": share for depth, share in zip(DEPTHS, found.tolist(), strict=True)
        }
        figures = {"budget": BUDGETS[0], "score": score.score, "depths": depths}
        yield row("needle", case, name, checked=None, **figures)


def policy_of(name: str, budget: float | None, key_size: int, hashes: Path) -> Policy:
    """A policy by its name in tables, which reads a share ``budget`` of the context.

    ``key_size``: channels of a key. ``hashes``: the folder of trained ones, if it exists.
    """
    if name == RANDOM:
        return with_budget(named_policy("hata"), budget)
    text = AT_16_BYTES.get(name, name).format(page=key_size // 4)
    policy = with_budget(named_policy(text), budget)
    return with_hashes(policy, hashes)


def scores_of(
    model: jspec.Decoder,
    tokenizer: jspec.Tokenizer,
    runs: Sequence[Run],
    questions: Sequence[Asked],
    length: int,
) -> list[Score]:
    """The score of each of ``runs`` on questions of ``length`` tokens; shows a progress bar."""
    with bar(f"ruler {cases.kilo(length)}", len(runs) * len(questions)) as advance:

        def on_batch(count: int) -> None:
            for _ in range(count):
                advance()

        settings = {"length": length, "batch": QUESTIONS, "on_batch": on_batch}
        return evaluate_all(model, tokenizer, runs, questions, **settings)


# Drafts that are accepted


def drafted(case: Case, settings: Settings) -> Iterator[Row]:
    """A row for each drafter; all start from one prefill of the same texts."""
    model, tokenizer = jspec.load_bundled()
    exact, sampling = EXACT[case["exact"]], case["sampling"]
    texts_of = drafters(case["percent"])
    first = PLAIN, REFERENCE  # what others are compared with
    names = [*first, *(name for name in texts_of if name not in first)]
    names = [name for name in names if name == PLAIN or settings.wants(name)]
    prompts = texts(tokenizer, range(case["skip"], case["skip"] + case["texts"]), case["S"])
    limits, reference = ceilings.measured(), None
    try:
        cell = Cell(
            *(model, tokenizer, prompts, case["B"]),
            exact=exact,
            limits=limits,
            hashes=bundled_path() / FOLDER,
            room=case["new"],
        )
    except jspec.BackendError as error:
        yield row("draft", case, PLAIN, checked=None, reason=str(error))
        return
    with bar("drafts", len(names)) as advance:
        for name in names:
            gamma = 0 if name == PLAIN else case["gamma"]
            config = jspec.StepConfig(
                gamma, jspec.named_draft(texts_of[name]), rule=case["rule"], exact=exact
            )
            try:
                measured = cell.answers(Drafting(name, config), sampling, case["new"])
            except Exception as error:
                reason = failure(name, error).reason
                yield row("draft", case, name, checked=False, reason=reason)
                continue
            yield row("draft", case, name, **figures_of(measured, reference))
            if name == REFERENCE:
                reference = per_text(measured)
            advance()


def per_text(measured: Row) -> np.ndarray:
    """Tokens that a verification commits, of each text."""
    return np.array(measured["tokens"]) / np.array(measured["steps"])


def figures_of(measured: Row, reference: np.ndarray | None) -> Row:
    """The figures of a row of drafts.

    Args:
        measured: what `bench.real.cell.Cell.answers` returned.
        reference: `per_text` of `REFERENCE`, None if it did not run before.
    """
    figures = {
        "length": sum(measured["tokens"]) / sum(measured["steps"]),
        **{key: measured[key] for key in ("attempts_at", "accepted_at", "tokens", "steps")},
        **{
            key: measured[key]
            for key in ("identical_rows", "compared", "flip_margins")
            if key in measured
        },
        "checked": measured["checked"],
    }
    if "identical_rows" in measured:
        figures["flips"] = measured["rows"] - measured["identical_rows"]
    if reference is not None:
        differences = per_text(measured) - reference
        figures[f"over {REFERENCE}"] = float(differences.mean())
        if len(differences) > 1:
            figures["standard error"] = float(differences.std(ddof=1) / len(differences) ** 0.5)
    if figures["checked"] is False:
        figures["reason"] = "its answers are not the model's"
    return figures


# Keys that neighbouring tokens select


def overlapped(case: Case, settings: Settings) -> Iterator[Row]:
    """One row: how much the selections of neighbouring tokens share, by the gap between them."""
    model, tokenizer = jspec.load_bundled()
    context, gamma = case["S"], case["gamma"]
    count = max(1, round(context * case["percent"] / 100))
    positions = range(context, context + gamma + 1)
    shares = []
    with bar("overlap", case["texts"]) as advance:
        for text in texts(tokenizer, range(case["texts"]), context + gamma + 1):
            prefilled = prefill(model, text, positions)
            for layer, queries in enumerate(prefilled.queries):
                keys = np.asarray(prefilled.keys(layer), np.float32)[:context]
                shares.append(shared_selections(queries, keys, count))
            advance()
    mean = np.mean(shares, axis=0)
    by_gap = {f"gap {i}": float(np.diagonal(mean, i).mean()) for i in range(1, gamma + 1)}
    yield row("overlap", case, REFERENCE, checked=None, selected=count, **by_gap)


def shared_selections(queries: np.ndarray, keys: np.ndarray, count: int) -> np.ndarray:
    """The share of keys that two tokens both select, for each pair of tokens, float64 ``[M, M]``.

    A token selects the ``count`` keys of its highest mean logit over the heads (Yue et al. 2026,
    eq. 3 for one token).

    Args:
        queries: ``[M, N, H]``.
        keys: ``[S, K, H]``.
        count: keys that a token selects, at most S.
    """
    tokens, heads, size = queries.shape
    of_head = queries.astype(np.float32).reshape(tokens, keys.shape[1], -1, size).sum(axis=2)
    scores = np.einsum("mkh,skh->ms", of_head, keys) / heads
    selected = np.zeros(scores.shape)
    np.put_along_axis(selected, np.argsort(-scores, axis=1)[:, :count], 1, axis=1)
    return selected @ selected.T / count


READING = Benchmark(
    name="read",
    default=READ,
    gpu=["S=8K", "S=32K"],
    quick=["S=2K,questions=1"],
    cpu=["S=2K,questions=1", "S=8K"],
    names=(*POLICIES, RANDOM),
    rows=read,
)
NEEDLES = Benchmark(
    name="needle",
    default=NEEDLE,
    gpu=["S=8K", "S=16K", "S=32K"],
    quick=["S=2K"],
    cpu=["S=2K", "S=4K", "S=8K"],
    names=POLICIES,
    rows=needles,
)
DRAFTING = Benchmark(
    name="draft",
    default=DRAFT,
    choices=CHOICES,
    gpu=[
        *cases.product(S=("8K", "31K"), sampling=("greedy", "t0.8")),
        *cases.product(percent=(1, 2, 3, 5, 10)),
        "S=512,texts=64,B=32,new=512,gamma=4,exact=tokens",
    ],
    quick=["S=8K,texts=4,B=4,new=64"],
    cpu=["S=256,texts=2,B=2,new=12,gamma=3", "texts=4,B=4,new=64"],
    names=tuple(drafters(7)),
    rows=drafted,
)
OVERLAPPING = Benchmark(
    name="overlap",
    default=OVERLAP,
    gpu=["S=8K", "S=31K"],
    quick=["S=2K,texts=2"],
    cpu=["S=2K,texts=2", "S=8K"],
    names=(REFERENCE,),
    rows=overlapped,
)
SUITE = dataclasses.replace(
    suite_of(
        "quality",
        "RULER by policy and budget, also of another model (--model); of the bundled one needles, "
        "accepted lengths and rejected tokens by drafter, what neighbouring tokens select, "
        "drafts with branches, logits by passes of every length, and flips by drafter and batch",
        *(READING, NEEDLES, DRAFTING, REJECTED, OVERLAPPING, TREES, PASSES, FLIPS),
    ),
    custom_clocks=True,
)
