"""The router of a mixture of experts: the experts of each token, and the tokens grouped by expert.

`route` is the public operation; ``xla`` is the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from jspec.dispatch import Backend, Case, Operation, always
from jspec.ops.norm import RMS
from jspec.parts import Experts
from jspec.typing import Array


class Routed(NamedTuple):
    """The result of `route`; a pair of a token and an expert that it chose is ``token * c +
    choice``.

    Attributes:
        chosen: int32 ``[M, c]``, the experts of each token, best first.
        weights: float32 ``[M, c]``, the weights of these experts.
        order: int32 ``[M * c]``, the pairs sorted by expert, those of one expert in their order.
        starts: int32 ``[E + 1]``, where the pairs of each expert start in ``order``, and one past
            the last.
    """

    chosen: Array
    weights: Array
    order: Array
    starts: Array


def route(
    x: Array,
    kernel: Array,
    bias: Array | None = None,
    correction: Array | None = None,
    *,
    norm: RMS | None = None,
    experts: Experts,
    implementation: str | None = None,
) -> Routed:
    """Choose experts for each token by the logits ``x @ kernel + bias``.

    All of it is float32; of equal scores the first expert's is the higher. For few tokens Triton
    does it in two launches.

    Args:
        x: ``[M, D]``, the tokens.
        kernel: ``[D, E]``.
        bias: ``[E]``, added to the logits.
        correction: ``[E]``, added to the scores by which experts are chosen, not to their weights.
        norm: applied to x before.
        experts: how many experts are chosen, and how they are scored.
        implementation: the backend by name; None is the best one.

    Returns:
        A `Routed`.

    Raises:
        ValueError: for shapes that do not fit together.
    """
    fits = x.ndim == 2 and kernel.shape == (x.shape[1], experts.routed)
    for vector in (bias, correction):
        fits = fits and (vector is None or vector.shape == (experts.routed,))
    if not fits:
        shapes = [None if vector is None else vector.shape for vector in (bias, correction)]
        raise ValueError(
            f"x {x.shape}, kernel {kernel.shape}, bias {shapes[0]} and correction {shapes[1]} must "
            f"be [M, D], [D, {experts.routed}], [{experts.routed}] and [{experts.routed}]"
        )
    return ROUTE(x, kernel, bias, correction, norm, experts=experts, implementation=implementation)


def route_xla(
    x: Array,
    kernel: Array,
    bias: Array | None,
    correction: Array | None,
    norm: RMS | None,
    *,
    experts: Experts,
) -> Routed:
    """The reference of `route`: the norm is rounded to the dtype of x."""
    x = x if norm is None else norm(x)
    float32 = jnp.float32
    logits = jnp.dot(x.astype(float32), kernel.astype(float32), precision=lax.Precision.HIGHEST)
    if bias is not None:
        logits += bias.astype(float32)[None]
    scores = jax.nn.softmax(logits) if experts.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores if correction is None else scores + correction.astype(float32)[None]
    if experts.chosen_groups < experts.groups:
        ranked = _within_groups(ranked, experts)
    chosen = lax.top_k(ranked, experts.chosen)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=1)
    if experts.normalized:
        weights /= weights.sum(axis=1, keepdims=True) + 1e-20
    pairs = chosen.reshape(-1)
    order = jnp.argsort(pairs, stable=True).astype(jnp.int32)
    counts = jnp.bincount(pairs, length=experts.routed)
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    return Routed(chosen, weights * experts.factor, order, starts)


def _within_groups(scores: Array, experts: Experts) -> Array:
    """``scores [M, routed]``, -inf in the groups that are not chosen."""
    grouped = scores.reshape(len(scores), experts.groups, -1)
    count = 1 if experts.group_score == "highest" else 2
    best = lax.top_k(grouped, count)[0].sum(axis=2)
    chosen_groups = lax.top_k(best, experts.chosen_groups)[1]
    is_chosen = (chosen_groups[:, :, None] == jnp.arange(experts.groups)[None, None]).any(axis=1)
    return jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(scores.shape)


def route_sizes(x: Array, kernel: Array, *args, experts: Experts) -> dict[str, int]:
    """The sizes that backends are ordered by; ``rows`` of x."""
    sizes = {"rows": len(x), "inputs": len(kernel)}
    return sizes | {"experts": experts.routed, "chosen": experts.chosen}


def _cases() -> list[Case]:
    """Both kinds of scores, every option of a router, ties, and groups of experts."""

    def case(name: str, rows: int, dtype: str, experts: Experts, *, tied: bool = False) -> Case:
        def made() -> tuple[Any, ...]:
            rng = np.random.default_rng(rows)

            def normal(*shape: int, scale: float = 1.0) -> Any:
                values = scale * rng.standard_normal(shape, np.float32)
                # Small whole numbers are exact, so that equal logits stay equal.
                values = np.rint(values) if tied else values
                return values.astype(jnp.dtype(dtype))

            x, kernel = normal(rows, 40), normal(40, experts.routed, scale=1 if tied else 0.2)
            if tied:
                kernel[:, 1::2] = kernel[:, ::2]
            bias = normal(experts.routed) if experts.bias else None
            correction = None
            if experts.corrected:
                correction = 0.2 * rng.standard_normal(experts.routed, np.float32)
            return x, kernel, bias, correction, None if tied else RMS(normal(40))

        return Case(name, made, {"experts": experts}, small=True)

    full = Experts(24, 5, 8, score="sigmoid", corrected=True, normalized=True, factor=2.5)
    groups = Experts(12, 3, 8, groups=4, chosen_groups=2, group_score="two_highest")
    return [
        case("softmax", 1, "float32", Experts(32, 4, 8, normalized=True, bias=True)),
        case("sigmoid", 7, "float32", full),
        case("half", 3, "bfloat16", Experts(20, 6, 8, factor=0.5)),
        case("tied", 9, "float32", Experts(16, 4, 8), tied=True),
        case("groups", 5, "float32", groups),
        case("all", 2, "float32", Experts(3, 3, 8)),
    ]


ROUTE = Operation(
    "route",
    {
        "xla": Backend("xla", route_xla, always),
        "triton": "jspec.triton.route:ROUTE",
    },
    route_sizes,
    _cases,
)
