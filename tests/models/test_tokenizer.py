"""The byte-level tokenizer and tokenizer.json files of others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from jspec.models.bundled import bundled_path
from jspec.models.errors import CheckpointError
from jspec.models.tokenizer import load_tokenizer

BYTES = load_tokenizer(bundled_path())


@pytest.fixture(scope="module")
def merged(tmp_path_factory):
    """A byte-level BPE with merges, as Llama 3 and Qwen have."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    path = tmp_path_factory.mktemp("merged")
    backend.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


@given(st.binary(max_size=40))
def test_bytes_survive(data):
    tokens = BYTES.encode(data, special=False)
    assert tokens == list(data)
    assert BYTES.raw(tokens) == data


def test_a_document_opens_with_its_special_token():
    assert BYTES.encode("a") == [256, 97]
    assert BYTES.decode([256, 97, 257]) == "a"


@given(st.text(max_size=20))
def test_byte_ids_agree_with_the_library(text):
    backend = Backend.from_file(str(bundled_path() / "tokenizer.json"))
    assert BYTES.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("text", ["the cat", "né € 𝄞 the cat sat", "日本語テキスト"])
def test_stream_of_a_merging_tokenizer(merged, text):
    assert not merged.byte_level
    tokens = merged.encode(text)
    advance = merged.stream()
    pieces = [advance([t], False) for t in tokens] + [advance([], True)]
    assert "".join(pieces) == merged.decode(tokens) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_merging_tokenizer_needs_utf8(merged):
    with pytest.raises(ValueError, match="byte 1 of the text is not UTF-8"):
        merged.encode(b"a\xff")


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"model": {}}'])
def test_bad_files(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_save_and_load(merged, tmp_path):
    merged.save(tmp_path)
    assert load_tokenizer(tmp_path).encode("the cat") == merged.encode("the cat")
