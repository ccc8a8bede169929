"""Bad files are refused with an error that names the file, the tensor and the shapes."""

import json
import os
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec import CheckpointError, load_model
from jspec.models import files, weights
from jspec.models.errors import on_one_line, quoted
from jspec.models.files import TensorFile, read_json
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
    refused(tmp_path / "absent", "absent does not exist; pass a local model directory")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "file is no directory")
    refused(tmp_path, "is no model: it has neither config.json")


def test_directories_without_safetensors(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, checkpoint, "has neither model.safetensors nor", "never pickles")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "config.json is not valid JSON"),
        (b"\xff\xfe", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is nested too deeply"),
        (b"[]", "config.json must hold a JSON object, got list"),
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
    assert quoted("a\nb\x1b\u202e") == r"'a\nb\x1b\u202e'"
    assert quoted("x" * 9000) == f"'{'x' * 37}...{'x' * 38}'"
    assert len(quoted([["y" * 100] * 100] * 100)) == 80
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
    "empty": (b"", "has 0 bytes"),
    "short": (b"1234567", "has 7 bytes"),
    "longer header than file": (header({}, 0, length=1 << 40), f"claims {1 << 40} bytes, but the"),
    "header too long": (header({}, length=2**64 - 1), f"claims {2**64 - 1} bytes"),
    "no json": (header(b"{" * 20), "its header is not valid JSON"),
    "no utf-8": (header(b"\xff" * 20), "its header is not valid JSON"),
    "deep json": (header(b"[" * 200_000), "its header is nested too deeply"),
    "list": (header(b"[]"), "its header must be a JSON object"),
    "entry": (
        header({"x": 1}),
        "tensor 'x' needs a dtype, a shape of at most 8 sizes and two data_offsets",
    ),
    "no shape": (header({"x": {"dtype": "F32"}}), "tensor 'x' needs a dtype"),
    "negative": (header({"x": tensor(shape=(-2,))}), "tensor 'x' needs a dtype, a shape"),
    "float": (header({"x": tensor(shape=(2.0,))}), "tensor 'x' needs a dtype, a shape"),
    "one offset": (header({"x": tensor(offsets=(8,))}), "tensor 'x' needs a dtype, a shape"),
    "dtype": (header({"x": tensor(dtype="F4")}), "tensor 'x' has dtype 'F4', which jspec does not"),
    "too small": (
        header({"x": tensor(shape=(3,))}),
        "'x' of dtype F32 and shape (3,) needs 12",
    ),
    "huge": (header({"x": tensor(shape=(2**62, 2**62))}), "tensor 'x' of dtype F32"),
    "past the end": (
        header({"x": tensor(shape=(4,), offsets=(0, 16))}),
        "tensor 'x' ends at byte 86, but the file has 78",
    ),
    "overlap": (header({"x": tensor(), "y": tensor()}), "tensor 'y' starts at byte"),
    "hole": (header({"x": tensor(offsets=(4, 12))}, 12), "tensor 'x' starts at byte"),
    "trailing": (header({"x": tensor()}, 9), "has 78 bytes, but its tensors end at byte 77"),
    "many sizes": (header({"x": tensor(shape=[1] * 400_000)}), "a shape of at most 8 sizes"),
    "huge sizes": (header({"x": tensor(shape=[2**62] * 300)}), "a shape of at most 8 sizes"),
    "sizes beyond int64": (header({"x": tensor(shape=[2**63])}), "a shape of at most 8 sizes"),
    "nine sizes": (header({"x": tensor(shape=[1] * 8 + [2])}), "a shape of at most 8 sizes"),
    "many digits": (
        header(b'{"x": {"dtype": "F32", "shape": [%b]}}' % (b"9" * 5000)),
        "an integer has 5000 digits; 1000 are read",
    ),
    "escapes": (
        header({"\x1b[31m\nx": tensor(dtype="F4")}),
        r"tensor '\x1b[31m\nx' has dtype 'F4'",
    ),
    "a long name": (header({"x" * 8192: tensor(dtype="F4")}), "xxx...xxx"),
    "utf-16": (header('{"x": 1}'.encode("utf-16")), "its header is not valid JSON"),
    "twice": (
        header(b'{"x":%b,"x":%b}' % ((json.dumps(tensor()).encode(),) * 2)),
        "its header is not valid JSON: 'x' appears twice",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_lying_safetensors(tmp_path, name):
    content, message = LIES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        TensorFile(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 400


def test_eight_sizes_are_read(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(header({"x": tensor(shape=[1] * 7 + [2])}))
    assert TensorFile(path).entries["x"].shape == (1,) * 7 + (2,)


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_a_header(tmp_path, over):
    """A longer header is refused by its size alone: it would take seconds to parse."""
    path, length = tmp_path / "model.safetensors", files.HEADER_LIMIT + over
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 + length + 8)
    message = f"claims {length} bytes" if over else "its header is not valid JSON"
    with pytest.raises(CheckpointError, match=message):
        TensorFile(path)


def test_the_limit_of_tensors(checkpoint, monkeypatch):
    tensors = len(load_file(checkpoint / "model.safetensors"))
    monkeypatch.setattr(files, "TENSOR_LIMIT", tensors)
    load_model(checkpoint)
    monkeypatch.setattr(files, "TENSOR_LIMIT", tensors - 1)
    refused(checkpoint, f"has {tensors} tensors, more than {tensors - 1} for a model")


def test_truncated_file(checkpoint):
    path = checkpoint / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    refused(checkpoint, path, f"the file has {len(content) - 4}: it is truncated")


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
            file = TensorFile(path)
        except CheckpointError:
            continue
        for name, entry in file.entries.items():
            if entry.shape:
                assert sum(block.nbytes for _, block in file.blocks(name)) == entry.nbytes


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
    monkeypatch.setattr(weights, "HEADER_LIMIT", size)
    load_model(sharded)
    monkeypatch.setattr(weights, "HEADER_LIMIT", size - 1)
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
    refused(sharded, "model.safetensors.index.json", quoted(shard), "no file name in")


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "{"])
def test_bad_index(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "model.safetensors.index.json")


def test_a_tensor_in_two_shards(sharded):
    tensors = load_file(sharded / "a.safetensors") | load_file(sharded / "b.safetensors")
    save_file(tensors, sharded / "b.safetensors")
    refused(sharded, sharded / "a.safetensors", sharded / "b.safetensors", "both have")
