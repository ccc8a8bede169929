"""The time of one decoding step under each layout, from bytes, operations and messages.

The stages of a layer run one after another. A stage on a GPU takes the longer of the times of its
reads and its arithmetic (the roofline model); a collective takes a fixed time plus that of its
bytes on a link. Values that the paper does not state are fields of `Constants`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jspec.helix.simulator.configurations import Configurations
from jspec.helix.simulator.constants import CONSTANTS, Constants
from jspec.helix.simulator.shapes import Hardware, ModelShape

Floats = NDArray[np.float64]
# Of a layer in addition to attention, one after another: two norms, q k v, rotation and write,
# output, and the two matmuls of the feed-forward.
KERNELS = 7


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The times of a decoding step by part, and its memory, for each of n layouts.

    Attributes:
        projections: seconds of the attention projections, float64 ``[n]`` as all others.
        attention: seconds of attention and of the exposed part of its exchange.
        feed_forward: seconds of the feed-forward.
        collectives: seconds of all collectives but the exchange.
        rest: seconds of fixed costs and of the output head.
        hidden: seconds of the exchange that HOP-B hides; not part of ``total``.
        memory_gb: gigabytes of weights and cache on the fullest GPU.
    """

    projections: Floats
    attention: Floats
    feed_forward: Floats
    collectives: Floats
    rest: Floats
    hidden: Floats
    memory_gb: Floats

    @property
    def total(self) -> Floats:
        """Seconds between two tokens of a row."""
        return self.projections + self.attention + self.feed_forward + self.collectives + self.rest


def pipelined(
    compute: ArrayLike, message: ArrayLike, chunks: ArrayLike, fixed: ArrayLike = 0.0
) -> Floats:
    """The time of a computation in equal chunks, each sent while the next one is computed.

    HOP-B, figure 3 of Bhatia et al. 2025. One chunk overlaps nothing.

    Args:
        compute: time of the whole computation.
        message: time of the bytes of all messages.
        chunks: number of chunks.
        fixed: extra time of each message.

    Returns:
        The time from the start of the computation to the end of the last message, in the unit of
        the arguments, which broadcast.
    """
    count = np.asarray(chunks, float)
    one = np.asarray(compute, float) / count
    sent = np.asarray(message, float) / count + np.asarray(fixed, float)
    return one + (count - 1) * np.maximum(one, sent) + sent


def step_times(
    shape: ModelShape,
    hardware: Hardware,
    layouts: Configurations,
    context: float,
    constants: Constants = CONSTANTS,
    tokens: int = 1,
) -> StepTimes:
    """Estimate a decoding step for each layout.

    Args:
        shape: sizes of the model.
        hardware: rates of the machine.
        layouts: the n layouts.
        context: positions of a row.
        constants: constants of the cost model.
        tokens: tokens of a row in a pass; more than one verify drafts.

    Returns:
        Times and memory, each ``[n]``.
    """
    return _Step(shape, hardware, layouts, context, constants, tokens).times()


def attention_seconds(
    shape: ModelShape,
    hardware: Hardware,
    layouts: Configurations,
    context: float,
    constants: Constants = CONSTANTS,
    tokens: int = 1,
) -> Floats:
    """Estimate the attention of one layer: its kernel and the exposed part of its exchange.

    Args:
        shape: sizes of the model.
        hardware: rates of the machine.
        layouts: the n layouts.
        context: positions of a row.
        constants: constants of the cost model.
        tokens: tokens of a row in a pass; more than one verify drafts.

    Returns:
        Seconds, float64 ``[n]``.
    """
    attention, _ = _Step(shape, hardware, layouts, context, constants, tokens).attention()
    return attention + constants.attention_us * 1e-6


class FeedForwardCost(NamedTuple):
    """What feed-forward layers take of a GPU in a step.

    Attributes:
        seconds: Of reading weights and of arithmetic.
        collective_seconds: Of the messages.
        weights: Number of weights that the GPU has.
    """

    seconds: Floats
    collective_seconds: Floats
    weights: Floats


class _Step:
    """The parts of a step; sizes are of one GPU and one layer unless they say otherwise."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        layouts: Configurations,
        context: float,
        constants: Constants,
        tokens: int,
    ) -> None:
        self.shape, self.constants, self.context = shape, constants, context
        self.layouts, self.hardware = layouts, hardware
        self.is_helix, self.is_ep = layouts.of("helix"), layouts.of("ep")
        self.is_medha = layouts.of("medha")
        self.rows = layouts.batch / layouts.dp
        # In a pass: tokens of the rows of a GPU in attention, and of all rows of a stage.
        self.tokens, self.stage_tokens = self.rows * tokens, layouts.batch * tokens
        self.heads = np.ceil(shape.query_heads / layouts.tpa)
        # The output projection is split over all GPUs where the exchange leaves it so.
        self.out_ranks = np.where(self.is_helix, layouts.stage, layouts.tpa)

    def times(self) -> StepTimes:
        shape, layouts = self.shape, self.layouts
        queries, out = self.projection_sizes()
        projections = self.matmul(queries, self.tokens) + self.matmul(out, self.tokens)
        fixed = (KERNELS * self.constants.kernel_us + self.constants.attention_us) * 1e-6
        attention, hidden = self.attention()
        reduced = self.all_reduce(self.out_ranks, self.tokens * shape.hidden)
        feed_forward, messages, feed_forward_weights = self.feed_forward()
        layers = shape.layers
        head = self.matmul(shape.hidden * shape.vocabulary / layouts.stage, self.stage_tokens)
        hops = (layouts.pp - 1) * self.message(self.stage_tokens * shape.hidden)
        weights = (queries + out) * layers + feed_forward_weights
        weights = (
            weights * self.stages_share() + 2 * shape.hidden * shape.vocabulary / layouts.stage
        )
        return StepTimes(
            projections=projections * layers,
            attention=attention * layers,
            feed_forward=feed_forward,
            collectives=reduced * layers + messages + hops,
            rest=fixed * layers + head,
            hidden=hidden * layers,
            memory_gb=(weights * self.constants.bytes_per_value + self.cache_bytes()) / 1e9,
        )

    def stages_share(self) -> Floats:
        """The share of a model's layers that the fullest stage holds."""
        return np.ceil(self.shape.layers / self.layouts.pp) / self.shape.layers

    def cache_bytes(self) -> Floats:
        """Bytes of the cache on a GPU: rows of all stages, in the layers of one stage."""
        return self.cached() * self.layouts.pp * self.shape.layers * self.stages_share()

    def projection_sizes(self) -> tuple[Floats, Floats]:
        """Numbers of weights of the projections before and after attention."""
        shape, layouts = self.shape, self.layouts
        if shape.latent:
            rank = shape.query_rank or shape.hidden
            queries = rank * self.heads * (shape.nope + shape.rope)
            queries = queries + (shape.hidden * rank if shape.query_rank else 0)
            keys = shape.hidden * (shape.latent + shape.rope)
            absorbed = self.heads * shape.latent * (shape.nope + shape.value_size)
            size = shape.query_heads * shape.value_size
            return queries + keys + absorbed, size * shape.hidden / self.out_ranks
        kv = 2 * np.ceil(shape.kv_heads / layouts.tpa)
        queries = shape.hidden * (self.heads + kv) * shape.head_size
        size = shape.query_heads * shape.head_size
        return queries, size * shape.hidden / self.out_ranks

    def cached(self) -> Floats:
        """Bytes of the cache that a step reads."""
        shape, layouts = self.shape, self.layouts
        if shape.latent:
            values = np.full(len(layouts), shape.latent + shape.rope, float)
        else:
            values = 2 * np.ceil(shape.kv_heads / layouts.tpa) * shape.head_size
        positions = self.context / layouts.kvp
        return self.rows * values * positions * self.constants.bytes_per_value

    def attention(self) -> tuple[Floats, Floats]:
        """Seconds of attention with the exposed exchange, and of the hidden exchange."""
        shape, layouts = self.shape, self.layouts
        channels = 2 * shape.latent + shape.rope if shape.latent else 2 * shape.head_size
        operations = 2 * self.tokens * self.heads * self.context / layouts.kvp * channels
        arithmetic = self.arithmetic(operations) / self.constants.attention_share
        compute = np.maximum(self.read(self.cached()), arithmetic)
        value = shape.value_size if shape.latent else shape.head_size
        # A float32 log-sum-exp goes with each head's output.
        payload = self.tokens * self.heads * (value * self.constants.bytes_per_activation + 4)
        share = np.where(self.is_medha, layouts.kvp - 1, (layouts.kvp - 1) / layouts.kvp)
        sent = self.link(payload * share)
        sent = sent + np.where(layouts.kvp > 1, self.rows * self.constants.row_us * 1e-6, 0)
        fixed = np.where(layouts.kvp > 1, self.constants.exchange_us * 1e-6, 0)
        back = self.message(self.tokens * shape.hidden)  # Medha's next layer starts on all GPUs.
        back = np.where(self.is_medha & (layouts.kvp > 1), back, 0)
        sequential = span = compute + sent + fixed + back
        chunks = 2
        while chunks <= layouts.batch.max():
            able = (layouts.overlap > 0) & (layouts.kvp > 1) & (layouts.batch >= chunks)
            overlapped = pipelined(compute, sent, chunks, fixed)
            span = np.where(able, np.minimum(span, overlapped), span)
            chunks *= 2
        return span, sequential - span

    def feed_forward(self) -> FeedForwardCost:
        """The cost of the feed-forward of all layers."""
        shape, layouts = self.shape, self.layouts
        width = np.where(
            self.is_medha, layouts.tpf, np.where(self.is_ep, layouts.tpa, layouts.stage)
        )
        tokens = np.where(self.is_ep, self.tokens, self.stage_tokens)
        dense = 3 * shape.hidden * shape.ffn / width
        time = self.matmul(dense, tokens)
        messages = self.all_reduce(width, tokens * shape.hidden)
        if not shape.experts:
            layers = shape.layers
            return FeedForwardCost(time * layers, messages * layers, dense * layers)
        experts = self.experts(tokens)
        count, others = shape.dense_layers, shape.layers - shape.dense_layers
        return FeedForwardCost(
            time * count + experts.seconds * others,
            messages * count + experts.collective_seconds * others,
            dense * count + experts.weights * others,
        )

    def experts(self, shared_tokens: Floats) -> FeedForwardCost:
        """The cost of one layer of experts, which tokens choose uniformly.

        ``shared_tokens``: those that the shared experts of a GPU compute.
        """
        shape, layouts = self.shape, self.layouts
        size = 3 * shape.hidden * shape.expert_ffn
        expert_count = shape.experts / layouts.ep
        chosen = 1 - (1 - shape.experts_per_token / shape.experts) ** self.stage_tokens
        tokens = self.stage_tokens * shape.experts_per_token / layouts.ep
        time = np.maximum(
            self.read(expert_count * chosen * size / layouts.tpf * self.constants.bytes_per_value),
            self.arithmetic(2 * tokens * size / layouts.tpf),
        )
        shared = shape.shared_experts * size / np.where(self.is_ep, layouts.tpa, layouts.stage)
        time = time + self.matmul(shared, shared_tokens)
        hidden = self.stage_tokens * shape.hidden
        # Helix: an all-reduce inside each group, then an all-gather of the groups' sums or, where
        # that is less, of the outputs of the experts that a token chose.
        parts = np.minimum(layouts.ep, shape.experts_per_token)
        helix = self.all_reduce(layouts.tpf, hidden * parts / layouts.ep)
        helix = helix + self.gather(layouts.ep, hidden * parts)
        # Expert parallelism: GPUs with different rows send each token to its experts and back.
        by_token = 2 * self.gather(
            layouts.stage, shared_tokens * shape.experts_per_token * shape.hidden
        )
        by_token = by_token + self.all_reduce(layouts.tpf, hidden * parts / layouts.ep)
        return FeedForwardCost(
            time,
            np.where(self.is_ep, by_token, helix),
            expert_count * size / layouts.tpf + shared,
        )

    def matmul(self, weights: ArrayLike, tokens: ArrayLike) -> Floats:
        """Seconds of a matmul of ``tokens`` vectors with so many ``weights``."""
        weights = np.asarray(weights, float)
        return np.maximum(
            self.read(weights * self.constants.bytes_per_value),
            self.arithmetic(2 * weights * tokens),
        )

    def read(self, size: ArrayLike) -> Floats:
        """Seconds to read ``size`` bytes of memory."""
        rate = self.hardware.memory_gbps * 1e9 * self.constants.memory_share
        return np.asarray(size, float) / rate

    def arithmetic(self, operations: ArrayLike) -> Floats:
        """Seconds of so many floating-point operations."""
        rate = self.hardware.tflops * 1e12 * self.constants.arithmetic_share
        return np.asarray(operations, float) / rate

    def link(self, size: ArrayLike) -> Floats:
        """Seconds to send ``size`` bytes over a link, without latency."""
        rate = self.hardware.link_gbps * 1e9 * self.constants.link_share
        return np.asarray(size, float) / rate

    def message(self, values: ArrayLike) -> Floats:
        """Seconds to send so many activation ``values`` to one neighbour, with latency."""
        size = np.asarray(values, float) * self.constants.bytes_per_activation
        return self.constants.collective_us * 1e-6 + self.link(size)

    def gather(self, ranks: ArrayLike, values: ArrayLike) -> Floats:
        """Seconds of an all-gather, or an all-to-all, of ``values`` in all; 0 with one rank."""
        ranks, values = np.asarray(ranks, float), np.asarray(values, float)
        return np.where(ranks > 1, self.message((ranks - 1) / ranks * values), 0)

    def all_reduce(self, ranks: ArrayLike, values: ArrayLike) -> Floats:
        """Seconds of an all-reduce of ``values`` on each rank: each link carries them twice."""
        ranks, values = np.asarray(ranks, float), np.asarray(values, float)
        return np.where(ranks > 1, self.message(2 * (ranks - 1) / ranks * values), 0)


__all__ = [
    "StepTimes",
    "attention_seconds",
    "pipelined",
    "step_times",
]
