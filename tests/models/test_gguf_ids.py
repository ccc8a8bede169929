"""Token ids by the tokenizers of GGUF files against those of llama.cpp (gguf_goldens)."""

import json

import pytest

from jspec import load_tokenizer
from jspec.models.gguf_tokenizer import SPLITTINGS
from tests.models.gguf_files import write_vocabulary
from tests.models.gguf_goldens import FOLDER, NAMES, TEXTS, files

IDS = json.loads((FOLDER / "ids.json").read_text())


def tokenizer_of(name, path):
    vocabulary = json.loads((FOLDER / f"{name.split()[0]}.json").read_text())
    fields = {**vocabulary, **files()[name]}
    return load_tokenizer(write_vocabulary(path / "model.gguf", **fields)), vocabulary["tokens"]


@pytest.mark.parametrize("name", IDS)
def test_ids_are_those_of_llama_cpp(name, tmp_path):
    tokenizer, tokens = tokenizer_of(name, tmp_path)
    for text, ids in zip(TEXTS, IDS[name], strict=True):
        ours = tokenizer.encode(text)
        assert [tokens[i] for i in ours] == [tokens[i] for i in ids], text


@pytest.mark.parametrize("name", ["byte_level gpt-2", "sentencepiece", "sentencepiece gemma"])
def test_texts_come_back(name, tmp_path):
    tokenizer, _ = tokenizer_of(name, tmp_path)
    for text in TEXTS:
        plain = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
        ids = tokenizer.encode(text, special=False)
        # Where a prefix is added, it is after each user-defined token too.
        if "<" not in text and name != "sentencepiece":
            assert tokenizer.decode(ids) == text
        assert tokenizer.decode(ids).replace(" ", "") == plain.replace(" ", "")
        stream = tokenizer.stream()
        pieces = [stream([token], False) for token in ids]
        assert "".join(pieces) + stream([], True) == tokenizer.decode(ids)


def test_every_splitting_has_ids():
    assert {SPLITTINGS[name] for name in NAMES} >= set(SPLITTINGS.values()) - {SPLITTINGS["glm4"]}
