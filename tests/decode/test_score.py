"""Log-probabilities of texts, against one pass without a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.decode.score import score_tokens, score_top_tokens
from tests.decode.common import full_logits, prompts


def test_log_probabilities_are_those_of_a_full_pass(tiny):
    texts = prompts((130, 1, 64, 65, 2))
    got = score_tokens(tiny, texts)
    for text, ours in zip(texts, got, strict=True):
        law = jax.nn.log_softmax(full_logits(tiny, jnp.asarray([text])))[0]
        expected = np.asarray(law)[np.arange(len(text) - 1), text[1:]]
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, expected, atol=2e-5)


def test_the_likeliest_tokens_are_those_of_a_full_pass(tiny):
    texts = prompts((70, 1, 9))
    for text, ours in zip(texts, score_top_tokens(tiny, texts, 5), strict=True):
        law = np.asarray(jax.nn.log_softmax(full_logits(tiny, jnp.asarray([text])))[0])[:-1]
        tokens = np.argsort(-law, axis=-1, kind="stable")[:, :5]
        np.testing.assert_array_equal(ours.top_tokens, tokens)
        expected = np.take_along_axis(law, tokens, axis=-1)
        np.testing.assert_allclose(ours.top_logprobs, expected, atol=2e-5)


def test_a_text_may_fill_the_context(tiny):
    """512 tokens are scored, 513 are not."""
    assert len(score_tokens(tiny, [[1] * 512])[0]) == 511
    with pytest.raises(ValueError, match="exceeds the context of 512"):
        score_tokens(tiny, [[1] * 513])


def test_no_texts_have_no_scores(tiny):
    assert score_tokens(tiny, []) == []


def test_texts_may_be_rows_of_an_array(tiny):
    rows = np.array([[1, 2, 3], [3, 4, 5]])
    np.testing.assert_array_equal(score_tokens(tiny, rows), score_tokens(tiny, rows.tolist()))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[1, 41]], "prompt 0: the prompt holds token 41"),
        ([[41, 1]], "prompt 0: the prompt holds token 41"),
    ],
    ids=["empty", "last", "first"],
)
def test_bad_texts_are_refused(tiny, texts, message):
    with pytest.raises(ValueError, match=message):
        score_tokens(tiny, texts)
