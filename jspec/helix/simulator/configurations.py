"""How a model can be laid out over GPUs: every combination of the strategies that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from jspec.helix.simulator.shapes import ModelShape

STRATEGIES = ("tp", "ep", "medha", "helix")
BASELINES = ("tp", "ep", "medha")
BATCHES = tuple(2**i for i in range(12))
# Sixteen sizes an octave, and every size up to sixteen.
FINE_BATCHES = tuple(sorted({(16 + i) << octave >> 4 for octave in range(12) for i in range(16)}))


@dataclasses.dataclass(frozen=True)
class Configurations:
    """Arrays ``[n]`` that describe a layout each.

    ``strategy``: index into `STRATEGIES`. A stage of the pipeline of ``pp`` stages has
    ``kvp * tpa * dp`` GPUs for attention, the same as ``tpf * ep`` for the feed-forward, but for
    Medha's, whose feed-forward has ``tpf`` of them alone. ``batch``: rows of one stage at a time;
    as many are in each other stage. ``overlap``: whether Helix sends the outputs of some rows
    while others attend (HOP-B).
    """

    strategy: NDArray[np.int64]
    kvp: NDArray[np.int64]
    tpa: NDArray[np.int64]
    dp: NDArray[np.int64]
    tpf: NDArray[np.int64]
    ep: NDArray[np.int64]
    pp: NDArray[np.int64]
    batch: NDArray[np.int64]
    overlap: NDArray[np.int64]

    @property
    def stage(self) -> NDArray[np.int64]:
        """GPUs of a stage."""
        return self.kvp * self.tpa * self.dp

    @property
    def gpus(self) -> NDArray[np.int64]:
        """GPUs in all."""
        return self.stage * self.pp

    @property
    def users(self) -> NDArray[np.int64]:
        """Rows in all stages."""
        return self.batch * self.pp

    @classmethod
    def single(cls, strategy: str, batch: int, **fields: int) -> Configurations:
        """One layout; ``fields``: those that are not 1, or not 0 for ``overlap``."""
        names = [field.name for field in dataclasses.fields(cls)]
        values = dict.fromkeys(names, 1) | {"overlap": 0} | fields
        values |= {"strategy": STRATEGIES.index(strategy), "batch": batch}
        return cls(**{name: np.array([values[name]]) for name in names})

    def __len__(self) -> int:
        return len(self.batch)

    def of(self, *strategies: str) -> NDArray[np.bool_]:
        """Whether each layout is of one of ``strategies``, bool ``[n]``."""
        return np.isin(self.strategy, [STRATEGIES.index(name) for name in strategies])

    def one(self, index: int) -> dict[str, int | str | bool]:
        """The fields of the layout at ``index``, with ``gpus`` and ``users``."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = {name: int(x[index]) for name, x in fields.items()}
        return values | {
            "strategy": STRATEGIES[values["strategy"]],
            "overlap": bool(values["overlap"]),
            "gpus": int(self.gpus[index]),
            "users": int(self.users[index]),
        }


def configurations(
    shape: ModelShape, gpus: int, batches: Sequence[int] = BATCHES
) -> Configurations:
    """Enumerate the layouts over 1, 2, 4, ... up to ``gpus`` GPUs, with each of ``batches``.

    ``tp`` is tensor parallelism of one width, which copies the cache beyond the number of KV heads.
    ``ep`` splits rows over groups in attention, and experts over all GPUs of a stage; for mixtures
    of experts. ``medha`` splits the cache over all GPUs and the feed-forward over one group; for
    dense models. ``helix`` splits both over all GPUs, without copies of the cache.

    Args:
        shape: sizes of the model.
        gpus: the most GPUs of a layout.
        batches: rows of a stage.

    Raises:
        ValueError: ``gpus`` is below 1.
    """
    if gpus < 1:
        raise ValueError(f"gpus={gpus} must be at least 1")
    layouts = np.array(list(_layouts(shape, gpus)), np.int64)
    sizes = np.array(batches, np.int64)
    layouts = np.repeat(layouts, len(sizes), axis=0)
    batch = np.tile(sizes, len(layouts) // len(sizes))
    names = ("strategy", "kvp", "tpa", "dp", "tpf", "ep", "pp", "overlap")
    columns = dict(zip(names, layouts.T, strict=True)) | {"batch": batch}
    whole = batch % columns["dp"] == 0
    return Configurations(**{name: column[whole] for name, column in columns.items()})


def _layouts(shape: ModelShape, gpus: int) -> Iterator[tuple[int, ...]]:
    """Strategy, kvp, tpa, dp, tpf, ep, pp and overlap of each layout."""
    tp, ep, medha, helix = range(len(STRATEGIES))
    for stage in _powers(gpus):
        for pp in range(1, min(gpus // stage, shape.layers) + 1):
            if not shape.experts:
                yield tp, 1, stage, 1, stage, 1, pp, 0
                for tpa in _powers(stage // 2):
                    yield medha, stage // tpa, tpa, 1, tpa, 1, pp, 0
            for ranks in _powers(min(stage, shape.experts)) if shape.experts else [1]:
                tpf = stage // ranks
                if shape.experts:
                    yield tp, 1, stage, 1, tpf, ranks, pp, 0
                    for tpa in _powers(stage // 2):
                        yield ep, 1, tpa, stage // tpa, tpf, ranks, pp, 0
                for tpa in _powers(min(stage, shape.kv_heads)):
                    for overlap in (0, 1):
                        yield helix, stage // tpa, tpa, 1, tpf, ranks, pp, overlap


def _powers(limit: int) -> Iterator[int]:
    """1, 2, 4, ... up to ``limit``."""
    power = 1
    while power <= limit:
        yield power
        power *= 2
