"""What a machine's GPU is found to be."""

import types

import jax
import pytest

from jspec.gpu import refuses_gpu


@pytest.fixture
def pretend(monkeypatch):
    """Makes the default device the one given."""

    def put(platform: str, **device) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(**device)])

    return put


@pytest.mark.parametrize(
    ("capability", "refused"), [("7.5", True), ("8.0", False), ("9.0", False), ("10.0", False)]
)
def test_compute_capabilities_are_compared_as_numbers(pretend, capability, refused):
    pretend("gpu", compute_capability=capability, device_kind="NVIDIA X")
    expected = f"Triton needs compute capability 8.0 and NVIDIA X has {capability}"
    assert refuses_gpu((8, 0), "Triton") == (expected if refused else None)


def test_other_devices_are_named(pretend):
    pretend("tpu")
    assert refuses_gpu((8, 0), "Triton").endswith("the default device is a tpu")
    pretend("gpu", compute_capability="gfx942", device_kind="MI300X")
    assert refuses_gpu((8, 0), "Triton").endswith("the default device is MI300X")
    pretend("gpu", device_kind="X")
    assert refuses_gpu((8, 0), "Triton").endswith("the default device is X")
