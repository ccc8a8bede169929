"""What selections keep, against brute force a key at a time."""

import jax
import numpy as np
import pytest

from jspec import LayerSpec
from jspec.train.recall import (
    BUCKET_BITS,
    BUDGETS,
    Rivals,
    compare,
    page_scores,
    principal_axes,
    ranks,
)

SPEC = LayerSpec(2, 16, 16)
POSITIONS = np.array([199, 130, 64])


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    keys = np.full((256, 2, 16), np.nan, np.float32)  # what is after the last position
    keys[:200] = rng.standard_normal((200, 2, 16))
    queries = rng.standard_normal((3, 6, 16), np.float32)
    hashes = {"some": rng.standard_normal((2, 16, 32), np.float32)}
    return queries, keys, hashes, principal_axes(keys[:200]), keys[:200].mean(axis=0) + 0.3


def brute(data, name, budget):
    """Recall and mass of a method, one query, KV head and key after another."""
    queries, keys, hashes, axes, center = data
    recalls, masses = [], []
    for query, position in zip(queries, POSITIONS, strict=True):
        count = position + 1
        for head in range(2):
            group, head_keys = query[3 * head : 3 * head + 3], keys[:count, head]
            exact = (head_keys @ group.T).sum(axis=1)
            if name == "some":
                bits = [(x @ hashes["some"][head]) > 0 for x in (group, head_keys)]
                scores = np.array([(code == bits[0]).sum() for code in bits[1]])
            elif name == "loki":
                first = axes[head][:, : Rivals(32, 16).channels]
                scores = ((head_keys @ first) @ (group @ first).T).sum(axis=1)
            elif name == "magicpig":
                tables = Rivals(32, 16).tables
                random = np.asarray(jax.random.normal(jax.random.key(0), (16, tables, BUCKET_BITS)))
                buckets = [
                    np.einsum("nh,htb->ntb", x, random) > 0
                    for x in (head_keys - center[head], group)
                ]
                collisions = (buckets[0][:, None] == buckets[1][None]).all(axis=3).sum(axis=2)
                found = np.where(collisions >= 2, collisions, 0).sum(axis=1)
                scores = np.where(found > 0, found, -1)
            elif name == "quest":
                scores = np.empty(count)
                for begin in range(0, count, Rivals(32, 16).page):
                    page = head_keys[begin : begin + Rivals(32, 16).page]
                    low, high = page.min(axis=0), page.max(axis=0)
                    bound = sum(np.maximum(q * low, q * high).sum() for q in group)
                    scores[begin : begin + Rivals(32, 16).page] = bound
            else:
                scores = exact
            k = max(1, int(count / budget))
            best = [
                set(sorted(range(count), key=lambda i: (-s[i], i))[:k]) for s in (scores, exact)
            ]
            recalls.append(len(best[0] & best[1]) / k)
            for q in group:
                weights = np.exp(head_keys @ q / 4)
                masses.append(weights[list(best[0])].sum() / weights.sum())
    return np.mean(recalls), np.mean(masses)


@pytest.mark.parametrize("name", ["some", "exact", "loki", "quest", "magicpig"])
def test_compare_is_brute_force(data, name):
    queries, keys, *others = data
    result = jax.device_get(compare(queries, POSITIONS, keys, *others, SPEC))[name]
    for budget, remaining in zip(BUDGETS, result, strict=True):
        np.testing.assert_allclose(remaining, brute(data, name, budget), rtol=1e-5)


def test_a_bound_is_made_of_the_keys_that_the_query_may_read(data):
    queries, keys, *_ = data
    q, k = queries.reshape(3, 2, 3, 16), np.nan_to_num(keys)
    stored = np.arange(256)[None] <= POSITIONS[:, None]
    result = np.asarray(page_scores(q, k, stored, 16))
    for m, position in enumerate(POSITIONS):
        for slot in range(0, position + 1, 4):
            page = k[slot // 16 * 16 : min(slot // 16 * 16 + 16, position + 1)]
            ends = q[m] * page.min(axis=0)[:, None], q[m] * page.max(axis=0)[:, None]
            np.testing.assert_allclose(
                result[m, :, slot], np.maximum(*ends).sum(axis=(1, 2)), rtol=1e-5
            )


def test_ranks_put_the_first_of_equals_before_others_and_unused_slots_last():
    stored = np.array([[True, True, False, True, True]])
    assert ranks(np.array([[[1.0, 3.0, 9.0, 3.0, 3.0]]]), stored).tolist() == [[[3, 0, 4, 1, 2]]]


def test_rivals_read_as_many_bytes():
    for bits, channels, page in ((128, 8, 32), (32, 2, 128), (256, 16, 16)):
        sizes = Rivals(bits, 128)
        assert (sizes.channels, sizes.page) == (channels, page)
        assert sizes.tables * BUCKET_BITS == bits
        assert 2 * sizes.channels == 2 * 2 * 128 / sizes.page == sizes.nbytes
