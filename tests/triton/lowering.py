"""Lowering for an H100 that need not be there."""

from importlib.util import find_spec

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jspec.triton.call import not_installed

PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def lower(function, *arguments) -> str:
    """The module that XLA would compile for an H100, Triton's part compiled to PTX."""
    if reason := not_installed():
        pytest.skip(reason)
    if jax.default_backend() == "gpu":
        pytest.skip("stands in for a GPU, and there is one")
    if not any(map(find_spec, PLUGINS)):
        pytest.skip(f"none of {' and '.join(PLUGINS)} installed")
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    checks = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    with jax.sharding.use_abstract_mesh(mesh):
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)(
            *arguments
        )
    return exported.mlir_module()
