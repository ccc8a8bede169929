"""Whole steps of models that have fewer KV heads than there are GPUs, experts or latents.

Helix against tensor parallelism, which copies the cache there, on four GPUs. `bench.helix.steps`
has Qwen3-8B's shape with one and two KV heads at a million tokens, here it is at 256K. Of DeepSeek
R1, whose experts alone take 1.3 TB in bfloat16, there are as many layers as four GPUs of 80 GB hold
next to a row of a million tokens, in the share of memory that JAX takes by default.
"""

from __future__ import annotations

import dataclasses

from bench.helix.steps import STEP
from bench.suite import suite_of

ONE, TWO = "shape=qwen3-8b-1kv", "shape=qwen3-8b-2kv"
MOE, LITE = "shape=qwen3-30b-a3b", "shape=deepseek-v2-lite"
R1 = "shape=deepseek-r1,layers=10"  # 3 dense ones, and 7 of 256 experts: 168 GB
COPIES = "kvp=4,strategy=tp"  # of the whole cache
PAIRS = "kvp=2,tpa=2,strategy=tp"  # two copies of each half of it


def defaults() -> list[str]:
    """The cases of a shape and a size are neighbours: one device is computed once to check them."""
    groups = {
        f"{TWO},S=256K": ("kvp=2,tpa=2", "kvp=4", PAIRS, "kvp=2", "tpa=2"),
        f"{ONE},S=256K": ("kvp=4", COPIES, "kvp=4,strategy=medha", "kvp=2", "kvp=2,strategy=tp"),
        f"{ONE},S=256K,B=8": ("kvp=4", COPIES),
        f"{ONE},S=1024K,draft=vegas": ("kvp=4", COPIES),
        f"{MOE},S=1024K": ("kvp=4,ep=4", "kvp=2,tpa=2,ep=2", "tpa=4,ep=4"),
        f"{LITE},S=1024K": ("kvp=4,ep=4", "kvp=4", f"{COPIES},ep=4"),
        f"{LITE},S=256K,B=4": ("kvp=4,ep=4", f"{COPIES},ep=4"),
        f"{R1},S=1024K": ("kvp=4,ep=4", "kvp=4", f"{COPIES},ep=4"),
    }
    return [f"{sizes},{mesh}" for sizes, meshes in groups.items() for mesh in meshes]


def quick() -> list[str]:
    """A million tokens of each shape, by Helix and by tensor parallelism: about ten minutes."""
    groups = {
        TWO: ("kvp=2,tpa=2", PAIRS),
        ONE: ("kvp=4", COPIES),
        MOE: ("kvp=4,ep=4", "tpa=4,ep=4"),
        LITE: ("kvp=4,ep=4", f"{COPIES},ep=4"),
        R1: ("kvp=4,ep=4", f"{COPIES},ep=4"),
    }
    return [f"{shape},S=1024K,{mesh}" for shape, meshes in groups.items() for mesh in meshes]


SUITE = dataclasses.replace(
    suite_of(
        "helix_shapes",
        "whole steps on four GPUs of models with fewer KV heads, experts or latents: Helix against "
        "tensor parallelism, which copies the cache, and Medha",
        dataclasses.replace(
            STEP, gpu=defaults(), quick=quick(), cpu=["shape=tiny,B=2,S=256,kvp=4"]
        ),
    ),
    custom_clocks=True,
)
