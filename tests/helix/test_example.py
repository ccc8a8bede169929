"""The example's model has the tokens of one device."""

import runpy
from pathlib import Path

import jax
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "shard_map_experiment.py"


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
def test_the_example_says_that_all_meshes_are_as_one_device(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines] == ["True"] * 4
