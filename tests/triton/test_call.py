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
