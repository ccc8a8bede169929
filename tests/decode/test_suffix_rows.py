"""Suffix drafts from other rows of the batch, against the definition in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode.draft import SuffixDraft
from jspec.decode.draft.lookup import COMPARED, _from_other_rows
from jspec.decode.engine import Engine
from jspec.decode.generation import generate
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import prompts


def match(text: list[int], other: list[int], end: int) -> int:
    """How many tokens up to ``other[end]`` equal the last ones of ``text``."""
    length = 0
    while length < min(len(text), end + 1, COMPARED) and other[end - length] == text[-1 - length]:
        length += 1
    return length


def expected(texts: list[list[int]], row: int, min_match: int, gamma: int) -> tuple[int, list[int]]:
    """The longest of the latest matches in each other row, and what follows it."""
    candidates = [(0, [])]
    for index, other in enumerate(texts):
        ends = [] if index == row else range(len(other) - 1)
        ends = [end for end in ends if match(texts[row], other, end) >= min_match]
        if ends:
            candidates.append((match(texts[row], other, ends[-1]), other[ends[-1] + 1 :][:gamma]))
    return max(candidates, key=lambda pair: pair[0])  # the first row of equals


@pytest.mark.parametrize("min_match", [1, 3])
def test_drafts_are_what_followed_the_longest_match_in_another_row(min_match):
    rng, gamma, capacity = np.random.default_rng(min_match), 5, 60
    draft = jax.jit(_from_other_rows, static_argnums=(2, 3))
    matched = 0
    for _ in range(30):
        texts = [rng.integers(0, 3, rng.integers(1, capacity + 1)).tolist() for _ in range(4)]
        texts[1][-8:] = texts[0][5:13] if len(texts[0]) > 20 else texts[1][-8:]
        rows = np.full((4, capacity), -1, np.int32)
        for line, text in zip(rows, texts, strict=True):
            line[: len(text)] = text
        ends = np.array([len(text) for text in texts], np.int32)
        tokens, longest, counts = jax.device_get(draft(jnp.asarray(rows), ends, min_match, gamma))
        for row in range(4):
            length, after = expected(texts, row, min_match, gamma)
            assert longest[row] == length
            if length:
                assert tokens[row, : counts[row]].tolist() == after
                matched += 1
    assert matched > 60


def test_answers_to_a_prompt_are_drafted_from_each_other():
    """Also from one that has ended; no token changes."""
    model = make_decoder(ONE_LAYER, seed=1, head=8.0)  # whose texts do not repeat themselves
    prompt, params = prompts((30,), seed=2)[0], SamplingParams(max_new_tokens=48)
    plain = generate(model, [prompt], params, draft=None).tokens[0]
    steps = {}
    for other_rows in (False, True):
        draft = SuffixDraft(other_rows=other_rows)
        engine = Engine(model, slots=2, capacity=128, draft=draft, gamma=4, steps_per_chunk=4)
        first, second = (engine.submit(prompt, params) for _ in range(2))
        first.result()
        third = engine.submit(prompt, params)
        engine.run()
        assert {request.tokens for request in (first, second, third)} == {plain}
        steps[other_rows] = third.steps
    assert steps[True] <= 48 // 3
    assert steps[True] < 0.5 * steps[False]


def test_a_setting_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="other_rows=1 must be True or False"):
        SuffixDraft(other_rows=1)  # pyright: ignore[reportArgumentType]
