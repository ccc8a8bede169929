"""The rivals: right on the bench's workload where PyTorch is installed, a reason where not."""

import dataclasses
import importlib
from functools import partial

import jax
import numpy as np
import pytest

from bench import attention as suite
from bench import caches, workload
from bench import gather as selecting
from bench import select as selection
from bench.program import Absent, Program
from bench.rivals import attention, cub, fused, gather, pack, sampling, select, verify
from bench.settings import Settings
from jspec.ops.verify import greedy_xla

EVERY = Settings()
TOKENS = workload.make_tokens(9, 8, 0.9)  # in some rows all eight stand
KV = workload.make_kv(9, 8, 16)
PACKED = workload.expected_packed(KV, TOKENS.accepted)[0]
VERIFIES = partial(jax.jit(greedy_xla), *TOKENS.inputs)
NAMES = {
    "verify": ["torch", "torch_graph"],
    "pack": ["torch"],
    "two_step": ["torch+torch", "cuda+torch"],
    "sampling-one-hot": ["torch", "flashinfer"],
    "sampling-logits": ["torch", "flashinfer"],
    "attention": list(attention.NAMES),
    "gather": list(gather.NAMES),
    "select": list(select.NAMES),
}
ON_GPUS = {"cudnn": "cuDNN needs a GPU"} | dict.fromkeys(
    cub.NAMES, "CUB's batched top-k needs an NVIDIA GPU and the default device is a cpu"
)  # reasons of those that no package is asked for first
ATTENTION = suite.case("B=2,S=128,heads=4/2,H=16,T=3")
GATHER = selecting.case("B=2,S=128,n=20,heads=4/2,H=16,T=3")


def make(which: str, settings: Settings = EVERY, *, wrong: bool = False):
    """The rivals of an operation, or the same with something else expected of them."""
    packed = PACKED + 1 if wrong else PACKED
    if which == "verify":
        accepted = (TOKENS.accepted + wrong) % 9
        return verify.verify(dataclasses.replace(TOKENS, accepted=accepted), settings)
    if which == "pack":
        return pack.pack(KV, TOKENS.accepted, packed, settings)
    if which == "two_step":
        return fused.two_step(TOKENS, KV, packed, VERIFIES, settings)
    if which == "attention":
        data = caches.dense(ATTENTION)
        reads = data.positions + int(not wrong)
        check = caches.Check.of(data.q, data.k, data.v, reads)
        return attention.attention(data, check.output, settings)
    if which == "gather":
        return gather.gather(selecting.inputs(GATHER), lambda out: not wrong, settings)
    if which == "select":
        scores = np.random.default_rng(0).integers(0, 40, (3, 200)).astype(np.float32)
        return select.select(scores, selection.expected(scores + wrong * scores[::-1], 9), settings)
    logits = workload.make_logits(40, 5, 500, one_hot=which == "sampling-one-hot")
    uniforms = np.random.default_rng(0).random((3, 40, 6), np.float32)
    found = sampling.sampling(logits, uniforms, settings)
    if wrong:
        uniforms[:] = 1 - uniforms
    return found


@pytest.mark.parametrize("which", NAMES)
def test_where_a_package_is_missing_each_rival_is_a_row_with_its_reason(which, monkeypatch):
    there = importlib.import_module

    def missing(name):
        if name.startswith("jax"):
            return there(name)
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("bench.rivals.common.importlib.import_module", missing)
    found = make(which)
    assert [rival.name for rival in found] == NAMES[which]
    reasons = {rival.name: rival.reason for rival in found if isinstance(rival, Absent)}
    assert reasons.keys() == set(NAMES[which])
    for name, reason in ON_GPUS.items():
        assert reasons.pop(name, reason) == reason
    assert all("not installed" in reason for reason in reasons.values())
    assert not any(rival.failed for rival in found)


def test_only_the_rivals_that_are_wanted_are_made():
    assert make("verify", Settings(only=("xla", "torch_graph")))[0].name == "torch_graph"
    assert [rival.name for rival in make("two_step", Settings(only=("torch",)))] == NAMES[
        "two_step"
    ]
    assert make("pack", Settings(only=("xla",))) == []


@pytest.mark.parity
@pytest.mark.parametrize("which", NAMES)
def test_rivals_pass_the_check_and_the_check_can_fail(which):
    pytest.importorskip("torch")
    for right, wrong in zip(make(which), make(which, wrong=True), strict=True):
        if isinstance(right, Absent):
            assert right.name not in ("torch", "torch+torch", "cuda+torch")
            continue
        assert isinstance(wrong, Program)
        outputs = right.wait(right.start())
        assert right.check(outputs)
        assert not wrong.check(outputs)
