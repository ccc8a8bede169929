"""Shared by rivals: PyTorch if it is installed, programs of its functions, CUDA graphs.

Each rival is a `Program` of the same inputs as jspec's backends, or an `Absent` with the reason.
They run on the GPU where PyTorch sees one, else on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.program import Absent, Program, unavailable
from bench.settings import Settings

Check = Callable[[Any], bool]
Maker = Callable[[str], Program | Absent]


def each(makers: Mapping[str, Maker], settings: Settings) -> list[Program | Absent]:
    """The rivals that the settings select, by the last part of their names."""
    programs: list[Program | Absent] = []
    for name, maker in makers.items():
        if not settings.wants(name.rpartition("+")[2]):
            continue
        try:
            programs.append(maker(name))
        except Exception as error:
            programs.append(unavailable(name, error))
    return programs


def module(name: str) -> Any:
    """Import an optional package, when a rival is made."""
    return importlib.import_module(name)


def program(name: str, call: Callable[[], Any], check: Check) -> Program:
    torch = module("torch")

    def wait(outputs: Any) -> Any:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return outputs

    return Program(name, call, check, wait, alone=True)


def graph(eager: Program) -> Program | Absent:
    """The same kernels recorded once and replayed by one launch."""
    torch = module("torch")
    if not torch.cuda.is_available():
        return Absent(eager.name, "CUDA graphs need a GPU")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            eager.start()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = eager.start()

    def replay(recorded: Program = eager) -> Any:
        graph.replay()  # it reads the inputs in place, which `recorded` keeps
        return outputs

    return program(eager.name, replay, eager.check)


def tensor(x: np.ndarray) -> Any:
    torch = module("torch")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).to(where).view(torch.bfloat16)
    return torch.from_numpy(x).to(where)
