"""Loading keeps one parameter on the host besides what is placed, measured in a fresh process."""

import json
import math
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jspec.models.families import model_config
from tests.models.gguf_files import write_model
from tests.models.helpers import LLAMA, apart, shapes_of, write_apart, write_checkpoint

# The largest tensor is among the last, when the others have been placed.
SIZES = {
    "vocab_size": 512,
    "hidden_size": 1024,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}

LOAD = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jspec import load_model

def memory(field):
    # ru_maxrss would also count the process that started this one.
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(field))

def place(name, shape):
    axes = [None] * (len(shape) - 1) + ["x"] if len(shape) > 1 else []
    return NamedSharding(mesh, PartitionSpec(*axes))

mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
small, large, dtype, sharded = sys.argv[1:]
sharding = place if sharded == "sharded" else None
load_model(small, dtype=dtype, sharding=sharding)
before = memory("VmRSS")
model = load_model(large, dtype=dtype, sharding=sharding)
print(json.dumps(memory("VmHWM") - before))
"""


pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads its memory from Linux's /proc"
)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """A small checkpoint to warm up with, and about 200 MB in float32 and 100 in bfloat16."""
    root = tmp_path_factory.mktemp("memory")
    config = {**LLAMA, **SIZES}
    paths = {"small": write_checkpoint(root / "small", intermediate_size=24)}
    for name, sizes in (("small format 2", {"intermediate_size": 24}), ("format 2", SIZES)):
        settings = {**LLAMA, **sizes}
        shapes = shapes_of(settings)
        ones = apart({key: np.ones(shape, ml_dtypes.bfloat16) for key, shape in shapes.items()})
        paths[name] = write_apart(root / name, model_config(settings), ones)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        name = np.dtype(dtype).name
        paths[name] = root / name
        paths[name].mkdir()
        (paths[name] / "config.json").write_text(json.dumps(config))
        # Ones, not zeros: pages of zeros could be shared and never count.
        tensors = {key: np.ones(shape, dtype) for key, shape in shapes_of(config).items()}
        save_file(tensors, paths[name] / "model.safetensors")
    for name, sizes in (("small gguf", {"intermediate_size": 32}), ("gguf", SIZES)):
        settings = {**LLAMA, **sizes}
        ones = {key: np.ones(shape, np.float32) for key, shape in shapes_of(settings).items()}
        paths[name] = write_model(root / f"{name}.gguf", settings, ones, "Q8_0")
    return paths


@pytest.mark.parametrize(
    ("stored", "dtype", "sharded", "copies"),
    [
        pytest.param("float32", "float32", "one", 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", "float32", "sharded", 1, marks=pytest.mark.slow),
        pytest.param("float32", "bfloat16", "sharded", 1, marks=pytest.mark.exhaustive),
        pytest.param("format 2", "float32", "one", 1.5, marks=pytest.mark.exhaustive),
        pytest.param("gguf", "bfloat16", "one", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_peak_memory(paths, stored, dtype, sharded, copies):
    """``copies`` on the host of the parameters; orbax adds a part, half of the largest.

    The largest is a layer's gate and up, two tensors of the file.
    """
    small = f"small {stored}" if stored in ("format 2", "gguf") else "small"
    arguments = map(str, (paths[small], paths[stored], dtype, sharded))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *arguments], capture_output=True, text=True, check=True
    )
    itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    sizes = [itemsize * math.prod(shape) for shape in shapes_of({**LLAMA, **SIZES}).values()]
    assert json.loads(done.stdout) <= sum(sizes) + (copies + 0.3) * 2 * max(sizes)
