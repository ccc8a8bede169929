"""HATA-off: HATA with keys and values in the host's memory (arXiv 2506.02572, appendix A.4)."""

from __future__ import annotations

import dataclasses

from jspec.policies.hata import Hata


@dataclasses.dataclass(frozen=True)
class HataOff(Hata):
    """HATA whose layers that select keep keys and values in the host's memory, codes on the device.

    It reads what `Hata` of the same settings reads, bit for bit. With ``predicts`` what a layer
    will read is predicted from the input of the layer before, and fetched while that computes;
    what the prediction missed is fetched when the layer knows.
    """

    predicts: bool = True

    def in_host(self, layer: int) -> bool:
        return self.keeps_in(layer)

    def predicts_layer(self, layer: int) -> bool:
        return self.predicts
