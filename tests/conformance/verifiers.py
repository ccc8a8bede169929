"""Verifiers in NumPy, right ones and wrong ones, for the tool to tell apart."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

Fault = Literal[
    "", "shared", "residual", "top-p", "bfloat16", "block residual", "eager", "reused", "23 bits"
]


@dataclasses.dataclass(frozen=True)
class InNumpy:
    """Drafts and verifies by the token or the block rule, with one fault at most."""

    rule: Literal["token", "block"] = "token"
    fault: Fault = ""

    def __call__(self, draft_logits, target_logits, *, temperature, top_p, seeds, positions):
        count, gamma, _ = draft_logits.shape
        every = np.arange(count)
        numbers = self.numbers(seeds, positions, gamma)
        p = softmax(target_logits, temperature, top_p)
        q = softmax(draft_logits, temperature, top_p)
        drawn_from = q
        if self.fault == "bfloat16":
            rounded = draft_logits.astype(jnp.bfloat16).astype(np.float32)
            drawn_from = softmax(rounded, temperature, top_p)
        judged = softmax(draft_logits, temperature, 1.0) if self.fault == "top-p" else q
        draft = draw(drawn_from, numbers[:, 0, :gamma])
        accept = numbers[:, 0 if self.fault == "shared" else 1, :gamma]
        chance, chances, chosen = np.ones(count), [np.ones(count)], np.zeros(count, np.int64)
        for i in range(gamma):
            token = draft[:, i]
            ratio = p[every, i, token] / judged[every, i, token]
            ratio = 1.02 * ratio if self.fault == "eager" else ratio
            chance = np.minimum((chance if self.rule == "block" else 1) * ratio, 1)
            chances.append(chance)
            if self.rule == "token":
                chosen += (chosen == i) & (accept[:, i] < chance)
        if self.rule == "block":
            for i in range(1, gamma + 1):
                share = chances[i]
                if i < gamma:
                    mass = np.maximum(chances[i][:, None] * p[:, i] - judged[:, i], 0).sum(axis=-1)
                    share = mass / np.maximum(mass + 1 - chances[i], 1e-300)
                chosen = np.where(accept[:, i - 1] < share, i, chosen)
        next_p = p[every, chosen]
        remaining = np.ones(count)
        if self.rule == "block" and self.fault != "block residual":
            remaining = np.stack(chances, 1)[every, chosen]
        if gamma:
            over = np.maximum(
                remaining[:, None] * next_p - judged[every, np.minimum(chosen, gamma - 1)], 0
            )
            some = (chosen < gamma) & (over.sum(axis=-1) > 1e-12) & (self.fault != "residual")
            next_p = np.where(
                some[:, None], over / np.maximum(over.sum(-1, keepdims=True), 1e-300), next_p
            )
        following = draw(next_p, numbers[every, 2, chosen])
        out = np.pad(draft, ((0, 0), (0, 1)), constant_values=-1)
        index = np.arange(gamma + 1)
        out = np.where(index == chosen[:, None], following[:, None], out)
        return np.where(index <= chosen[:, None], out, -1)

    def numbers(self, seeds, positions, gamma):
        """Uniform numbers ``[N, role, gamma + 1]``; with the fault, those of positions alone."""
        if self.fault == "reused":
            at = 32  # positions of any law
            whole = np.random.default_rng(int(seeds[0])).random((len(seeds), 3, at))
            index = positions[:, None] + np.arange(gamma + 1)
            return np.take_along_axis(whole, index[:, None], axis=2)
        rng = np.random.default_rng([int(seeds[0]), *np.bincount(positions).tolist()])
        numbers = rng.random((len(seeds), 3, gamma + 1))
        return np.floor(numbers * 2**23) / 2**23 if self.fault == "23 bits" else numbers


def careless(draft_logits, target_logits, *, temperature, top_p, seeds, positions):
    """Commits a token of the target's law, whatever was drafted: lossless, and of no use."""
    rng = np.random.default_rng([int(seeds[0]), *np.bincount(positions).tolist()])
    law = softmax(target_logits[:, 0], temperature, top_p)
    token = draw(law, rng.random(len(seeds)))
    blank = np.full(target_logits.shape[:2], -1)
    return np.concatenate([token[:, None], blank[:, 1:]], axis=1)


def softmax(logits, temperature, top_p):
    if temperature == 0:
        return (np.arange(logits.shape[-1]) == logits.argmax(-1)[..., None]).astype(np.float64)
    if 0 in logits.shape:
        return logits.astype(np.float64)
    law = np.exp((logits - logits.max(-1, keepdims=True)) / np.float32(temperature))
    law /= law.sum(-1, keepdims=True)
    if top_p < 1:
        order = np.argsort(-law, axis=-1, kind="stable")
        falling = np.take_along_axis(law, order, -1)
        keep = np.cumsum(falling, -1) - falling < top_p
        law = np.where(np.take_along_axis(keep, np.argsort(order, -1), -1), law, 0)
        law /= law.sum(-1, keepdims=True)
    return law.astype(np.float64)


def draw(law, numbers):
    ends = np.cumsum(law, axis=-1)
    if ends.ndim == 2 and ends.shape[-1] > 1000:
        return np.array(
            [np.searchsorted(e, u * e[-1], "right") for e, u in zip(ends, numbers, strict=True)]
        )
    return (ends <= (numbers * ends[..., -1])[..., None]).sum(axis=-1)


token = InNumpy()
block = InNumpy("block")
shared = InNumpy(fault="shared")
residual = InNumpy(fault="residual")
top_p = InNumpy(fault="top-p")
bfloat16 = InNumpy(fault="bfloat16")
eager = InNumpy(fault="eager")
block_residual = InNumpy("block", "block residual")
reused = InNumpy("block", "reused")
few_bits = InNumpy(fault="23 bits")


def no_block(draft_logits, target_logits, **settings):
    """Blocks with holes."""
    return token(draft_logits, target_logits, **settings)[:, ::-1] * 0 - 1


def floats(draft_logits, target_logits, **settings):
    return token(draft_logits, target_logits, **settings).astype(np.float32)


class OwnStream(InNumpy):
    """Its random numbers are one stream of `numpy.random.default_rng`."""

    def __init__(self, seed: int):
        super().__init__()
        object.__setattr__(self, "rng", np.random.default_rng(seed))

    def numbers(self, seeds, positions, gamma):
        return self.rng.random((len(seeds), 3, gamma + 1))


def raises(draft_logits, target_logits, *, temperature, top_p, seeds, positions):
    return 1 / 0


def leaves(draft_logits, target_logits, *, temperature, top_p, seeds, positions):
    raise SystemExit(0)
