"""Answers to one prompt: prefilled once, whatever the drafter, the policy and the mesh."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec import helix
from jspec.config import SamplingParams
from jspec.decode.auto import GammaChoice
from tests.conftest import TINY, make_decoder
from tests.decode.common import prompts
from tests.decode.conftest import COMPILED
from tests.decode.engines import apart, check_arrivals, engine_of
from tests.parameters import default_run

SHORT, LONG, OTHER = (prompts((length,), seed=length)[0] for length in (20, 75, 60))


def answers(prompt, count, new=12):
    """Requests for ``count`` answers, every other one sampled."""
    return [
        (prompt, SamplingParams(max_new_tokens=new, seed=seed, temperature=float(seed % 2)))
        for seed in range(count)
    ]


@pytest.mark.parametrize(
    "name",
    default_run(["ngram", "vegas", "suffix", "quest", "model"], "quest", slow=["model"]),
)
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
def test_a_group_is_prefilled_once(name, prompt, sharp, other):
    """Also the answers that wait for slots, if the prompt is long; a short one by each pass."""
    requests = [*answers(prompt, 7), *answers(OTHER, 2), *answers(prompt, 1)]
    expected = apart(sharp, name, requests, other).tokens
    engine = engine_of(sharp, name, other)
    engine.warm_up()
    compiled = len(COMPILED)
    submitted = [engine.submit(*request) for request in requests]
    engine.run()
    assert tuple(request.tokens for request in submitted) == expected
    assert len(COMPILED) == compiled
    if prompt is LONG:
        # The last one finds the prompt in a slot, but for a last token or the page that has it.
        assert engine.stats.prompt_tokens - (75 + 6 + 60 + 1) in (2, 3)
    else:
        assert engine.stats.prompt_tokens < 20 * 8 + 60 + 1


def test_a_group_of_short_prompts_takes_one_row_of_a_pass(sharp, monkeypatch):
    """And several groups a row each."""
    engine = engine_of(sharp, "none", slots=16, prefill_chunk=256)
    passes, right = [], engine._scheduler.prefill.fill

    def fill(state, rows, size, slots, requests):
        passes.append((rows, len(requests)))
        return right(state, rows, size, slots, requests)

    monkeypatch.setattr(engine._scheduler.prefill, "fill", fill)
    texts = [SHORT, SHORT[:9], SHORT[:14]]
    groups = [answers(SHORT, 16), [x for text in texts for x in answers(text, 5)]]
    for group, expected in zip(groups, [[(1, 16)], [(4, 15)]], strict=True):
        passes.clear()
        before = engine.stats.prompt_tokens
        submitted = [engine.submit(*request) for request in group]
        engine.step()
        assert passes == expected
        assert engine.stats.prompt_tokens - before == sum({len(text) for text, _ in group})
        engine.run()
        tokens = tuple(request.tokens for request in submitted)
        assert tokens == apart(sharp, "none", group).tokens


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.device_count() < 4, reason="the mesh has four devices")
@pytest.mark.parametrize("window", [5, None], ids=["ring", "linear"])
def test_a_group_shares_its_prompt_where_rows_wrap_and_on_a_mesh(window):
    """Longer than the ring of a layer with a window."""
    layers = [dataclasses.replace(TINY.layers[0], window=w) for w in (window, None)]
    model = make_decoder(dataclasses.replace(TINY, layers=tuple(layers)), seed=3)
    requests = answers(LONG, 5)
    expected = apart(model, "ngram", requests).tokens
    on_mesh = helix.shard(model, helix.HelixConfig(kvp=2, tpa=2, block=2))
    for target in (model, on_mesh):
        engine = engine_of(target, "ngram")
        submitted = [engine.submit(*request) for request in requests]
        engine.run()
        assert tuple(request.tokens for request in submitted) == expected
        assert engine.stats.prompt_tokens == 75 + 4


def test_a_row_is_not_taken_for_a_prompt_that_it_has_by_other_weights(sharp):
    engine = engine_of(sharp, "none")
    request = answers(LONG, 1)[0]
    engine.submit(*request).result()
    other = make_decoder(sharp.config, seed=9)
    engine.update(other)
    assert engine.submit(*request).result() == apart(other, "none", [request]).tokens[0]
    assert engine.stats.prompt_tokens == 75 * 2


def test_an_answer_that_is_cancelled_in_prefill_leaves_its_pieces_to_the_next(sharp):
    engine = engine_of(sharp, "none", prefill_chunk=16)
    for _ in range(3):
        engine.submit([1, 2], SamplingParams(max_new_tokens=60))
    requests = answers(LONG, 2)
    first, second = (engine.submit(*request) for request in requests)
    while not 0 < engine._scheduler.prefill.current_row.done < 74:
        engine.step()
    done = engine._scheduler.prefill.current_row.done
    before = engine.stats.prompt_tokens
    first.cancel()
    engine.run()
    assert second.tokens == apart(sharp, "none", requests).tokens[1]
    assert engine.stats.prompt_tokens - before == 75 - done


@pytest.mark.exhaustive
def test_groups_come_and_go(sharp):
    """In bursts, with cancellations, of prompts of all lengths."""
    rng = np.random.default_rng(4)
    texts = prompts(rng.integers(1, 90, 12), seed=2)
    requests = [
        (text, dataclasses.replace(params, stop_tokens=(int(rng.integers(41)),)))
        for text in texts
        for _, params in answers(text, int(rng.integers(1, 9)), new=int(rng.integers(2, 30)))
    ]
    expected = apart(sharp, "ngram", requests)
    engine = engine_of(sharp, "ngram")
    check_arrivals(engine, requests, expected, cancelling=0.2)
    assert engine.stats.prompt_tokens < 0.6 * sum(len(text) for text, _ in requests)


def test_a_group_has_seeds_in_a_row_and_may_be_cancelled(sharp):
    engine = engine_of(sharp, "ngram")
    last = SamplingParams(max_new_tokens=12, temperature=1.0, seed=2**32 - 1)
    group = engine.submit_group(LONG, last, n=4)
    assert [request.params.seed for request in group] == [2**32 - 1, 0, 1, 2]
    while not group[0].tokens:
        engine.step()
    for request in group[1:]:
        request.cancel()
    other = engine.submit_group([1, 2], SamplingParams(max_new_tokens=9), n=2)
    engine.run()
    assert [request.finished for request in group] == ["length", *["cancelled"] * 3]
    assert group[0].tokens == apart(sharp, "none", [(LONG, last)]).tokens[0]
    first, second = (request.params.seed for request in other)
    assert first is not None
    assert (first + 1) % 2**32 == second
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        engine.submit_group(LONG, last, n=0)


def test_a_group_is_aborted_while_many_rows_decode_and_while_few_do(sharp, monkeypatch):
    """Plain steps while many rows are live, and drafts of four tokens while few are."""
    gammas = []

    def choose(self, rows, left):
        gammas.append(0 if (left > 0).sum() > 2 else 4)
        return gammas[-1]

    monkeypatch.setattr(GammaChoice, "choose", choose)
    engine = engine_of(sharp, "ngram", slots=4, gamma="auto")
    texts = prompts((20, 15, 9), seed=3)
    params = [SamplingParams(max_new_tokens=new) for new in (60, 40, 12)]
    expected = apart(sharp, "none", list(zip(texts, params, strict=True))).tokens
    first, aborted = (engine.submit_group(texts[i], params[i], n=2) for i in (0, 1))
    while not all(request.tokens for request in aborted):
        engine.step()
    assert set(gammas) == {0}
    for request in aborted:
        request.cancel()
    while len(first[0].tokens) < 30:
        engine.step()
    assert gammas[-1] == 4
    first[1].cancel()
    late = engine.submit_group(texts[2], params[2], n=3)  # takes the slots that are free
    engine.run()
    assert [request.finished for request in (*first, *aborted)] == ["length", *["cancelled"] * 3]
    assert first[0].tokens == expected[0]
    for request, tokens in zip((first[1], *aborted), expected[:1] + expected[1:2] * 2, strict=True):
        assert 0 < len(request.tokens) < len(tokens)
        assert request.tokens == tokens[: len(request.tokens)]
    assert {request.tokens for request in late} == {expected[2]}
