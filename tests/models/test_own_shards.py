"""What a process reads of a checkpoint: the parts of its devices, and little else."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jspec.helix import HelixConfig
from jspec.helix.sharded import decoder_sharding
from jspec.models import checkpoint
from jspec.models.safetensors_file import StoredTensor, stored_tensors
from tests.models.goldens import GOLDEN
from tests.models.helpers import parameters

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
BLOCK = 64  # bytes


@dataclasses.dataclass(frozen=True)
class OfOther:
    """A sharding of which this process has ``mine`` of the devices alone."""

    sharding: jax.sharding.Sharding
    mine: tuple[int, ...]
    is_fully_addressable: bool = False

    def shard_shape(self, shape):
        return self.sharding.shard_shape(shape)

    def addressable_devices_indices_map(self, shape):
        result = self.sharding.devices_indices_map(shape)
        return {device: index for device, index in result.items() if device.id in self.mine}


def poisoned(shape, dtype=np.float64):
    """What is not read must not be looked at."""
    array = np.zeros(shape, dtype)
    if np.issubdtype(array.dtype, np.floating):
        array.fill(np.nan)
    return array


@pytest.mark.parametrize(
    ("name", "settings", "mine", "share"),
    [
        ("qwen3", {"kvp": 2, "tpa": 2}, (1,), 0.75),
        ("llama_int8", {"kvp": 2}, (1,), 0.85),
        ("deepseek_v3", {"kvp": 4, "ep": 2}, (2, 3), 0.75),
        ("deepseek_v3", {"kvp": 4, "ep": 4}, (0,), 0.65),
    ],
    ids=["heads", "int8", "grid", "experts"],
)
def test_a_process_reads_its_parts(name, settings, mine, share, monkeypatch):
    whole = parameters(checkpoint.load_model(GOLDEN / name))
    results, read = [], []
    blocks = StoredTensor.blocks

    def small(tensor: StoredTensor, row_mask: Any = None):
        for rows, block in blocks(tensor, BLOCK, row_mask):
            read.append(block.nbytes)
            yield rows, block

    def keep(array, sharding):
        index = list(sharding.addressable_devices_indices_map(array.shape).values())
        results.append([array[where].copy() for where in index] + [index])
        return jax.device_put(array)

    sharding = decoder_sharding(HelixConfig(**settings))
    monkeypatch.setattr(StoredTensor, "blocks", small)
    monkeypatch.setattr(checkpoint, "_place", keep)
    monkeypatch.setattr(np, "empty", poisoned)
    of_mine: Any = lambda name, shape: OfOther(sharding(name, shape), mine)  # noqa: E731
    checkpoint.load_model(GOLDEN / name, sharding=of_mine)
    assert len(results) == len(whole)
    for (*parts, indices), right in zip(results, whole.values(), strict=True):
        for part, index in zip(parts, indices, strict=True):
            np.testing.assert_array_equal(part, right[index])
    stored = (GOLDEN / name / "model.safetensors").stat().st_size
    assert 0.2 * stored < sum(read) < share * stored


def test_blocks_without_a_selected_row_are_not_read():
    stored = stored_tensors(GOLDEN / "qwen3" / "model.safetensors")
    tensor = next(x for x in stored if x.name == "model.embed_tokens.weight")
    whole = np.concatenate([block.copy() for _, block in tensor.blocks()])
    row_mask = np.zeros(len(whole), bool)
    row_mask[[7, 8, 40]] = True
    row = whole[0].nbytes
    result = [(rows, block.copy()) for rows, block in tensor.blocks(4 * row, row_mask)]
    assert [rows for rows, _ in result] == [slice(4, 8), slice(8, 12), slice(40, 44)]
    for rows, block in result:
        np.testing.assert_array_equal(block, whole[rows])
