"""On fewer than eight devices, such as GPUs, tests of larger meshes are skipped."""

import jax
import pytest


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    try:
        return (yield)
    except ValueError as error:
        if jax.device_count() < 8 and "devices and this machine has" in str(error):
            pytest.skip(str(error))
        raise
