"""Counting what drafts with branches would commit: drafts, bounds, steps, and ranks of a model."""

import itertools

import jax
import numpy as np
import pytest

import jspec
from bench import report, trees
from bench.report.markdown import refreshed
from bench.report.runs import read
from bench.settings import Settings
from jspec.decode.draft.lookup import SuffixIndex, agreement, continuation
from jspec.decode.score import score_top_tokens
from jspec.policies import Dense, Streaming
from tests.parameters import default_run


def random_text(seed: int, length: int = 60, vocabulary: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocabulary, size=length)


@pytest.mark.parametrize("name", default_run(["ngram", "ngram-1", "suffix"], "ngram", "ngram-1"))
def test_chains_are_those_of_the_drafters(name):
    nodes, width, long = 8, 64, 0
    texts = [random_text(seed, int(length), 2) for seed, length in enumerate((5, 9, 30, 64) * 3)]
    texts += [np.tile([4, 5, 6], 20), np.arange(30)]
    padded = np.stack([np.pad(x, (0, width - len(x)), constant_values=-1) for x in texts])
    padded, lengths = padded.astype(np.int32), np.array(list(map(len, texts)), np.int32)
    if name != "suffix":
        draft = jspec.NgramDraft(**({"min_match": 1} if name == "ngram-1" else {}))
        matched = jax.jit(agreement, static_argnums=3)
        agreed = matched(padded, np.zeros_like(lengths), lengths, draft.max_match)
        least, factor = draft.min_match, np.inf
    else:
        agreed = SuffixIndex.empty(len(texts), width).append(padded, lengths).agreed
        least, factor = jspec.SuffixDraft().min_match, jspec.SuffixDraft().factor
    following = jax.jit(continuation, static_argnums=3)
    tokens, longest = map(np.asarray, following(padded, lengths, agreed, nodes))
    for index, text in enumerate(texts):
        count = int(min(nodes, factor * longest[index])) if longest[index] >= least else 0
        expected = {tuple(tokens[index, : i + 1].tolist()) for i in range(count)}
        assert trees.LOOKUPS[name](text, nodes) == expected
        long = max(long, int(longest[index]))
    assert long > trees.LONGEST or name != "suffix"


@pytest.mark.parametrize("length", [1, 2, 31, 60])
def test_the_tree_of_the_drafter_is_of_what_followed_earlier_tokens(length):
    text = random_text(7, length)
    draft = trees.ngram_tree(text, 8)
    earlier = (text[:-1] == text[-1]).nonzero()[0]
    assert len(draft) == (8 if len(earlier) else 0)
    assert all(path[:-1] in draft | {()} for path in draft)
    followers = [np.resize(text[at + 1 :], 8).tolist() for at in earlier]
    assert all(list(path) in [x[: len(path)] for x in followers] for path in draft)
    assert {path for path in trees.LOOKUPS["ngram-1"](text, 2) if len(path) == 1} <= draft


def test_shares_are_those_of_contexts_from_the_longest_down():
    # After 0 1 0, 2 followed once; after 0, 1 twice and 2 once.
    shares = trees.next_tokens(np.array([0, 1, 0, 2, 0, 1, 0]))
    assert shares == pytest.approx({2: 1 / 2 + 1 / 4 + 1 / 4 / 5, 1: 1 / 4 * 2 / 5})
    # After 5 0, 1 followed twice; after 0, 2 followed too.
    shares = trees.next_tokens(np.array([5, 0, 1, 5, 0, 1, 3, 0, 2, 5, 0]))
    assert shares == pytest.approx({1: 2 / 3 + 1 / 3 * 2 / 5, 2: 1 / 3 * 1 / 5})
    assert trees.next_tokens(np.array([1, 2, 3])) == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_the_likeliest_paths(seed):
    text, nodes = random_text(seed, 20), 5
    shares = {(): 1.0}
    for depth in range(nodes):
        for path in [path for path in shares if len(path) == depth]:
            after = trees.next_tokens(np.append(text, path).astype(int))
            shares |= {(*path, token): shares[path] * share for token, share in after.items()}
    best = sorted((share for path, share in shares.items() if path), reverse=True)[:nodes]
    tree = trees.likeliest_tree(text, nodes)
    assert sorted((shares[path] for path in tree), reverse=True) == pytest.approx(best)
    assert all(path[:-1] in tree | {()} for path in tree)
    chain = sorted(trees.likeliest_chain(text, nodes), key=len)
    assert list(map(len, chain)) == [1, 2, 3, 4, 5]
    for path in chain:
        after = trees.next_tokens(np.append(text, path[:-1]).astype(int))
        assert after[path[-1]] == max(after.values())


@pytest.mark.parametrize("least", [1, 3])
def test_no_draft_commits_more_than_every_match(least):
    better = 0
    for seed in range(20):
        text, nodes = random_text(seed, 80), 4
        prompt, answer = text[:40].tolist(), text[40:].tolist()
        for at in range(1, len(answer)):
            before, rest = text[: 40 + at], answer[at:]
            bound = trees.every_match(before, rest, nodes, least)
            # By brute force: how far some earlier match goes on as the answer does.
            whole, reach = text.tolist(), 0
            for end in range(40 + at - 1):
                matched = whole[end + 1 - least : end + 1] == whole[40 + at - least : 40 + at]
                if end + 1 >= least and matched:
                    same = [whole[end + 1 + i] == x for i, x in enumerate(rest[:nodes])]
                    reach = max(reach, len(list(itertools.takewhile(bool, same))))
            assert bound == reach
            if least == 3:
                chain = trees.follows(trees.LOOKUPS["ngram"](before, nodes), rest[:nodes])
                assert chain <= bound
                better += chain < bound
    assert better or least != 3
    steps = trees.lookup_steps(f"every-match-{least}", prompt, answer, nodes)
    assert steps <= trees.lookup_steps("ngram", prompt, answer, nodes) or least != 3


def test_a_step_commits_the_path_of_the_answer_and_one_token():
    draft = frozenset({(1,), (2,), (2, 5), (2, 5, 7)})
    assert [trees.follows(draft, x) for x in ([2, 5, 8], [2, 5, 7], [1, 5], [3], [])] == [
        2,
        3,
        1,
        0,
        0,
    ]
    accepted = {0: 2, 3: 0, 4: 0, 5: 7}  # 3, 1, 1 and the other 4 of 9
    assert trees.steps_of(range(9), accepted.__getitem__) == 4
    # A text that repeats itself, in chains of 2: 3 tokens a step.
    assert trees.lookup_steps("ngram", [1, 2, 3, 4] * 3, [1, 2, 3, 4] * 4, 2) == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "draft"), [("ngram", jspec.NgramDraft()), ("suffix", jspec.SuffixDraft())]
)
def test_steps_are_those_of_decoding(name, draft, sharp):
    prompts = [random_text(seed, 12 + seed).tolist() for seed in range(4)]
    params = [
        jspec.SamplingParams(max_new_tokens=40, temperature=0.3, seed=i, ignore_eos=True)
        for i in range(4)
    ]
    result = jspec.generate(sharp, prompts, params, draft=draft, gamma=5)
    pairs = zip(prompts, map(list, result.tokens), strict=True)
    steps = [trees.lookup_steps(name, prompt, answer, 5) for prompt, answer in pairs]
    assert steps == list(result.steps)
    assert sum(steps) < 120


def test_ranks_are_of_passes_that_read_committed_tokens(tiny):
    prompts = [random_text(seed, 8 + seed).tolist() for seed in range(3)]
    answers = [random_text(9 + seed, 7 - 2 * seed, 20).tolist() for seed in range(3)]
    texts = [[*x, *y] for x, y in zip(prompts, answers, strict=True)]
    scores = score_top_tokens(tiny, texts, tiny.config.vocab_size)
    for temperature in (0.0, 0.5):
        results = trees.ranked(tiny, Dense(), prompts, answers, temperature)
        for prompt, answer, score, result in zip(prompts, answers, scores, results, strict=True):
            tokens, logs = (x[len(prompt) - 1 :] for x in (score.top_tokens, score.top_logprobs))
            ranks = np.array([row.tolist().index(x) for row, x in zip(tokens, answer, strict=True)])
            powers = np.exp(logs / (temperature or 1.0))
            shares = powers[np.arange(len(answer)), ranks] / powers.sum(axis=1)
            assert (result.ranks == ranks).all()
            np.testing.assert_allclose(result.probabilities, shares, rtol=1e-3)
    dense = trees.ranked(tiny, Dense(), prompts, answers, 0.0)
    sparse = trees.ranked(tiny, Streaming(window=4, sinks=1), prompts, answers, 0.0)
    assert any(
        (x.probabilities != y.probabilities).any() for x, y in zip(dense, sparse, strict=True)
    )


def test_steps_of_drafts_by_the_model():
    ranks = np.array([0, 0, 0, 1, 0, 0, 2, 0])
    draft = trees.Ranked(ranks, np.full(8, 0.5))
    plain = trees.Ranked(ranks, np.full(8, 0.5))
    # Chains of 2: 3 tokens, 1 of rank 1, 3 up to that of rank 2, and the last one.
    assert trees.self_chain_steps(draft, plain, 2, False, 0) == 4
    assert trees.self_chain_steps(draft, plain, 2, True, 0) == 3  # q = p: all are accepted
    tree = frozenset({(0,), (1,), (0, 0), (0, 1)})
    assert trees.self_tree_steps(draft, tree) == 4  # 3, 2, 2 and 1 tokens
    # Accepted with probability 0.6: (1 - 0.6^(n + 1)) / (1 - 0.6) tokens a step.
    many = [np.full(30_000, x) for x in (0.3, 0.5)]
    draft, plain = (trees.Ranked(np.ones(30_000, int), x) for x in many)
    steps = trees.self_chain_steps(draft, plain, 3, True, 0)
    assert 30_000 / steps == pytest.approx((1 - 0.6**4) / 0.4, rel=0.02)


def test_the_shape_of_ranks_is_the_likeliest():
    # Ranks 0, 1 and 2 of probability 0.6, 0.3 and 0.1.
    ranks = [np.repeat([0, 1, 2], [6, 3, 1])]
    expected = {(0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 0, 0)}
    assert trees.rank_tree(ranks, 7) - {(0, 0, 1), (0, 1, 0), (1, 0, 0)} <= expected
    assert trees.rank_tree(ranks, 3) == {(0,), (0, 0), (1,)}


@pytest.mark.exhaustive
def test_every_drafter_has_a_row_on_the_same_answers(tiny, monkeypatch):
    prompts = [random_text(seed, 10).tolist() for seed in range(4)]
    answers = [random_text(9 + seed, 12).tolist() for seed in range(4)]
    monkeypatch.setattr(trees, "answers_of", lambda *_: (tiny, prompts, answers))
    trees.ranks_of.cache_clear()
    case = trees.TREES.case("S=10,texts=4,B=2,new=12,nodes=3,sampling=t0.8")
    rows = {row["name"]: row for row in trees.rows(case, Settings())}
    assert tuple(rows) == trees.NAMES
    for row in rows.values():
        assert row["case"]["model"] == "bundled"
        assert row["tokens"] == [12] * 4
        assert row["length"] == 48 / sum(row["steps"])
        assert all(3 <= steps <= 12 for steps in row["steps"])
    assert rows["streaming"]["passes"] == 3
    # A shape comes from other rows' answers: of rank 1 where these take rank 0.
    ranks = [trees.Ranked(np.full(12, i % 2), np.ones(12)) for i in range(4)]
    monkeypatch.setattr(trees, "ranks_of", lambda *_: ranks)
    (row,) = trees.rows(case, Settings(only=("streaming-tree",)))
    assert row["steps"] == [12] * 4
    only = [row["name"] for row in trees.rows(case, Settings(only=("streaming-tree", "counts")))]
    assert only == ["counts", "streaming-tree"]


def test_the_tables_of_the_docs_are_of_today():
    text = (report.DOCS / "drafting.md").read_text()
    tables = report.pages_of(report.RESULTS, read(report.RESULTS))["drafting.md"]
    assert refreshed(text, tables) == text
    assert all(f"<!-- table {name}:" in text for name in ("branches", "trees"))
