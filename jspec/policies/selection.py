"""What a policy selects in a layer, and the new tokens that a layer attends from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from jspec.ops.append import QKRope
from jspec.typing import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """The committed positions that the queries of a pass read in a layer, and how.

    Attributes:
        positions: int32 ``[B, n]``, shared by all heads, or ``[B, K, n]``: positions below the
            committed length, each once, -1 for none. None reads all of them.
        log_weights: Returns the log-weights of ``positions`` for queries ``q [B, T, N, H]``,
            float32 ``[B, T, N, n]``, as `jspec.ops.gathered_attention` takes them. A
            `jax.tree_util.Partial`, so that it is part of the pytree. None weighs all equally.
        key_rotation: float32 ``[B, n, H / 2]``: angles by which the keys at ``positions [B, n]``
            are rotated before they are read; None for none.
        slots: On a device that has some of a row only: the slots of ``positions`` and how many of
            them to read, as `jspec.policies.read.local_slots` returns. None where the layer that
            reads is to find them.
        num_layers: How many layers read ``positions``: the layer that selected them, and those
            after it. The other fields are for this layer alone.
    """

    positions: Array | None = None
    log_weights: Callable[[Array], Array] | None = None
    key_rotation: Array | None = None
    slots: tuple[Array, Array] | None = None
    num_layers: int = dataclasses.field(default=1, metadata={"static": True})


class NewTokens(NamedTuple):
    """The projections of a layer for the tokens of a pass.

    Attributes:
        q: ``[B, T, N, H]``: queries.
        k: ``[B, T, K, H]``: keys.
        v: ``[B, T, K, H']``: values; None where they are part of the keys.
        qk_rope: Norms and rotates queries and keys; None where that is done.
        positions: int32 ``[B, T]``, -1 for padding.
    """

    q: Array
    k: Array
    v: Array | None
    qk_rope: QKRope | None
    positions: Array

    @property
    def columns(self) -> dict[str, Array]:
        """Keys and values by the names of the cache's columns."""
        return {"keys": self.k} if self.v is None else {"keys": self.k, "values": self.v}

    def rotated(self) -> NewTokens:
        """The tokens with normed and rotated queries and keys."""
        if self.qk_rope is None:
            return self
        q, k = self.qk_rope(self.q, self.k)
        return self._replace(q=q, k=k, qk_rope=None)
