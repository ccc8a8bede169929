"""Rollouts for training: speed, GRPO to a reward, new weights, and prefills that are shared.

Each against something of the same run: Tunix's own sampler, a copy of the weights, or requests that
share nothing. ``--model`` names a real model; the bundled one is in its place.
"""

import dataclasses

from bench.rollouts.grpo import GRPO
from bench.rollouts.prefill import CONVERSATIONS, GROUP
from bench.rollouts.speed import SAMPLER
from bench.rollouts.weights import UPDATE
from bench.suite import suite_of

SUITE = dataclasses.replace(
    suite_of(
        "rollouts",
        "rollouts for training: tokens a second and GRPO against Tunix's sampler, new weights, "
        "prompts that begin alike",
        *(SAMPLER, GRPO, UPDATE, GROUP, CONVERSATIONS),
    ),
    custom_clocks=True,
)
