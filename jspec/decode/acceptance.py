"""How far drafts are accepted: in all rows that a choice has met, and in each row of a session."""

from __future__ import annotations

import numpy as np

MEMORY = 128.0  # steps after which a count weighs half
PRIOR_STEPS = 8.0  # weight of other rows' rates, in steps of a row
HORIZON = 512  # most tokens of a row to plan for: stop tokens may end it earlier


class AcceptanceCounts:
    """How often a count of accepted draft tokens that is at least i exceeds i.

    ``begun``, ``gone_on`` float64 ``[*rows, longest]``: how many steps had at least i, and how many
    of these at least i + 1. Older steps weigh less.
    """

    def __init__(self, *shape: int) -> None:
        self.begun, self.gone_on = np.zeros(shape), np.zeros(shape)

    def add(self, at_least: np.ndarray, steps: int) -> None:
        """Add ``at_least [*rows, gamma + 1]`` of so many steps: how many had at least 0, 1, ... of
        them.
        """
        gamma, fade = at_least.shape[-1] - 1, 0.5 ** (steps / MEMORY)
        for before, new in (self.begun, at_least[..., :-1]), (self.gone_on, at_least[..., 1:]):
            before[..., :gamma] = fade * before[..., :gamma] + new

    def rates(self, first: float) -> np.ndarray:
        """The rate ``gone_on / begun``, float64 ``[longest]``.

        The prior of each is the rate before it, that of the first ``first``.
        """
        rates, rate = np.zeros_like(self.begun), first
        for i, (begun, gone_on) in enumerate(zip(self.begun, self.gone_on, strict=True)):
            rates[i] = rate = (gone_on + rate) / (begun + 1)
        return rates

    def rates_with_prior(self, others: np.ndarray) -> np.ndarray:
        """The rates of each row, with ``others`` as their prior, of the weight of `PRIOR_STEPS`."""
        return (self.gone_on + PRIOR_STEPS * others) / (self.begun + PRIOR_STEPS)


def mean(rates: np.ndarray) -> np.ndarray:
    """The mean count where it goes on at these ``rates [..., gamma]``, and ends at gamma."""
    return np.cumprod(rates, axis=-1).sum(axis=-1)


class RowAcceptance:
    """How many draft tokens each row of a session accepted.

    Args:
        batch: Rows.
        longest: The largest gamma.
        steps: Steps of a chunk.
        together: Whether all rows are waited for, and none is replaced when it has ended.
    """

    def __init__(self, batch: int, longest: int, steps: int, *, together: bool) -> None:
        self.accepted = AcceptanceCounts(batch, longest)
        self.steps, self.together = steps, together

    def saw(self, gamma: int, accepted: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Add a chunk, with arguments as in `GammaChoice.saw`.

        A row whose request came after the chunk began is not ``live``. Returns how many draft
        tokens were accepted of each row whose first drafts these are, int ``[n, gamma + 1]``.
        """
        up_to = np.arange(gamma + 1)
        counts = ((accepted[..., None] >= up_to) & live[..., None]).sum(axis=0)
        is_new = live.any(axis=0) & ~self.accepted.begun.any(axis=1)
        self.accepted.add(counts, len(accepted))
        return counts[is_new] if gamma else counts[:0]

    def renew(self, rows: list[int]) -> None:
        """Forget ``rows``, which other requests take."""
        self.accepted.begun[rows] = self.accepted.gone_on[rows] = 0.0

    def tokens(self, gamma: int, left: np.ndarray, others: np.ndarray) -> float:
        """Tokens of a step of a row, by the steps that rows need to their end.

        In the mean, or, where they are waited for ``together``, by the row that ends last. A row
        that ends within a chunk idles until the chunk ends.

        Args:
            gamma: Most draft tokens of a step.
            left: int ``[B]``: most tokens that each row still commits, 0 where it has ended.
            others: ``[n, longest]``: rates of other rows, any of which a row may be like.
        """
        ahead = np.clip(left, 0, HORIZON)
        ahead = ahead if ahead.any() else np.full_like(left, HORIZON)
        rates = self.accepted.rates_with_prior(others[:, None])[..., :gamma]
        chunks = np.ceil(ahead / (1 + mean(rates)) / self.steps)  # [n, B]
        needed = (ahead > 0).sum() * mean_of_last(chunks) if self.together else chunks.mean(0).sum()
        return float(ahead.sum() / (self.steps * needed))


def mean_of_last(chunks: np.ndarray) -> float:
    """The expected largest number over all rows.

    Each of a row's ``chunks [n, B]`` is as likely as the others.
    """
    numbers = np.arange(chunks.max())[:, None, None]
    return float((1 - (chunks <= numbers).mean(axis=1).prod(axis=1)).sum())
