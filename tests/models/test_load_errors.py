"""Bad files are refused with an error that names the file, the tensor and the shapes."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec import CheckpointError, load_model
from jspec.checks import shown
from jspec.models import weights
from jspec.models.errors import on_one_line
from jspec.models.files import read_json
from jspec.models.safetensors_file import stored_tensors
from tests.models.helpers import LLAMA, edit_config, edit_tensors, shapes_of, write_checkpoint

UP = "model.layers.1.mlp.up_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def checkpoint(tmp_path):
    return write_checkpoint(tmp_path / "model")


def refused(path, *parts):
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    for part in parts:
        assert str(part) in str(caught.value)


def test_paths_that_are_no_model(tmp_path):
    refused(tmp_path / "absent", "absent does not exist; pass a local model directory or GGUF file")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "file is neither a directory nor named *.gguf; pass")
    way_out = "pass a directory that has one, or a GGUF file"
    refused(tmp_path, "is no model: it has neither config.json", way_out)


def test_directories_without_safetensors(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, checkpoint, "has neither model.safetensors nor", "never pickles")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n", "config.json is empty; correct it, or copy or download it again"),
        (b"{", "config.json is not valid JSON"),
        (b'{"a": 1,}', "line 1 column 9 (char 8); correct it, or copy or download it again"),
        (b"\xff\xfe", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is nested too deeply"),
        (b"[]", "config.json must hold a JSON object, got list; correct it, or"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config.json is not valid JSON"),
        (b"{}", "config.json: model_type is missing"),
        (b'{"model_type": "llama", "model_type": "qwen3"}', "'model_type' appears twice in an"),
        (b'{"a": {"\\u001b": 1, "\\u001b": 2}}', r"'\x1b' appears twice in an object"),
        (b'{"model_type": "\\u001b[31m\\n"}', r"model_type='\x1b[31m\n' is unknown"),
    ],
)
def test_bad_json(checkpoint, content, message):
    (checkpoint / "config.json").write_bytes(content)
    refused(checkpoint, message)


def test_messages_show_values_on_one_short_line():
    assert shown("a\nb\x1b\u202e") == r"'a\nb\x1b\u202e'"
    assert shown("x" * 9000) == f"'{'x' * 37}...{'x' * 38}'"
    assert len(shown([["y" * 100] * 100] * 100)) == 80
    assert on_one_line("a\n  b\x1b[3m" + "z" * 9000) == r"a b\x1b[3m" + "z" * 187 + "..."


def test_what_is_no_file(checkpoint):
    (checkpoint / "generation_config.json").symlink_to("/dev/zero")
    load_model(checkpoint)
    (checkpoint / "config.json").unlink()
    os.mkfifo(checkpoint / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is no regular file"):
        read_json(checkpoint / "config.json")


def test_huge_json(tmp_path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 27)
    with pytest.raises(CheckpointError, match=f"{path} has {1 << 27} bytes"):
        read_json(path)


def test_missing_tensor(checkpoint):
    edit_tensors(checkpoint, **{UP: None})
    refused(checkpoint, checkpoint, UP, "(20, 16)")


def test_many_missing_tensors_are_counted(checkpoint):
    names = [name for name in shapes_of(LLAMA) if ".mlp." in name or "_proj" in name]
    edit_tensors(checkpoint, **dict.fromkeys(names))
    refused(checkpoint, f"and {len(names) - 4} more")


@pytest.mark.parametrize("layers", [1, 3, 1024])
def test_another_number_of_layers(checkpoint, layers):
    edit_config(checkpoint, num_hidden_layers=layers)
    refused(checkpoint, checkpoint, "has tensors of 2 layers", f"num_hidden_layers={layers}")


def test_misshapen_tensor(checkpoint):
    edit_tensors(checkpoint, **{UP: np.zeros((16, 20), np.float32)})
    refused(checkpoint, checkpoint / "model.safetensors", UP, "(16, 20)", "(20, 16)")


def test_extra_tensor(checkpoint):
    edit_tensors(checkpoint, **{"model.layers.0.mlp.up_proj.bias": np.zeros(20, np.float32)})
    refused(checkpoint, checkpoint / "model.safetensors", "layers.0.mlp.up_proj.bias", "(20,)")


def test_integer_tensor(checkpoint):
    edit_tensors(checkpoint, **{UP: np.zeros((20, 16), np.int32)})
    refused(checkpoint, checkpoint / "model.safetensors", UP, "int32")


def test_harmless_extras(checkpoint):
    frequencies = np.zeros(4, np.float32)
    edit_tensors(checkpoint, **{"model.layers.0.self_attn.rotary_emb.inv_freq": frequencies})
    load_model(checkpoint)


def test_tied_head(checkpoint):
    edit_config(checkpoint, tie_word_embeddings=True)
    refused(checkpoint, "model.safetensors", HEAD, EMBEDDING, "(24, 16)", "tie_word_embeddings")
    tensors = load_file(checkpoint / "model.safetensors")
    edit_tensors(checkpoint, **{HEAD: tensors[EMBEDDING]})
    assert load_model(checkpoint).head is None


def test_unknown_family(checkpoint):
    edit_config(checkpoint, model_type="gpt2")
    refused(checkpoint, checkpoint / "config.json", "model_type='gpt2'", "qwen3")


# safetensors files that lie


def header(entries, data: int = 8, *, length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


def tensor(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


LIES = {
    "empty": b"",
    "short": b"1234567",
    "longer header than file": header({}, 0, length=1 << 40),
    "header too long": header({}, length=2**64 - 1),
    "no json": header(b"{" * 20),
    "no utf-8": header(b"\xff" * 20),
    "deep json": header(b"[" * 200_000),
    "list": header(b"[]"),
    "entry": header({"x": 1}),
    "no shape": header({"x": {"dtype": "F32"}}),
    "negative": header({"x": tensor(shape=(-2,))}),
    "float": header({"x": tensor(shape=(2.0,))}),
    "one offset": header({"x": tensor(offsets=(8,))}),
    "too small": header({"x": tensor(shape=(3,))}),
    "huge": header({"x": tensor(shape=(2**62, 2**62))}),
    "past the end": header({"x": tensor(shape=(4,), offsets=(0, 16))}),
    "overlap": header({"x": tensor(), "y": tensor()}),
    "hole": header({"x": tensor(offsets=(4, 12))}, 12),
    "trailing": header({"x": tensor()}, 9),
    "huge sizes": header({"x": tensor(shape=[2**62] * 300)}),
    "many digits": header(b'{"x": {"dtype": "F32", "shape": [%b]}}' % (b"9" * 5000)),
    "escapes": header(b'{"x": {"dtype": "\x1b[31m\n"}}'),
    "unknown dtype": header({"x": tensor(dtype="\x1b[31m" + "F" * 9000)}),
    "utf-16": header('{"x": 1}'.encode("utf-16")),
}


@pytest.mark.parametrize("name", LIES)
def test_lying_safetensors(tmp_path, name):
    path = tmp_path / "model.safetensors"
    path.write_bytes(LIES[name])
    with pytest.raises(CheckpointError, match="is damaged or no safetensors file") as caught:
        stored_tensors(path)
    assert str(path) in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_dtype_that_jspec_does_not_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"\x1b[31m\nx": tensor(dtype="F4", shape=(16,))}))
    with pytest.raises(CheckpointError, match=r"tensor '\\x1b\[31m\\nx' has dtype F4, which jspec"):
        stored_tensors(path)


def test_a_shape_of_many_sizes_is_one_short_line(checkpoint):
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:end])
    entries[UP]["shape"] += [1] * 400_000
    path.write_bytes(header(entries, 0) + content[end:])
    with pytest.raises(CheckpointError, match="has shape") as caught:
        load_model(checkpoint)
    assert len(str(caught.value)) < len(str(path)) + 400


def test_truncated_file(checkpoint):
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    refused(checkpoint, path, "file not fully covered", "copy or download it again")


def test_any_bit_of_a_header_may_flip(tmp_path):
    """Whatever a damaged header says, it is refused or describes tensors within the file."""
    path = tmp_path / "model.safetensors"
    save_file({"x": np.ones((2, 3), np.float32), "y": np.ones(4, np.float16)}, path)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for _ in range(500):
        damaged = bytearray(content)
        damaged[rng.integers(len(content) - 32)] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            tensors = stored_tensors(path)
        except CheckpointError:
            continue
        for x in tensors:
            if x.shape:
                assert sum(block.nbytes for _, block in x.blocks()) == x.nbytes


# shards


@pytest.fixture
def sharded(checkpoint):
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    write_index(checkpoint, {name: file for file, part in halves.items() for name in part})
    return checkpoint


def write_index(path, weight_map):
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load(sharded):
    load_model(sharded)


def test_the_limit_of_an_index(sharded, monkeypatch):
    size = (sharded / "model.safetensors.index.json").stat().st_size
    monkeypatch.setattr(weights, "INDEX_LIMIT", size)
    load_model(sharded)
    monkeypatch.setattr(weights, "INDEX_LIMIT", size - 1)
    refused(sharded, "index.json", f"has {size} bytes, more than the {size - 1} that it may have")


def test_missing_shard(sharded):
    (sharded / "b.safetensors").unlink()
    refused(sharded, sharded / "b.safetensors", "is missing", "model.safetensors.index.json")


@pytest.mark.parametrize(
    "shard",
    [
        "../a.safetensors",
        "/etc/passwd",
        "sub/a.safetensors",
        "..\\a",
        "..",
        "",
        "a\0.safetensors",
        # Names that begin as one should.
        "a.safetensors/../../b.safetensors.bin",
        "a.safetensors/b",
        "a.safetensors\n",
        "a.safetensors.pkl",
        "a" * 241 + ".safetensors",
        3,
    ],
)
def test_shards_outside_the_directory(sharded, shard):
    write_index(sharded, dict.fromkeys(shapes_of(LLAMA), shard))
    refused(sharded, "model.safetensors.index.json", shown(shard), "no file name in")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "{"])
def test_bad_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "model.safetensors.index.json")


def test_a_tensor_in_two_shards(sharded):
    tensors = load_file(sharded / "a.safetensors") | load_file(sharded / "b.safetensors")
    save_file(tensors, sharded / "b.safetensors")
    refused(sharded, sharded / "a.safetensors", sharded / "b.safetensors", "a second time")
