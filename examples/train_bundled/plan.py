"""What a run consists of: model, stages, data and evaluation, at full size and for a smoke test."""

from __future__ import annotations

import dataclasses

from examples.train_bundled.batches import Stage
from examples.train_bundled.model import CONFIG
from jspec.config import LayerSpec, ModelConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """``scores`` maps evaluated lengths, in order of importance, to the rows of a forward pass.

    ``reserve`` seconds at the end of a run are for saving, export and evaluation, of which the last
    ``closing`` see no new task begun. ``needles`` and ``others`` are examples of each task and
    length.
    """

    config: ModelConfig
    stages: tuple[Stage, ...]
    scores: dict[int, int]
    text_length: int
    needles: int
    others: int
    corpus_bytes: int
    packages: tuple[str, ...]  # empty for all
    workers: int
    depth: int
    reserve: float
    closing: float

    def __post_init__(self) -> None:
        total = sum(stage.share for stage in self.stages)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"the shares of the stages add to {total}; they must add to 1")


FULL = Plan(
    config=CONFIG,
    stages=(
        Stage(1024, 256, 0.12, 0.25),
        Stage(4096, 64, 0.18, 0.25),
        Stage(8192, 32, 0.30, 0.375),
        Stage(32768, 8, 0.40, 0.5),
    ),
    scores={8192: 32, 32768: 8, 4096: 64, 16384: 16},
    text_length=8192,
    needles=100,
    others=50,
    corpus_bytes=256_000_000,
    packages=(),
    workers=10,
    depth=32,
    reserve=72.0,
    closing=8.0,
)

SMOKE = Plan(
    config=dataclasses.replace(
        CONFIG,
        hidden_size=64,
        intermediate_size=128,
        num_heads=2,
        layers=(LayerSpec(kv_heads=1, key_size=16, value_size=16),) * 2,
    ),
    stages=(Stage(1024, 2, 0.5, 0.5), Stage(1536, 1, 0.5, 0.5)),
    scores={1024: 4},
    text_length=1024,
    needles=2,
    others=1,
    corpus_bytes=2_000_000,
    packages=("absl-py", "chex", "etils", "opt-einsum", "optax", "rich"),
    workers=1,
    depth=4,
    reserve=10.0,
    closing=2.0,
)


def parse_stages(text: str) -> tuple[Stage, ...]:
    """Stages from ``context:rows:share:retrieval,...``."""
    stages = []
    for part in text.split(","):
        length, rows, share, retrieval = part.split(":")
        stages.append(Stage(int(length), int(rows), float(share), float(retrieval)))
    return tuple(stages)
