"""What each policy reads, from its paper's formula, for one row and KV head, in float64 NumPy."""

import math

import numpy as np


def exact_topk(policy, policy_params, keys, queries, sample):
    """Gupta et al. 2021: the products themselves."""
    return keys @ queries.sum(axis=0)


def quest(policy, policy_params, keys, queries, sample):
    """Tang et al. 2024, algorithm 1: the upper bound of each page."""
    bounds = []
    for begin in range(0, len(keys), policy.page):
        page = keys[begin : begin + policy.page]
        low, high = page.min(axis=0), page.max(axis=0)
        bounds.append(sum(np.maximum(q * low, q * high).sum() for q in queries))
    return np.array(bounds)


def loki(policy, policy_params, keys, queries, sample):
    """Singhania et al. 2024: products in the leading right singular vectors of centred keys."""
    _, _, vectors = np.linalg.svd(sample - sample.mean(axis=0))
    leading = vectors[: policy.channels].T
    return (keys @ leading) @ (queries.sum(axis=0) @ leading)


def hata(policy, policy_params, keys, queries, sample):
    """The paper, algorithms 2 and 3: bits that differ, summed over the queries of a group."""
    codes = keys @ np.float64(policy_params) > 0
    return -sum((codes != (q @ np.float64(policy_params) > 0)).sum(axis=-1) for q in queries)


def magicpig(policy, policy_params, keys, queries, sample):
    """Chen et al. 2024: how many tables put a key into the query's bucket, from two on."""
    projections = np.float64(policy_params["projections"]).reshape(-1, policy.tables, policy.bits)
    result = np.zeros(len(keys))
    for q in queries:
        for at, k in enumerate(keys - sample.mean(axis=0)):
            met = sum(
                all((k @ projections[:, t, b] > 0) == (q @ projections[:, t, b] > 0) for b in bits)
                for t in range(policy.tables)
                for bits in [range(policy.bits)]
            )
            result[at] += met if met >= 2 else 0
    return np.where(result > 0, result, -np.inf)


SCORES = {
    "exact_topk": exact_topk,
    "hata": hata,
    "quest": quest,
    "loki": loki,
    "magicpig": magicpig,
}


def selected(name, policy, policy_params, keys, queries, sample) -> list[int]:
    """The positions of ``keys [n, H]`` that ``queries [G, H]`` read, in ascending order."""
    count, page = len(keys), policy.page_size
    if not count:
        return []
    scores = SCORES[name](policy, policy_params, keys, queries, sample)
    recent = max(policy.recent, 1) if page > 1 else policy.recent
    # Of pages, as many as the recent positions may lie in.
    first, last = -(-policy.sinks // page), min(recent, -(-(recent - 1) // page) + 1)
    pages = -(-count // page)
    always = {p for p in range(pages) if p < first or p >= pages - last}
    budget = policy.budget
    if isinstance(budget, float):
        budget = max(math.ceil(budget * count / page), first + last)
    else:
        budget //= page
    ranked = sorted(range(len(scores)), key=lambda i: (i not in always, -scores[i], i))
    pages = [i for i in ranked if i in always or scores[i] > -np.inf][:budget]
    return sorted(p for i in pages for p in range(page * i, min(page * (i + 1), count)))
