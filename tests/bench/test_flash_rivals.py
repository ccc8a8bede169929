"""What the rivals of attention are told: their libraries' functions stand in as plain NumPy."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import softmax

from bench import attention as suite
from bench.__main__ import SUITES
from bench.program import Program
from bench.rivals import flash


def case(text):
    return SUITES["attention"].case(text)[1]


SHAPE = "B=2,S=64,heads=4/2,H=128"
CASES = {
    "one-token": case(SHAPE),
    "ragged": case(f"{SHAPE},T=3,lengths=ragged"),
    "shared": case(f"op=gathered_attention,{SHAPE},n=20,T=3"),
    "per-head": case(f"op=gathered_attention,{SHAPE},n=20,T=3,indices=per-head"),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
BUILT = SimpleNamespace(CONFIG={"build_flags": {flash.PAGED_OFF: False}})


def attended(q, k, v, lengths, table, causal):
    """One query and head at a time over rows ``[B, n]`` of a table of pages, None for none."""
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(q.shape[:3]):
        head = n * k.shape[2] // q.shape[2]
        of_row = [x[b] if table is None else x[table[b]].reshape(-1, *x.shape[2:]) for x in (k, v)]
        observed = lengths[b] - (q.shape[1] - 1 - t if causal else 0)
        keys, values = (x[:observed, head] for x in of_row)
        out[b, t, n] = softmax(keys @ q[b, t, n] * q.shape[-1] ** -0.5) @ values
    return out


def rival(name, case):
    """The rival of that name at a case, and whether its output is right there."""
    setup = suite.attention_setup(case) if "lengths" in case else suite.gathered_setup(case)
    return setup.rivals[name](name)


def test_the_fastest_number_of_splits_is_one_that_is_right(monkeypatch):
    def made(name, right):
        return Program(name, lambda: name, lambda out: right, lambda out: out)

    times = {"slow": 3, "fast": 2, "wrong": 1}
    monkeypatch.setattr(flash, "wall", lambda program, trials: [times[program.name]] * trials)
    programs = [made(name, name != "wrong") for name in times]
    assert flash.fastest(iter(programs)).name == "fast"
    assert flash.fastest(programs[2:]).name == "wrong"


@pytest.fixture
def torch(monkeypatch):
    """PyTorch that says that it has a GPU, with nothing to wait for."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(flash, "_workspace", lambda: None)
    return torch


@pytest.mark.parity
@EVERY_CASE
def test_flash_attention_through_pytorch_is_told_what_to_read(case, torch, monkeypatch):
    def attend(q, k, v, *, cache_seqlens, causal, num_splits, pack_gqa, page_table=None):
        assert pack_gqa is (True if q.shape[2] > k.shape[2] else None)
        table = None if page_table is None else page_table.numpy()
        q, k, v = (x.float().numpy() for x in (q, k, v))
        return torch.from_numpy(attended(q, k, v, cache_seqlens.numpy(), table, causal))

    interface = SimpleNamespace(flash_attn_with_kvcache=attend)
    packages = {"torch": torch, "fa3_fwd_interface": interface, "fa3_fwd_config": BUILT}
    monkeypatch.setattr(flash, "module", packages.__getitem__)
    result = rival("fa3", case)
    assert result.check(result.wait(result.start()))


@pytest.mark.parity
@EVERY_CASE
def test_flashinfer_is_told_what_to_read(case, torch, monkeypatch):
    class Wrapper:
        def __init__(self, workspace, layout, *, backend):
            assert (layout, backend) == ("NHD", "fa2")

        def plan(self, queries, begins, which, last, heads, kv_heads, size, page, **settings):
            assert {x.dtype for x in (queries, begins, which, last)} == {torch.int32}
            assert settings["q_data_type"] == torch.bfloat16
            self.causal, self.tokens = settings["causal"], int(queries[1])
            ends = begins.tolist()
            self.table = [which[a:b].tolist() for a, b in itertools.pairwise(ends)]
            self.lengths = [
                (len(row) - 1) * page + end
                for row, end in zip(self.table, last.tolist(), strict=True)
            ]
            self.shape = (heads, kv_heads, size, page)

        def run(self, q, cache, *, out):
            assert self.shape == (q.shape[1], *cache[0].shape[2:], cache[0].shape[1])
            k, v = (x.float().numpy() for x in cache)
            rows = q.float().numpy().reshape(-1, self.tokens, *q.shape[1:])
            result = attended(rows, k, v, self.lengths, self.table, self.causal)
            return out.copy_(torch.from_numpy(result.reshape(q.shape)))

    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(flash, "module", {"torch": torch, "flashinfer": library}.__getitem__)
    result = rival("flashinfer", case)
    assert result.check(result.wait(result.start()))
