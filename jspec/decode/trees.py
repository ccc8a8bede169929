"""What a step does in addition for a draft that is a tree."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jspec.cache import Cache
from jspec.decode.draft import Drafted
from jspec.decode.settings import StepConfig
from jspec.decode.state import DecodeState, StepRecord
from jspec.ops.tree import check_parents
from jspec.typing import Array


def check_tree(config: StepConfig, state: DecodeState, drafted: Drafted) -> None:
    """Raise `ValueError` where a draft that is a tree cannot be verified."""
    assert drafted.parents is not None
    check_parents(drafted.parents, drafted.tokens.shape)
    reasons = {
        "it has logits, and the tokens of a tree must be certain": drafted.logits is not None,
        "its collect_policy collects from a chain": config.draft.collect_policy is not None,
        "keys in the host's memory cannot be packed": state.cache.storage is not None,
        f'exact="{config.exact}" takes chains alone, as attention sums committed keys and nodes '
        "apart, in another order than plain decoding": config.exact is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f"{config.draft} drafts a tree, but {reason}; draft without parents")


def of_path(x: Array, path: Array | None) -> Array:
    """``x [B, gamma + 1, ...]``, which has an entry for each node, at the root and along a path.

    ``path``: as `jspec.ops.verify_tree` returns it, None where the draft is a chain.
    """
    if path is None:
        return x
    nodes = jnp.pad(path, ((0, 0), (1, 0)))
    return jnp.take_along_axis(x, nodes.reshape(*nodes.shape, *[1] * (x.ndim - 2)), axis=1)


@jax.named_scope("packing")
def pack(cache: Cache, begin: Array, path: Array, record: StepRecord) -> Cache:
    """The cache with the accepted nodes of ``path [B, gamma]`` after the root at ``begin [B]``."""
    index = jnp.arange(1, path.shape[1] + 1, dtype=jnp.int32)[None]
    return cache.moved(begin[:, None] + path, begin[:, None] + index, record.accepted)
