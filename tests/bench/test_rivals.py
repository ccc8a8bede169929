"""The rivals: right on the bench's workload where PyTorch is installed, a reason where not."""

import dataclasses
import importlib

import numpy as np
import pytest

from bench import attention as suite
from bench import caches, workload
from bench.__main__ import SUITES
from bench.program import Absent, Program
from bench.rivals import attention, common, cub, sampling, select, verification
from bench.settings import Settings

EVERY = Settings()
TOKENS = workload.make_tokens(9, 8, 0.9)  # in some rows all eight stand
KV = workload.make_kv(9, 8, 16)
PACKED = workload.expected_packed(KV, TOKENS.accepted)[0]
NAMES = {
    "verify": list(verification.VERIFY),
    "pack": list(verification.PACK),
    "verify_and_pack": list(verification.VERIFY_AND_PACK),
    "sampling-one-hot": list(sampling.NAMES),
    "sampling-logits": list(sampling.NAMES),
    "attention": list(attention.NAMES),
    "gather": list(attention.GATHERED),
    "select": list(select.NAMES),
}
ON_GPUS = {"cudnn": "cuDNN needs a GPU"} | dict.fromkeys(
    cub.NAMES, "CUB's batched top-k needs an NVIDIA GPU and the default device is a cpu"
)  # reasons of those that no package is asked for first
ATTENTION = SUITES["attention"].case("B=2,S=128,heads=4/2,H=16,T=3")[1]
GATHER = SUITES["attention"].case("op=gathered_attention,B=2,S=128,n=20,heads=4/2,H=16,T=3")[1]


def makers(which: str, *, wrong: bool = False):
    """The rivals of an operation, or the same with something else expected of them."""
    packed = PACKED + 1 if wrong else PACKED
    if which == "verify":
        accepted = (TOKENS.accepted + wrong) % 9
        return verification.verify(dataclasses.replace(TOKENS, accepted=accepted))
    if which == "pack":
        return verification.pack(KV, TOKENS.accepted, packed)
    if which == "verify_and_pack":
        return verification.verify_and_pack(TOKENS, KV, packed)
    if which == "attention":
        if wrong:
            return attention.attention(caches.dense(ATTENTION), lambda out: False)
        return suite.attention_setup(ATTENTION).rivals
    if which == "gather":
        data = suite.selected_inputs(GATHER)
        return attention.gathered_attention(data, lambda out: not wrong)
    if which == "select":
        scores = np.random.default_rng(0).integers(0, 40, (3, 200)).astype(np.float32)
        falling = np.argsort(-scores - wrong * scores[::-1], axis=1, kind="stable")
        return select.select(scores, np.sort(falling[:, :9], axis=1).astype(np.int32))
    logits = workload.make_logits(40, 5, 500, one_hot=which == "sampling-one-hot")
    uniforms = np.random.default_rng(0).random((3, 40, 6), np.float32)
    rivals = sampling.sampling(logits, uniforms)
    if wrong:
        uniforms[:] = 1 - uniforms
    return rivals


def make(which: str, settings: Settings = EVERY, *, wrong: bool = False):
    """The programs of those that the settings select."""
    return common.each(makers(which, wrong=wrong), settings)


@pytest.mark.parametrize("which", NAMES)
def test_where_a_package_is_missing_each_rival_is_a_row_with_its_reason(which, monkeypatch):
    there = importlib.import_module

    def missing(name):
        if name.startswith("jax"):
            return there(name)
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("bench.rivals.common.importlib.import_module", missing)
    result = make(which)
    assert [rival.name for rival in result] == NAMES[which]
    reasons = {rival.name: rival.reason for rival in result if isinstance(rival, Absent)}
    assert reasons.keys() == set(NAMES[which]) - {"lax.top_k"}
    for name, reason in ON_GPUS.items():
        assert reasons.pop(name, reason) == reason
    assert all("not installed" in reason for reason in reasons.values())
    assert not any(rival.failed for rival in result if isinstance(rival, Absent))


def test_only_the_rivals_that_are_asked_for_are_made():
    assert make("verify", Settings(only=("xla", "torch_graph")))[0].name == "torch_graph"
    assert [rival.name for rival in make("verify_and_pack", Settings(only=("torch",)))] == NAMES[
        "verify_and_pack"
    ]
    assert make("pack", Settings(only=("xla",))) == []


@pytest.mark.parity
@pytest.mark.parametrize("which", NAMES)
def test_rivals_pass_the_check_and_the_check_can_fail(which):
    pytest.importorskip("torch")
    for right, wrong in zip(make(which), make(which, wrong=True), strict=True):
        if isinstance(right, Absent):
            assert right.name not in ("torch", "torch+torch")
            continue
        assert isinstance(wrong, Program)
        outputs = right.wait(right.start())
        assert right.check(outputs)
        assert not wrong.check(outputs)
