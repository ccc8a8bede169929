"""`SamplingParams.from_model`: what a model's generation_config.json recommends."""

import json

import pytest

from jspec.config import SamplingParams
from jspec.models.errors import CheckpointError


def from_file(path, **fields) -> SamplingParams:
    (path / "generation_config.json").write_text(json.dumps(fields))
    return SamplingParams.from_model(path)


def test_parameters_of_the_file(tmp_path):
    sampled = from_file(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert sampled == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, min_p=0.1)
    assert from_file(tmp_path, do_sample=True) == SamplingParams(temperature=1.0)
    assert from_file(tmp_path, temperature=0.6, top_k=20) == SamplingParams()
    assert from_file(tmp_path, do_sample=False, temperature=0.6) == SamplingParams()
    penalised = from_file(tmp_path, repetition_penalty=1.05, suppress_tokens=[3], min_length=None)
    assert penalised == SamplingParams(repetition_penalty=1.05, banned_tokens=(3,))
    assert from_file(tmp_path, min_new_tokens=4, suppress_tokens=None).min_new_tokens == 4
    assert from_file(tmp_path, max_new_tokens=7, eos_token_id=[1, 2]).max_new_tokens == 7
    changed = SamplingParams.from_model(tmp_path, max_new_tokens=9, seed=3)
    assert changed == SamplingParams(max_new_tokens=9, seed=3)
    (tmp_path / "generation_config.json").unlink()
    assert SamplingParams.from_model(tmp_path) == SamplingParams()
    (tmp_path / "model.gguf").touch()
    assert from_file(tmp_path, do_sample=True, top_k=5).top_k == 5
    assert SamplingParams.from_model(tmp_path / "model.gguf").top_k == 5


def test_what_jspec_lacks_is_named(tmp_path):
    with pytest.warns(UserWarning, match=r"does not implement \{'no_repeat_ngram_size': 3\}"):
        params = from_file(tmp_path, do_sample=True, no_repeat_ngram_size=3, typical_p=1.0)
    assert params == SamplingParams(temperature=1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_sample": 1}, "do_sample=1 must be true or false"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1 must be a positive integer"),
        ({"do_sample": True, "temperature": -1}, "temperature=-1 must be"),
        ({"do_sample": True, "top_p": "x"}, "top_p='x' must be"),
    ],
)
def test_malformed_files_are_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        from_file(tmp_path, **fields)


def test_a_path_that_is_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="is no model directory; pass a local one"):
        SamplingParams.from_model(tmp_path / "absent")
