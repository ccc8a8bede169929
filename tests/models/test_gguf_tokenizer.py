"""Tokenizers and chat templates of GGUF files, against the library's own and llama.cpp's ids."""

import json

import pytest

from jspec import (
    LLM,
    CheckpointError,
    SamplingParams,
    load_chat_template,
    load_model,
    load_tokenizer,
)
from jspec.cli import main
from jspec.models import tokenizer
from jspec.models.gguf_weights import GGUFWeights
from tests.models import tokenizers as made
from tests.models.gguf_files import write_gguf, write_vocabulary

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
    ours = load_tokenizer(path)
    assert ours.vocab_size == library.get_vocab_size()
    for text in TEXTS:
        tokens = ours.encode(text)
        assert tokens == library.encode(text).ids
        assert ours.decode(tokens) == text.replace("<eos>", "") == library.decode(tokens)


def test_a_directory_with_one_file(tmp_path):
    path, _ = byte_level(tmp_path)
    assert load_tokenizer(tmp_path).encode("the cat") == load_tokenizer(path).encode("the cat")
    path.with_name("other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"several GGUF files, .*; pass one of them"):
        load_tokenizer(tmp_path)


def test_what_is_added_to_a_text(tmp_path):
    path, _ = byte_level(tmp_path, add_bos_token=True, add_eos_token=True, bos_token_id=0)
    ours = load_tokenizer(path)
    assert ours.encode("the") == [0, *ours.encode("the", special=False), ours.vocab_size - 2]
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
    """One next to the file serves; it does not where the file's own is read."""
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


@pytest.mark.parametrize(
    ("tokens", "types", "fields", "ends"),
    [
        (["<|endoftext|>", "<|im_end|>"], [3, 3], {"eos_token_id": 1}, (1, 0)),
        (["<eos>", "<end_of_turn>"], [3, 3], {"eos_token_id": 0}, (0, 1)),
        (["a", "b", "c"], [3, 3, 3], {"eos_token_id": 0, "eot_token_id": 1}, (0, 1)),
        (["a", "b", "c"], [3, 3, 3], {"eos_token_id": 0, "eom_token_id": 2}, (0, 2)),
        # In HTML it is an ordinary token; so are names that no tokenizer added.
        (["</s>", "<|end|>", "<|eot_id|>"], [4, 1, 4], {"eos_token_id": 5}, (5, 2)),
        # gpt-oss ends messages with <|end|>, and turns with the others.
        (["<|return|>", "<|call|>", "<|end|>"], [3, 3, 3], {"eos_token_id": 0}, (0, 1)),
        (["<|end|>"], [3], {"eos_token_id": 2**32 - 1}, (0,)),
    ],
)
def test_tokens_that_end_a_text(tmp_path, tokens, types, fields, ends):
    stored = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    others = 112 - len(tokens)
    stored["tokenizer.ggml.tokens"] = tokens + [f"t{index}" for index in range(others)]
    stored["tokenizer.ggml.token_type"] = types + [1] * others
    model = load_model(write_gguf(tmp_path / "model.gguf", "qwen2", **stored))
    assert model.config.stop_tokens == ends


SENTENCEPIECE = {"model": "llama", "tokens": ["<unk>", "<s>", "</s>", "a"], "scores": [0.0] * 4}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokens": "a"}, "tokenizer.ggml.tokens must be a list of strings"),
        ({"tokens": ["a", "a"]}, "tokens has a token twice"),
        ({"token_type": [1]}, "token_type must be a list of 4 numbers, got 1 of int32"),
        ({"token_type": [1.5] * 4}, "token_type must be a list of 4 numbers, got 4 of float32"),
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0]}, "scores must be a list of 4 numbers"),
        ({"bos_token_id": 4}, "bos_token_id=4 must be below 4"),
        ({"add_space_prefix": 1}, "add_space_prefix'=1 must be true or false"),
        ({"tokens": ["<unk>", "<s>", "</s>", "a" * 20_000]}, "tokens are too many or too long"),
        ({"model": "gpt2"}, "merges must be a list of strings"),
        ({"model": "gpt2", "merges": ["a b"]}, "not a tokenizer"),
        ({"model": "gpt2", "merges": ["ab"]}, "not a tokenizer"),
        ({"chat_template": 3}, "chat_template'=3 must be a string"),
        ({"chat_template": "a" * (1 << 20) + "b"}, "a string of at most 1048576 characters"),
    ],
)
def test_malformed_tokenizers_are_refused(tmp_path, fields, reason):
    path = write_vocabulary(tmp_path / "model.gguf", **{**SENTENCEPIECE, **fields})
    with pytest.raises(CheckpointError, match=reason):
        (load_chat_template if "chat_template" in fields else load_tokenizer)(path)


def test_a_tokenizer_is_bounded_as_a_tokenizer_json_is(tmp_path, monkeypatch):
    path, _ = byte_level(tmp_path)
    monkeypatch.setattr(tokenizer, "FILE_LIMIT", 1000)
    with pytest.raises(CheckpointError, match=r"bytes as JSON, more than the 1000 that it may"):
        load_tokenizer(path)


def test_a_tokenizer_is_saved_as_it_is_read(tmp_path):
    path, _ = byte_level(tmp_path)
    ours = load_tokenizer(path)
    (tmp_path / "saved").mkdir()
    ours.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert [saved.encode(text) for text in TEXTS] == [ours.encode(text) for text in TEXTS]


def test_a_file_is_all_that_a_conversation_needs(tmp_path, capsys):
    letters = [chr(code) for code in range(33, 127)] + ["\u0120"]
    tokens = ["TH", *letters, "<eos>", *(f"<{index}>" for index in range(15))]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [1] * 96 + [3] * 16,
        "merges": ["T H"],
        "eos_token_id": 96,
    }
    stored = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    stored["tokenizer.chat_template"] = TEMPLATE
    path = write_gguf(tmp_path / "model.gguf", "qwen2", **stored)
    talk = [{"role": "user", "content": "the cat"}]
    answers = [
        LLM(model).chat(talk, SamplingParams(max_new_tokens=4))[0] for model in (path, tmp_path)
    ]
    assert answers[0].tokens == answers[1].tokens
    arguments = ["generate", "--model", str(tmp_path), "--chat", "--prompt", "the cat"]
    assert main([*arguments, "--max-new-tokens", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == list(answers[0].tokens)


@pytest.mark.parametrize("command", ["generate", "eval", "LLM"])
def test_the_tokenizer_is_read_before_the_tensors(tmp_path, monkeypatch, capsys, command):
    """One that is missing costs no time."""
    path = write_gguf(tmp_path / "model.gguf", "qwen2")
    monkeypatch.setattr(GGUFWeights, "read", lambda *_: pytest.fail("tensors are read"))
    reason = "the file has no tokenizer; put the model's tokenizer.json into its folder"
    if command == "LLM":
        with pytest.raises(CheckpointError, match=reason):
            LLM(path)
        return
    task = {"generate": ["--prompt", "a"], "eval": ["ruler", "--length", "64"]}[command]
    assert main([command, "--model", str(path), *task]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
