"""Which devices a command runs on, and what it prints where it has several processes."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from jspec.cli.errors import INTERRUPTED, fail, interrupted
from jspec.helix.hosts import Hosts
from jspec.helix.mesh import HelixConfig
from jspec.policies.named import made
from jspec.processes import ExchangeError

MAX_VIRTUAL = 256  # virtual CPU devices; each has threads of its own


def named_mesh(text: str) -> HelixConfig:
    """The mesh that ``kvp=2,tpa=1`` names.

    Raises `ValueError` for an unknown setting, and where the machine has too few devices.
    """
    config: HelixConfig = made(HelixConfig, "--helix", text, text, strategy="helix")
    _ = config.mesh
    return config


def take_devices(virtual: int | None, hosts: str | None) -> None:
    """Start JAX on virtual CPU devices, or with the processes of other hosts.

    Args:
        virtual: number of virtual CPU devices; None uses the real devices.
        hosts: settings of `jspec.helix.Hosts`, such as
            ``coordinator=10.0.0.1:1234,processes=2,index=0``, or ``auto`` with or without settings
            after it; None is one process.

    Raises:
        ValueError: JAX already runs on other devices, or as `jspec.helix.Hosts`.
    """
    import jax

    joined = None
    if hosts is not None:
        joined = made(Hosts, "--hosts", hosts, hosts.removeprefix("auto"))
    if virtual is not None:
        if not 1 <= virtual <= MAX_VIRTUAL:
            bound = "at least 1" if virtual < 1 else f"at most {MAX_VIRTUAL}"
            raise ValueError(f"--devices {virtual} must be {bound}")
        with contextlib.suppress(RuntimeError):  # it runs already
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", virtual)
    if joined is not None:
        joined.join()
    if virtual is not None and (
        jax.default_backend() != "cpu" or jax.local_device_count() != virtual
    ):
        raise ValueError(
            f"--devices {virtual}: JAX already runs on {jax.local_device_count()} devices of "
            f"{jax.default_backend()}; unset XLA_FLAGS and JAX_NUM_CPU_DEVICES, or start afresh"
        )


@contextlib.contextmanager
def one_voice(hosts: str | None) -> Iterator[None]:
    """With ``hosts``, nothing is printed inside but what Python prints in process 0.

    JAX's collectives on CPUs print on stdout too, of their connections. An error that leaves the
    block is for the caller to print, in each process. After Ctrl-C, and where an exchange with the
    others fails, as when one of them has ended, the process ends here: others cannot go on.
    """
    import jax

    if hosts is None:
        yield
        return
    try:
        with _quiet_but(jax.process_index() == 0):
            yield
    except (jax.errors.JaxRuntimeError, ExchangeError) as error:
        if str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        _leave(fail(f"an exchange with other processes failed, one may have ended: {error}"))
    except KeyboardInterrupt:
        _leave(interrupted())


@contextlib.contextmanager
def _quiet_but(speaks: bool) -> Iterator[None]:
    """Nothing is printed inside but what Python prints, and that only where this process
    ``speaks``."""
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as stack:
        os.dup2(nowhere.fileno(), 1)
        stack.callback(os.close, stdout)
        stack.callback(os.dup2, stdout, 1)
        if speaks:
            text = io.TextIOWrapper(os.fdopen(os.dup(stdout), "wb"), errors="replace")
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(text)))
        else:
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def leave_interrupted(code: int, hosts: str | None) -> None:
    """With ``hosts``, end the process where ``code`` says that Ctrl-C has ended the command."""
    if hosts is not None and code == INTERRUPTED:
        _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process at once: JAX's exit handlers wait for other processes, and may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
