"""The processes of several hosts as one program, whose devices a mesh is made of."""

from __future__ import annotations

import dataclasses
import threading

import jax

from jspec.checks import check_sizes, present_fields, require, shown
from jspec.processes import check_devices, limit_steps


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The processes that decode together, one or more on each host.

    Args:
        coordinator: an address of process 0 that all processes reach, with a free port, as in
            ``10.0.0.1:1234``. None reads it from the environment of Slurm or Open MPI.
        processes: the number of processes; None as for ``coordinator``.
        index: index of this process, from 0; None as for ``coordinator``.
        start_timeout: seconds within which all processes must start.
        lost_timeout: seconds without a heartbeat after which a process counts as lost, which ends
            the other processes.
        step_timeout: seconds after which a program of `jspec.generate` or `jspec.Engine` that has
            not finished ends this process, with a line on stderr. It must exceed the time to
            compile and run any program, as each process compiles for itself. None waits forever.

    Raises:
        ValueError: the values do not fit together.
    """

    coordinator: str | None = None
    processes: int | None = None
    index: int | None = None
    start_timeout: int = 300
    lost_timeout: int = 60
    step_timeout: int | None = None

    def __post_init__(self) -> None:
        check_sizes(
            self,
            "start_timeout",
            "lost_timeout",
            *present_fields(self, "processes", "step_timeout"),
        )
        if self.index is not None:
            require(
                type(self.index) is int and 0 <= self.index < (self.processes or 2**31),
                f"index={shown(self.index)} must be a whole number from 0 on, below "
                f"processes={self.processes}",
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            require(
                bool(host) and port.isdecimal() and 0 < int(port) < 65536,
                f"coordinator={shown(self.coordinator)} must be an address and a port of process "
                "0, as in 10.0.0.1:1234",
            )

    def join(self) -> None:
        """Start `jax.distributed`, after which `jax.devices` lists the devices of all processes.

        Call it before any other function of JAX.

        Raises:
            ValueError: not all processes start in time, the environment lacks a value that is
                None, or hosts have different numbers of devices.
        """
        failures: list[Exception] = []
        # JAX aborts the process at its timeout, so it gets a longer one than ours, which raises.
        joining = threading.Thread(target=self._initialize, args=(failures,), daemon=True)
        joining.start()
        joining.join(self.start_timeout)
        of = "" if self.processes is None else f" of {self.processes}"
        if joining.is_alive():
            raise ValueError(
                f"not all{of} processes have met within start_timeout={self.start_timeout} "
                f"seconds{self._where}; start one for each index with the same coordinator, and "
                "let its port through firewalls"
            )
        if failures:
            raise ValueError(f"the processes cannot meet{self._where}: {failures[0]}")
        check_devices()
        limit_steps(self.step_timeout)

    @property
    def _where(self) -> str:
        return "" if self.coordinator is None else f" at {self.coordinator}"

    def _initialize(self, failures: list[Exception]) -> None:
        # It would catch SIGTERM, for checkpoints that decoding does not write.
        jax.config.update("jax_enable_preemption_service", False)
        settings = (self.coordinator, self.processes, self.index)
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.processes,
                self.index,
                # Slurm would give a process one GPU, also where a host has one process.
                cluster_detection_method=None if None in settings else "deactivate",
                initialization_timeout=self.start_timeout + 60,
                heartbeat_timeout_seconds=self.lost_timeout,
                shutdown_timeout_seconds=self.lost_timeout,
            )
        except Exception as error:
            failures.append(error)
