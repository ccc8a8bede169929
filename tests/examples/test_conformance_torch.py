"""The example of a verifier in PyTorch is a right one."""

import pytest

from jspec.conformance import check, diagnosis


def test_it_holds():
    pytest.importorskip("torch")
    from examples.conformance_torch import verify

    laws = ("greedy", "one draft token", "top-p", "block")
    assert diagnosis(list(check(verify, laws, rows=5000))) is None
