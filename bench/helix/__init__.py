"""Several GPUs of one host: whole steps, a layer's attention with its exchange, and messages."""

from __future__ import annotations

import dataclasses

from bench.helix.layer import LAYER
from bench.helix.messages import MESSAGE
from bench.helix.steps import STEP
from bench.suite import suite_of

SUITE = dataclasses.replace(
    suite_of(
        "helix",
        "steps and attention by KVP x TPA devices against tensor parallelism, Medha and gathered "
        "queries, and collectives by bytes",
        *(STEP, LAYER, MESSAGE),
    ),
    custom_clocks=True,
)
