"""Vegas, and two drafters of others that read what verification attended to."""

from __future__ import annotations

import dataclasses

from jspec.policies.budgeted import check_page
from jspec.policies.guided import Guided


@dataclasses.dataclass(frozen=True)
class Vegas(Guided):
    """The keys of the largest mean logit of the first and the bonus token (Yue et al. 2026, eq. 3).

    One selection a layer, shared by its heads. ``collect="all"`` is their reference (eq. 2).
    """


@dataclasses.dataclass(frozen=True)
class SparseSpec(Guided):
    """The keys of the largest mean weight over all draft tokens, a KV head by itself.

    PillarAttn (Zhao et al. 2025, arXiv 2512.01278).
    """

    collect: str = "all"
    score: str = "weight"
    per_head: bool = True


@dataclasses.dataclass(frozen=True)
class SpecExtend(Guided):
    """Whole pages of ``page`` positions, by their mean weight for the last accepted token.

    The retrieval of SpecExtend (Cha et al. 2025, arXiv 2505.20776), in each layer by itself and for
    the model's own draft, as Yue et al. 2026 compare it; the page of the last position is always
    read. ``budget`` is in positions and is rounded down to pages.
    """

    collect: str = "last"
    score: str = "weight"
    page: int = 32

    def __post_init__(self) -> None:
        check_page(self.page)
        super().__post_init__()

    @property
    def page_size(self) -> int:
        return self.page
