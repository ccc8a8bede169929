"""What keeps Triton kernels from running is said, with the way out."""

import jax
import pytest

from jspec.extras import install_gpu
from jspec.triton import call


def test_missing_packages_are_named_where_there_is_a_gpu_for_them(monkeypatch):
    monkeypatch.setattr(call, "refuses_gpu", lambda least, who: None)
    monkeypatch.setattr(call, "find_spec", lambda name: None)
    assert call.refuses_triton() == f"triton and jax_triton not installed; {install_gpu('cuda13')}"
    monkeypatch.setattr(call, "find_spec", lambda name: None if name == "jax_triton" else name)
    assert call.refuses_triton() == f"jax_triton not installed; {install_gpu('cuda13')}"


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_machine_without_a_gpu_refuses(monkeypatch):
    monkeypatch.setattr(call, "find_spec", lambda name: None)  # to install them would not help
    assert call.refuses_triton() == "Triton needs an NVIDIA GPU and the default device is a cpu"


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        ("3.6.0", "jax-triton 0.4.1 needs triton>=3.7 and finds 3.6.0; pip install 'triton>=3.7'"),
        ("3.7.0", None),
        ("3.8.0.dev1", None),
    ],
)
def test_an_older_triton_than_jax_triton_needs_is_named(installed, reason, monkeypatch):
    versions = {"triton": installed, "jax-triton": "0.4.1"}
    monkeypatch.setattr(call, "version", versions.get)
    monkeypatch.setattr(call, "requires", lambda name: ["jax>=0.11.0", "triton>=3.7"])
    call.too_old.cache_clear()
    monkeypatch.setattr(call, "refuses_gpu", lambda least, who: None)
    monkeypatch.setattr(call, "not_installed", lambda: None)
    try:
        assert call.refuses_triton() == reason
    finally:
        call.too_old.cache_clear()
