"""Which tokens end a text: the union of what the files of a model name."""

import json

import pytest

from jspec.models.checkpoint import load_model
from jspec.models.errors import CheckpointError
from tests.models import tokenizers as made
from tests.models.gguf_files import write_gguf
from tests.models.helpers import write_checkpoint

CONFIG, GENERATION = "tokenizer_config.json", "generation_config.json"


@pytest.fixture
def checkpoint(tmp_path):
    """Its config.json names token 2 of 64."""
    return write_checkpoint(tmp_path / "model", num_hidden_layers=1, vocab_size=320)


def ends(path, **files) -> tuple[int, ...]:
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return load_model(path).config.stop_tokens


def test_files_of_a_directory(checkpoint):
    assert ends(checkpoint) == (2,)
    assert ends(checkpoint, generation_config={}) == (2,)
    assert ends(checkpoint, generation_config={"eos_token_id": [5, 2, 6]}) == (2, 5, 6)
    declared = {"7": {"content": "<e>", "special": True}}
    config = {"eos_token": "<e>", "added_tokens_decoder": declared}
    assert ends(checkpoint, tokenizer_config=config) == (2, 5, 6, 7)


def test_the_tokenizer_gives_the_end_token_its_id(checkpoint):
    library = made.bytes_alone()
    library.add_special_tokens(["<s>", "<e>"])
    made.write(library, checkpoint)
    assert ends(checkpoint, tokenizer_config={"bos_token": "<s>"}) == (2,)
    assert ends(checkpoint, tokenizer_config={"eos_token": "<e>"}) == (2, 257)
    assert ends(checkpoint, tokenizer_config={"eos_token": "a"}) == (2, 97)
    assert ends(checkpoint, tokenizer_config={"eos_token": "<new>"}) == (2, 258)
    (checkpoint / "tokenizer_config.json").unlink()
    assert ends(checkpoint, special_tokens_map={"eos_token": {"content": "<e>"}}) == (2, 257)
    # Models are loaded without a tokenizer too, and with one that jspec does not read.
    (checkpoint / "tokenizer.json").write_text("{}")
    assert ends(checkpoint) == (2,)


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": 320}},
        {"generation_config": {"eos_token_id": [-1, 320]}},
        {
            "tokenizer_config": {
                "eos_token": "<e>",
                "added_tokens_decoder": {"320": {"content": "<e>"}},
            }
        },
    ],
)
def test_an_id_outside_the_vocabulary_is_skipped(checkpoint, files):
    with pytest.warns(UserWarning, match="outside the (model's )?vocabulary of 320"):
        assert ends(checkpoint, **files) == (2,)


def test_config_json_names_an_id_outside_the_vocabulary(tmp_path):
    path = write_checkpoint(tmp_path / "model", num_hidden_layers=1, eos_token_id=[3, 99999])
    with pytest.warns(
        UserWarning, match=r"config\.json: eos_token_id=\[99999\] is outside the voc"
    ):
        assert ends(path) == (3,)


def test_malformed_files_are_refused(checkpoint):
    for value in ("2", [1.5], True, {}, [2] * 1025):
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id=.* must"):
            ends(checkpoint, generation_config={"eos_token_id": value})


def test_a_gguf_file_names_ids_outside_its_vocabulary(tmp_path):
    tokens = ["a", "<end_of_turn>", *(f"t{index}" for index in range(110))]
    fields = {"tokens": tokens, "token_type": [1, 3] + [1] * 110, "eos_token_id": 112}
    stored = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    with pytest.warns(UserWarning, match=r"eos_token_id'=\[112\] is outside the vocabulary of 112"):
        model = load_model(write_gguf(tmp_path / "model.gguf", "qwen2", **stored))
    assert model.config.stop_tokens == (1,)


def test_a_gguf_file_in_a_directory_with_a_generation_config(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "qwen2")
    (ends,) = load_model(path).config.stop_tokens
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, ends]}))
    assert load_model(path).config.stop_tokens == (ends, 5)
    assert load_model(tmp_path).config.stop_tokens == (ends, 5)


def test_a_gguf_file_without_tokens_names_none(tmp_path):
    for none in (2**32 - 1,):
        path = write_gguf(tmp_path / "m.gguf", "qwen2", **{"tokenizer.ggml.eos_token_id": none})
        assert load_model(path).config.stop_tokens == ()
