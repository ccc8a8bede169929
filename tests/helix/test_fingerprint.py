"""What processes compare: digests of values, and fingerprints of models."""

import pytest

from jspec.models.errors import CheckpointError
from jspec.models.fingerprint import SAMPLE_BYTES, fingerprint
from jspec.processes import digest


def test_a_digest_tells_values_apart_and_no_addresses():
    class Plain:
        pass

    assert digest([Plain(), 1]) == digest([Plain(), 1]) != digest([Plain(), 2])


def test_a_fingerprint_tells_models_apart(tmp_path):
    names = ("config.json", "model.safetensors", "notes.md")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_bytes(bytes(range(256)) * 8 * SAMPLE_BYTES)
    one, two = fingerprint(tmp_path / "one"), tmp_path / "two"
    (two / "notes.md").write_text("other")
    assert fingerprint(two) == one
    content = bytearray((two / "model.safetensors").read_bytes())
    (two / "model.safetensors").write_bytes(content[:-1])
    assert fingerprint(two) != one
    content[-1] ^= 1
    (two / "model.safetensors").write_bytes(content)
    assert fingerprint(two) != one
    with pytest.raises(CheckpointError, match="nowhere is no directory"):
        fingerprint(tmp_path / "nowhere")


def test_the_fingerprint_of_a_gguf_file_is_of_its_tokenizer_too(tmp_path):
    model, tokenizer = tmp_path / "model.gguf", tmp_path / "tokenizer.json"
    model.write_bytes(b"weights")
    tokenizer.write_text("{}")
    result = fingerprint(model)
    (tmp_path / "other.gguf").write_bytes(b"other weights")
    assert fingerprint(model) == result
    tokenizer.write_text("[]")
    assert fingerprint(model) != result
