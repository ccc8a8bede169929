"""Which devices a command runs on."""

from __future__ import annotations

from jspec.helix.mesh import HelixConfig
from jspec.policies.named import made


def named_mesh(text: str) -> HelixConfig:
    """The mesh that ``kvp=2,tpa=1`` names.

    Raises `ValueError` for an unknown setting, and where the machine has too few devices.
    """
    config: HelixConfig = made(HelixConfig, "--helix", text, text, strategy="helix")
    _ = config.mesh
    return config


def take_virtual_devices(count: int) -> None:
    """Have JAX run on ``count`` virtual CPU devices.

    Raises `ValueError` where JAX runs already, on others.
    """
    import jax

    if count < 1:
        raise ValueError(f"--devices {count} must be at least 1")
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # it runs already
        pass
    if jax.default_backend() != "cpu" or jax.device_count() != count:
        raise ValueError(
            f"--devices {count}: JAX already runs on {jax.device_count()} devices of "
            f"{jax.default_backend()}; unset XLA_FLAGS and JAX_NUM_CPU_DEVICES, or start afresh"
        )
