"""Headers of GGUF files, made byte by byte: each size is checked before it is used."""

import struct

import gguf
import pytest

from jspec import CheckpointError, load_model
from jspec.models import gguf_file
from jspec.models.gguf_file import GGUFFile, gguf_path
from tests.models.gguf_files import write_gguf, write_vocabulary


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(*fields, tensors=b"", count=0, version=3, num_fields=None, magic=b"GGUF"):
    number = len(fields) if num_fields is None else num_fields
    return magic + struct.pack("<IQQ", version, count, number) + b"".join(fields) + tensors


def array(kind, count, content=b"", name=b"a"):
    return text(name) + struct.pack("<IIQ", 9, kind, count) + content


def tensor(*sizes, kind=0, offset=0, name=b"t"):
    place = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return text(name) + place


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes are too few for its header of 24; it is truncated or damaged"),
        (header(magic=b"GGML"), "it starts with b'GGML', not with b'GGUF'; it is truncated or"),
        (header(version=1), "version 1 is unknown; jspec reads 2 and 3, .*: convert the model"),
        (header(version=3 << 24), "version 50331648 is unknown; .* little-endian"),
        (header(num_fields=2**60), "claims 1152921504606846976 fields"),
        (header(count=2**40), "claims 0 fields and 1099511627776 tensors"),
        (header(num_fields=1), "'the name of a field' claims 8 bytes at byte 24"),
        (
            header(array(4, 2**40)),
            "'a' claims 1099511627776 items at byte 49, but the file has 49; it is trunc",
        ),
        (header(array(4, 2**62)), "'a' claims 4611686018427387904 items"),
        (header(array(8, 2**40)), "'a' claims 1099511627776 strings"),
        (header(array(8, 2, text(b"ab") + struct.pack("<Q", 9))), "'a' claims 2 strings"),
        (header(array(8, 3, text(b"ab") + struct.pack("<Q", 2**60) + bytes(9))), "'a' claims 3"),
        (header(array(9, 1, struct.pack("<IQ", 4, 0))), "'a' has the unknown type 9"),
        (header(text(b"a") + struct.pack("<I", 77)), "'a' has the unknown type 77"),
        (header(text(b"a") + struct.pack("<IQ", 8, 2**63)), "'a' claims 9223372036854775808 bytes"),
        (header(text(b"a") + struct.pack("<I", 8) + text(b"\xff")), "'a' is not UTF-8"),
        (header(*[text(b"a") + struct.pack("<II", 4, 1)] * 2), "field 'a' appears twice"),
        (header(text(b"general.alignment") + struct.pack("<II", 4, 0)), "alignment=0 must be"),
        (header(tensors=tensor(1) * 2, count=2), "tensor 't' appears twice"),
        (header(tensors=tensor(*[1] * 5), count=1), "tensor 't' has 5 dimensions"),
        (header(tensors=tensor(2**40, 2**40), count=1), r"tensor 't' has the shape \("),
    ],
)
def test_malformed_headers_are_refused(tmp_path, content, reason):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"model\.gguf is no sound GGUF file: .*{reason}"
    ) as e:
        load_model(path)
    assert str(e.value).endswith(("copy or download it again", "convert the model again"))


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (tensor(4, kind=99), "tensor 't' has the unknown type 99"),
        (tensor(31, 2, kind=2), "tensor 't' has rows of 31, no multiple of 32"),
        (tensor(8), "tensor 't' ends at byte 160, but the file has 113"),
        (tensor(4, offset=2**50), "tensor 't' ends at byte 1125"),
    ],
)
def test_malformed_tensors_are_refused(tmp_path, entry, reason):
    path = tmp_path / "model.gguf"
    architecture = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    path.write_bytes((header(architecture, tensors=entry, count=1) + bytes(32))[:113])
    with pytest.raises(CheckpointError, match=reason):
        load_model(path)


def test_a_header_is_bounded(tmp_path, monkeypatch):
    tokens = [f"t{index}" for index in range(100)]
    path = write_vocabulary(tmp_path / "model.gguf", model="gpt2", tokens=tokens)
    assert list(GGUFFile(path).metadata["tokenizer.ggml.tokens"]) == tokens
    for limit, value in (("STRING_LIMIT", 99), ("HEADER_LIMIT", 900), ("FIELD_LIMIT", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(gguf_file, limit, value)
            with pytest.raises(CheckpointError, match=rf"{value}"):
                GGUFFile(path)


def test_values_of_every_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    values = {
        "uint8": 200,
        "int8": -3,
        "uint16": 60000,
        "int16": -300,
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "né",
    }
    for name, value in values.items():
        getattr(writer, f"add_{name}")(name, value)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("texts", ["a", "", "é"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    fields = GGUFFile(tmp_path / "model.gguf").fields()
    assert fields == {
        "general.architecture": "llama",
        **values,
        "numbers": [1, 2, 3],
        "texts": ["a", "", "é"],
    }


def test_the_file_that_a_path_names(tmp_path):
    assert gguf_path(tmp_path) is gguf_path(tmp_path / "none.gguf") is None
    path = write_gguf(tmp_path / "model.gguf", "qwen3")
    assert gguf_path(tmp_path) == gguf_path(path) == path
    (tmp_path / "config.json").write_text("{}")
    assert gguf_path(tmp_path) is None
    assert gguf_path(path) == path
