"""The paper's workload against plain Python that looks at the inputs."""

from functools import partial

import jax
import numpy as np
import pytest

from bench import verify, workload
from bench.workload import make_kv, make_logits, make_tokens
from jspec.ops.stochastic import VERIFY_STOCHASTIC
from tests.parameters import default_run


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("batch", "gamma"), [(1, 1), (32, 8), (7, 33), (300, 128)])
def test_what_verification_must_give_is_what_a_scan_gives(batch, gamma, alpha):
    tokens = make_tokens(batch, gamma, alpha)
    accepted, committed, mismatch, following, stopped, blocks = workload.expected_verified(tokens)
    for row in range(batch):
        draft, target = tokens.draft[row].tolist(), tokens.target[row].tolist()
        count = 0
        while count < gamma and draft[count] == target[count]:
            count += 1
        block = [*draft[:count], target[count]]
        assert accepted[row] == tokens.accepted[row] == count
        assert committed[row] == len(block)
        assert mismatch[row] == (count < gamma)
        assert following[row] == target[count]
        assert blocks[row].tolist() == block + [-1] * (gamma - count)
    assert not stopped.any()


def test_tokens_are_of_the_vocabulary_and_their_lengths_binomial():
    tokens = make_tokens(4000, 8, 0.6)
    for x in (tokens.draft, tokens.target):
        assert x.dtype == np.int32
        assert x.min() >= 0
        assert workload.VOCABULARY / 2 < x.max() < workload.VOCABULARY
    # Four standard errors of a mean of 32,000 draws.
    assert abs(tokens.accepted.mean() / 8 - 0.6) < 4 * (0.6 * 0.4 / 32_000) ** 0.5


def test_the_same_arguments_give_the_same_tokens():
    one, same, other = make_tokens(4, 8, 0.6), make_tokens(4, 8, 0.6), make_tokens(4, 8, 0.9)
    assert all(map(np.array_equal, one.inputs, same.inputs))
    assert not np.array_equal(one.draft, other.draft)


def test_what_packing_must_give_and_that_no_two_rows_are_alike():
    kv = make_kv(5, 7, 128)
    accepted = np.array([0, 7, 3, 0, 1], np.int32)
    packed, offsets, total = workload.expected_packed(kv, accepted)
    expected = [kv[b, i].tolist() for b in range(5) for i in range(accepted[b])]
    assert packed.tolist() == expected
    assert (offsets.tolist(), total) == ([0, 0, 7, 10, 10], 11)
    flat = make_kv(64, 128, 2048).reshape(-1, 2048)
    assert len(np.unique(flat, axis=0)) == len(flat)
    assert np.isfinite(flat).all()


@pytest.mark.parametrize("one_hot", [True, False], ids=["one-hot", "logits"])
def test_about_four_of_five_tokens_stand(one_hot):
    logits = make_logits(200, 5, 1000, one_hot=one_hot)
    weights = np.exp(logits.target[:, :5].astype(np.float64))
    p = weights / weights.sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(p, logits.draft[..., None], axis=-1)
    assert 0.6 < chosen.mean() < 0.9


@pytest.mark.parametrize("draft", default_run(["one-hot", "logits"], "logits"))
def test_the_reference_is_plausible_and_other_outcomes_are_not(draft):
    logits, arguments = verify.stochastic_inputs({"B": 64, "V": 3000, "draft": draft})
    outputs = jax.jit(partial(VERIFY_STOCHASTIC, **verify.STATIC))(*arguments)
    accepted, following = np.asarray(outputs[0]), np.asarray(outputs[3])
    uniforms = verify.uniforms_of(arguments)
    assert {0, 5} <= set(accepted.tolist())
    assert workload.plausible(logits, uniforms, accepted, following)
    for change in (-1, 1):
        other = np.clip(accepted + change, 0, 5)
        assert not workload.plausible(logits, uniforms, other, following)
        assert not workload.plausible(logits, uniforms, accepted, (following + change) % 3000)


@pytest.mark.parametrize(
    ("u", "accepted", "token", "allowed"),
    [
        (0.4, 1, 3, True),
        (0.6, 0, 1, True),
        (0.6, 1, 3, False),
        (0.4, 0, 1, False),
        (0.6, 0, 0, False),
    ],
    ids=["stands", "falls", "should-fall", "should-stand", "drawn-again"],
)
def test_plausible_by_hand(u, accepted, token, allowed):
    """Token 0 has half of the target's mass and is drafted for certain; the others share the rest
    evenly. The numbers draw token 1 of the residual and token 3 as the bonus."""
    target = np.log(np.array([[[3, 1, 1, 1], [3, 1, 1, 1]]]) / 6)
    logits = workload.Logits(np.array([[0]], np.int32), target, None)
    uniforms = np.array([[[u, 0]], [[0.2, 0.2]], [[0.9, 0.9]]])
    got = workload.plausible(logits, uniforms, np.array([accepted]), np.array([token]))
    assert got == allowed


def test_sorted_rows_are_the_same_rows():
    drawn = workload.make_tokens(32, 8, 0.6)
    ordered = drawn.by_accepted()
    assert (np.diff(ordered.accepted) >= 0).all()
    for one, other in zip(
        (*drawn.inputs, drawn.accepted), (*ordered.inputs, ordered.accepted), strict=True
    ):
        assert sorted(map(str, one)) == sorted(map(str, other))
    matched = ordered.draft == ordered.target[:, :-1]
    np.testing.assert_array_equal(matched.cumprod(axis=1).sum(axis=1), ordered.accepted)
