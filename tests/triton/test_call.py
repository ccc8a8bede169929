"""What keeps Triton kernels from running is said, with the way out."""

import jax
import pytest

from jspec.triton import call


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(call, "find_spec", lambda name: None)
    assert call.refuses_triton().startswith("triton and jax_triton not installed; pip install")
    monkeypatch.setattr(call, "find_spec", lambda name: None if name == "jax_triton" else name)
    assert call.refuses_triton().startswith("jax_triton not installed; pip install")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_a_machine_without_a_gpu_refuses(monkeypatch):
    monkeypatch.setattr(call, "find_spec", lambda name: name)
    assert call.refuses_triton() == "Triton needs an NVIDIA GPU and the default device is a cpu"
