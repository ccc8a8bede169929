"""docs/trainers.md: its functions give the weights that `load_model` reads."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import jspec
from tests.models.goldens import GOLDEN
from tests.models.maxtext_goldens import FOLDER

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


@pytest.fixture(scope="module")
def page():
    """What the page's code blocks define."""
    names = {"__name__": "page"}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(code, "docs/trainers.md", "exec"), names)
    return names


def by_name(weights) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path(weights)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


def test_a_state_dict_is_loaded_through_memory(page, tmp_path):
    tensors = load_file(GOLDEN / "llama3" / "model.safetensors")
    model = page["load_state_dict"](tensors, GOLDEN / "llama3" / "config.json")
    expected = by_name(nnx.to_pure_dict(nnx.state(jspec.load_model(GOLDEN / "llama3"))))
    ours = by_name(nnx.to_pure_dict(nnx.state(model)))
    assert ours.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_array_equal(ours[name], x)


@pytest.mark.parametrize(("name", "llama"), [("llama3", True), ("qwen3", False)])
def test_parameters_of_maxtext_are_mapped(name, llama, page):
    """Those that MaxText's own converter made of a checkpoint give what is loaded from it."""
    params: dict = {}
    for path, x in load_file(FOLDER / f"{name}.safetensors").items():
        *groups, leaf = path.split("-")[1:]
        place = params
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = x
    model = jspec.load_model(GOLDEN / name)
    if name == "qwen3":  # its biases of outputs are not MaxText's
        config = dataclasses.replace(model.config, out_bias=False)
        weights = nnx.state(model)
        model = jspec.Decoder(config, rngs=nnx.Rngs(0))
        for layer in weights["layers"].values():
            del layer["attention"]["out"]["bias"]
        nnx.update(model, weights)
    ours = page["maxtext_weights"](params, model.config, llama=llama)
    named = by_name(ours)
    for path, x in by_name(nnx.to_pure_dict(nnx.state(model))).items():
        np.testing.assert_allclose(named.pop(path), x, rtol=3e-7, err_msg=path)
    assert not named
    engine = jspec.Engine(model, slots=1, capacity=32, draft=None)
    assert engine.update(ours) == 1
