"""What policies select, against their papers' formulae, at the edges of budgets and contexts."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import LinearLayout, StripedLayout
from jspec.dispatch import use_backends
from jspec.ops.key_scores import dot_scores
from jspec.policies import Quest
from jspec.policies.policy import create_cache, with_pages
from tests.parameters import default_run
from tests.policies import reference
from tests.policies.common import CAPACITY, MATRIX, SPEC, arrays_of, filled, query, random

# Of one row a page is half full, one token, a page more than full, nothing, and all there is.
LENGTHS = [18, 1, 9, 0, CAPACITY]
EDGES = {
    "some": {},
    "one": {"budget": 1, "sinks": 0, "recent": 0},
    "none": {"budget": 0, "sinks": 0, "recent": 0},
    "ratio": {"budget": 0.25},
    "whole": {"budget": 1.0},
    "beyond": {"budget": 1000},
}


commit_pages = jax.jit(with_pages, static_argnums=(0, 5))


@functools.partial(jax.jit, static_argnums=0)
def select(policy, policy_params, cache, q):
    return policy.select(policy_params, 0, cache, q, cache.lengths).positions


def per_head(policy_params, head: int):
    """What a policy's reference is given: HATA has a matrix for each KV head."""
    return policy_params if isinstance(policy_params, dict) else policy_params[head]


def edge_of(name: str, edge: str):
    """The policy at an edge; Quest's least budget is the page of the last position."""
    settings = dict(EDGES[edge])
    if name == "quest" and edge in ("one", "none"):
        settings["budget"] = 2
    return dataclasses.replace(MATRIX[name], **settings)


@pytest.mark.parametrize(
    ("name", "edge"),
    default_run(
        itertools.product(reference.SCORES, EDGES),
        *(f"{name}-some" for name in reference.SCORES),
        *(f"quest-{edge}" for edge in EDGES if edge != "some"),
        *(f"hata-{edge}" for edge in EDGES if edge != "some"),
    ),
)
def test_it_selects_what_the_paper_says(name, edge):
    """Slots that hold nothing are NaN; one layout deals the positions out."""
    policy = edge_of(name, edge)
    layout = StripedLayout(CAPACITY, 3, 2) if edge == "some" else LinearLayout(CAPACITY)
    cache = filled(policy, layout, LENGTHS, junk=np.nan)
    q, _, _ = query(len(LENGTHS))
    policy_params = arrays_of(policy)
    chosen = np.asarray(select(policy, policy_params, cache, q))
    assert chosen.dtype == np.int32
    keys = np.float64(random(len(LENGTHS), CAPACITY, 2, 8, seed=1))
    sample = np.float64(random(64, 2, 8, seed=7)) + 0.5
    for row, head in np.ndindex(len(LENGTHS), 2):
        expected = reference.selected(
            *(name, policy, None if policy_params is None else per_head(policy_params[0], head)),
            *(keys[row, : LENGTHS[row], head], np.float64(q[row, 0, 2 * head : 2 * head + 2])),
            sample[:, head],
        )
        got = chosen[row, head]
        assert sorted(got[got >= 0].tolist()) == expected, (row, head)


@pytest.mark.parametrize("depth", ["first", "before the recent ones", "last but one"])
@pytest.mark.parametrize("name", reference.SCORES)
def test_a_needle_is_selected_at_either_end(name, depth):
    """A key along the query, where no sink or recent position forces it in."""
    policy = dataclasses.replace(MATRIX[name], budget=4, sinks=0, recent=1)
    length = CAPACITY - 1
    places = {"first": 0, "before the recent ones": length - 3, "last but one": length - 2}
    place = places[depth]
    cache, policy_params = filled(policy, LinearLayout(CAPACITY), [length]), arrays_of(policy)
    q, _, _ = query(1)
    q = jnp.repeat(q[:, :, ::2], 2, axis=2)  # alike in a group
    sample = np.float64(random(64, 2, 8, seed=7)) + 0.5  # whose mean is MagicPIG's center
    needle = sample.mean(axis=0) + 10 * np.asarray(q[0, 0, ::2], np.float64)
    keys = cache.keys(0).at[0, place].set(jnp.asarray(needle, jnp.float32))
    cache = cache.replaced(0, keys=keys, **policy.encoder(policy_params, 0)(keys, None))
    lengths = np.zeros(1, np.int32), np.array([length], np.int32)
    cache = commit_pages(policy, policy_params, cache, *lengths, CAPACITY)
    chosen = np.asarray(select(policy, policy_params, cache, q))
    assert all(place in chosen[0, head] for head in range(2))


def test_pages_do_not_depend_on_how_tokens_came():
    """Committed one by one, in blocks, with rejected tokens after them; once more changes none."""
    policy = Quest(page=4, dense_layers=0)
    expected = filled(policy, LinearLayout(CAPACITY), LENGTHS)
    cache = create_cache(policy, [SPEC], [LinearLayout(CAPACITY)], len(LENGTHS), jnp.float32)
    k, v = random(len(LENGTHS), CAPACITY, 2, 8, seed=1), jnp.zeros((len(LENGTHS), CAPACITY, 2, 4))
    cache = cache.replaced(0, keys=k, values=v)
    ends, before = jnp.asarray(LENGTHS, jnp.int32), jnp.zeros(len(LENGTHS), jnp.int32)
    for block in (1, 6, 2, 7, 7, 7):
        after = jnp.minimum(before + block, ends)
        # What follows the committed positions is a rejected draft.
        behind = jnp.arange(CAPACITY)[None] >= after[:, None]
        drafted = jnp.where(behind[..., None, None], 99.0, k)
        cache = cache.replaced(0, keys=drafted, values=v)
        cache = commit_pages(policy, None, cache, before, after, 7)
        again = commit_pages(policy, None, cache, before, after, 7)
        for name, x in cache.pages[0].items():
            np.testing.assert_array_equal(again.pages[0][name], x)
        before = after
    assert expected.pages[0].keys() == {"low", "high"}
    for name, x in expected.pages[0].items():
        np.testing.assert_array_equal(cache.pages[0][name], x)
        assert x.shape == (len(LENGTHS), CAPACITY // 4, 2, 8)


def test_pages_are_refused_to_a_policy_that_keeps_others():
    cache = filled(MATRIX["quest"], LinearLayout(CAPACITY))
    with pytest.raises(ValueError, match=r"layer 0 keeps pages \['high', 'low'\], but ExactTopK"):
        with_pages(MATRIX["exact_topk"], None, cache, cache.lengths, cache.lengths, 1)


def test_the_first_layers_are_read_whole():
    policy = dataclasses.replace(MATRIX["exact_topk"], dense_layers=1)
    cache = filled(policy, LinearLayout(CAPACITY))
    assert policy.select(None, 0, cache, query()[0], cache.lengths).positions is None


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("norms", {"budget": 2, "sinks": 1, "recent": 2}, "budget=2 must be at least 3 positions"),
        ("quest", {"budget": 5}, "budget=5 must be at least 6 positions"),
        ("norms", {"budget": 1.5}, "budget=1.5 must be a ratio in [0, 1]"),
        ("norms", {"sinks": -1}, "sinks=-1 must be at least 0"),
        ("norms", {"every": 0}, "every=0 must be at least 1"),
        ("quest", {"page": 0}, "page=0 must be at least 1 position"),
        ("hata", {"bits": 48}, "bits=48 must be one of 32, 64, 128, 256"),
        ("loki", {"channels": 0}, "channels=0 must be at least 1"),
        ("magicpig", {"bits": 17}, "bits=17 must be in [1, 16]"),
        ("magicpig", {"tables": 1}, "tables=1 must be at least 2"),
        ("magicpig", {"weights": True, "every": 2}, "every=2 layers cannot read one sample"),
    ],
)
def test_bad_settings_are_refused(name, settings, message):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        dataclasses.replace(MATRIX[name], **settings)
    assert message in str(error.value)


def test_hata_counts_a_bit_times_the_norm_of_its_key():
    """The authors' code: ``|k| (g - 2 h / R)`` for a distance h to the g queries of a group."""
    policy = dataclasses.replace(MATRIX["hata"], norms=True)
    cache, q, (w,) = filled(policy, LinearLayout(CAPACITY)), query()[0], arrays_of(policy)
    keys = np.float64(random(3, CAPACITY, 2, 8, seed=1))
    scores = np.asarray(policy.score((w,), 0, cache, q))
    for head in range(2):
        k, w_head = keys[0, :20, head], np.float64(w[head])
        groups = np.float64(q[0, 0, 2 * head : 2 * head + 2])
        differ = sum(((k @ w_head > 0) != (one @ w_head > 0)).sum(axis=-1) for one in groups)
        expected = np.linalg.norm(k, axis=-1) * (2 - 2 * differ / 32)
        np.testing.assert_allclose(scores[0, head, :20], expected, rtol=1e-5)


def test_loki_needs_a_sample():
    with pytest.raises(ValueError, match=r"jspec\.policies\.prepare_params"):
        MATRIX["loki"].prepare([SPEC], None)


def test_a_column_keeps_its_order_where_it_is_scored():
    """XLA on a GPU would copy Loki's and Quest's into another at the ends of a chunk of steps."""
    q, k = random(3, 1, 2, 8), random(3, CAPACITY, 2, 8)
    with use_backends({"dot_scores": "xla"}):
        assert "LayoutConstraint" in jax.jit(dot_scores).lower(q, k).as_text()
