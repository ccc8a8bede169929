"""FP8 checkpoints with a scale for each block, against the definition, one weight at a time."""

import itertools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.models.checkpoint import load_model
from jspec.models.errors import CheckpointError
from jspec.models.safetensors_file import StoredTensor
from tests.models.goldens import GOLDEN
from tests.models.helpers import assert_equal, edit_config, parameters

FP8 = np.dtype(jnp.float8_e4m3fn)
NAMES = {FP8: "F8_E4M3", np.dtype(np.float32): "F32", np.dtype(np.int32): "I32"}
LARGEST = 448  # of E4M3
ROWS, COLUMNS = 8, 12  # neither divides the sizes of all weights
CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [ROWS, COLUMNS],
}


def is_linear(name: str) -> bool:
    return name.endswith(("_proj.weight", "_with_mqa.weight"))


def blocks_of(shape: tuple[int, ...]):
    return itertools.product(range(-(-shape[0] // ROWS)), range(-(-shape[1] // COLUMNS)))


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file with FP8, which the numpy functions of safetensors do not write."""
    header, begin = {}, 0
    for name, x in tensors.items():
        offsets = [begin, begin := begin + x.nbytes]
        header[name] = {"dtype": NAMES[x.dtype], "shape": x.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    content = [len(text).to_bytes(8, "little"), text, *(x.tobytes() for x in tensors.values())]
    (path / "model.safetensors").write_bytes(b"".join(content))


@pytest.fixture
def both(tmp_path):
    """A model in FP8, and the same one in float32 with each weight times its block's scale."""
    fp8, plain = (shutil.copytree(GOLDEN / "deepseek_v3", tmp_path / n) for n in ("fp8", "plain"))
    stored, right = {}, {}
    for name, x in load_file(plain / "model.safetensors").items():
        stored[name] = right[name] = x
        if not is_linear(name):
            continue
        whole = np.zeros(x.shape, np.float32)
        codes = np.zeros(x.shape, FP8)
        scales = np.zeros((-(-x.shape[0] // ROWS), -(-x.shape[1] // COLUMNS)), np.float32)
        for i, j in blocks_of(x.shape):
            at = np.s_[i * ROWS : (i + 1) * ROWS, j * COLUMNS : (j + 1) * COLUMNS]
            scales[i, j] = np.abs(x[at]).max() / LARGEST
            codes[at] = (x[at] / scales[i, j]).astype(FP8)
        for m, n in np.ndindex(x.shape):
            whole[m, n] = np.float32(codes[m, n]) * scales[m // ROWS, n // COLUMNS]
        stored[name], stored[f"{name}_scale_inv"], right[name] = codes, scales, whole
    write(fp8, stored)
    save_file(right, plain / "model.safetensors")
    edit_config(fp8, quantization_config=CONFIG)
    return fp8, plain, stored


@pytest.mark.parametrize("nbytes", [1, 100, 1 << 20])
def test_weights_are_their_codes_times_the_scales(both, nbytes, monkeypatch):
    """Whatever rows of a tensor are read at once."""
    fp8, plain, _ = both
    right = parameters(load_model(plain))
    blocks = StoredTensor.blocks
    monkeypatch.setattr(
        StoredTensor, "blocks", lambda tensor, row_mask=None: blocks(tensor, nbytes, row_mask)
    )
    assert_equal(load_model(fp8), right)
    changed = parameters(load_model(GOLDEN / "deepseek_v3"))
    name = "layers.1.mlp.experts.down.kernel"
    assert 0 < np.abs(right[name] - changed[name]).max() < 0.1 * np.abs(changed[name]).max()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fmt": "e5m2"}, "fmt='e5m2' is not supported; jspec reads e4m3"),
        ({"weight_block_size": None}, "weight_block_size=None must be two positive int32"),
        ({"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two"),
        ({"weight_block_size": [0, 128]}, r"weight_block_size=\[0, 128\] must be two"),
        ({"weight_block_size": [True, 1.5]}, r"weight_block_size=\[True, 1.5\] must be two"),
        ({"weight_block_size": [16, 12]}, r"_scale_inv' has shape .*, but config.json asks for"),
    ],
    ids=str,
)
def test_settings_that_are_refused(both, change, message):
    fp8, _, _ = both
    edit_config(fp8, quantization_config=CONFIG | change)
    with pytest.raises(CheckpointError, match=message):
        load_model(fp8)


def test_tensors_that_are_refused(both):
    fp8, _, stored = both
    name = "model.layers.0.mlp.down_proj.weight"
    config = json.loads((fp8 / "config.json").read_text())
    edit_config(fp8, quantization_config=...)
    with pytest.raises(CheckpointError, match=r"is float8_e4m3fn, but config.json has no quant"):
        load_model(fp8)
    (fp8 / "config.json").write_text(json.dumps(config))
    scale = f"{name}_scale_inv"
    write(fp8, {key: x for key, x in stored.items() if key != scale})
    with pytest.raises(CheckpointError, match=r"_scale_inv' \(4, 4\) is missing"):
        load_model(fp8)
    write(fp8, stored | {scale: stored[scale].astype(np.int32)})
    with pytest.raises(CheckpointError, match="int32"):
        load_model(fp8)
    embedding = "model.embed_tokens.weight"
    write(fp8, stored | {embedding: stored[embedding].astype(FP8)})
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight' .* is float8_e4m3fn, but conf"
    ):
        load_model(fp8)
