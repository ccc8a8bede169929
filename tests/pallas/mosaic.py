"""Mosaic GPU kernels with no GPU: interpreted, and lowered for CUDA."""

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.pallas.mosaic import too_old


def interpret(function, *arguments):
    """``function(*arguments)``, its kernels run by Pallas's interpreter."""
    if reason := too_old():
        pytest.skip(reason)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        return jax.jit(function)(*arguments)


def lower(function, *arguments) -> str:
    """The module that XLA would compile for a GPU."""
    if reason := too_old():
        pytest.skip(reason)
    checks = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
    return exported(*arguments).mlir_module()
