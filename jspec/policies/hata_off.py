"""HATA-off: HATA with keys and values in the host's memory (arXiv 2506.02572, appendix A.4)."""

from __future__ import annotations

import dataclasses

from jspec.cache.storage import HostStorage
from jspec.policies.hata import Hata


@dataclasses.dataclass(frozen=True)
class HataOff(Hata):
    """`Hata` with `HostStorage` from the first layer that selects; codes are on the device.

    It reads what `Hata` of the same settings reads, bit for bit. What a layer will read is
    predicted from the input of the layer before. The ``predicted`` share of the budget, that of the
    highest scores, is fetched while that layer computes; what the prediction missed is fetched when
    the layer knows. 0 predicts nothing, 1 fetches all of the prediction, as the paper does. With
    ``reuse`` what one step read stays on the device, and is not fetched again for the next one.
    """

    predicted: float = 0.75
    reuse: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.predicted <= 1:
            raise ValueError(f"predicted={self.predicted} must be a share of the budget in [0, 1]")

    @property
    def storage(self) -> HostStorage:
        return HostStorage(self.dense_layers, self.predicted, self.reuse)
