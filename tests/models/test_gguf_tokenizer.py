"""Tokenizers and chat templates of GGUF files, against the library's own and llama.cpp's ids."""

import json

import pytest

from jspec import CheckpointError, load_chat_template, load_tokenizer
from tests.models import tokenizers as made
from tests.models.gguf_files import write_vocabulary

TEXTS = [
    "",
    "the cat sat",
    " isn't  it?\n\n  né 日本 €\r\n",
    "a<eos>b<think>c",
    "12345 \x00 \U0001d11e",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def byte_level(path, **fields):
    """The library's byte-level tokenizer of the tests, with two more tokens, as a GGUF file."""
    library = made.byte_level()
    stored = json.loads(library.to_str())["model"]
    tokens = [*sorted(stored["vocab"], key=stored["vocab"].get), "<eos>", "<think>"]
    fields = {
        "model": "gpt2",
        "tokens": tokens,
        "pre": "gpt-2",
        "merges": [" ".join(merge) for merge in stored["merges"]],
        "token_type": [1] * (len(tokens) - 2) + [3, 4],
        "eos_token_id": len(tokens) - 2,
        **fields,
    }
    library.add_special_tokens(["<eos>"])
    library.add_tokens(["<think>"])
    return write_vocabulary(path / "model.gguf", **fields), library


def test_a_byte_level_tokenizer_is_the_library_s(tmp_path):
    path, library = byte_level(tmp_path)
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == library.get_vocab_size()
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokens == library.encode(text).ids
        assert tokenizer.decode(tokens) == text.replace("<eos>", "") == library.decode(tokens)


def test_a_directory_with_one_file(tmp_path):
    path, _ = byte_level(tmp_path)
    assert load_tokenizer(tmp_path).encode("the cat") == load_tokenizer(path).encode("the cat")
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"several GGUF files, .*; pass one of them"):
        load_tokenizer(tmp_path)


def test_what_is_added_to_a_text(tmp_path):
    path, _ = byte_level(tmp_path, add_bos_token=True, add_eos_token=True, bos_token_id=0)
    tokenizer = load_tokenizer(path)
    end = tokenizer.vocab_size - 2
    assert tokenizer.encode("the") == [0, *tokenizer.encode("the", special=False), end]
    path, _ = byte_level(tmp_path, add_bos_token=True)
    with pytest.raises(CheckpointError, match=r"add_bos_token is true, but .*bos_token_id is miss"):
        load_tokenizer(path)


def test_the_chat_template_names_tokens_of_the_file(tmp_path):
    path, _ = byte_level(tmp_path, bos_token_id=0, chat_template=TEMPLATE)
    first = made.byte_level().id_to_token(0)
    text = load_chat_template(path).render([{"role": "user", "content": "Hi"}])
    assert text == f"{first}Hi<eos>"
    path, _ = byte_level(tmp_path)
    assert load_chat_template(path) is None


def test_a_tokenizer_that_is_not_read(tmp_path):
    """One beside the file serves; it does not where the file's own is read."""
    for fields, reason in (
        ({"pre": "new"}, "tokenizer.ggml.pre='new' is unknown to jspec; put the model's token"),
        ({"model": "t5"}, "tokenizer.ggml.model='t5' is a kind of tokenizer that jspec does not"),
        ({"model": None}, "the file has no tokenizer; put"),
    ):
        path, _ = byte_level(tmp_path, **fields)
        with pytest.raises(CheckpointError, match=reason):
            load_tokenizer(path)
    made.bytes_alone().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(path).byte_level
    path, _ = byte_level(tmp_path)
    assert not load_tokenizer(path).byte_level
