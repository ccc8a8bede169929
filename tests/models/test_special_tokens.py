"""Tokens that files next to tokenizer.json add or call special; the values are transformers'."""

import json

import pytest

from jspec.models.chat import load_chat_template
from jspec.models.errors import CheckpointError
from jspec.models.tokenizer import load_tokenizer
from tests.models import tokenizers as made

END = "<|end|>"
FLAGS = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word", "special"), False)
SPECIAL = {"content": END, **FLAGS, "special": True}
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


def write(path, library, files):
    made.write(library, path)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({CONFIG: {"added_tokens_decoder": {"256": SPECIAL}}}, "a"),
        ({CONFIG: {"added_tokens_decoder": {"256": {"content": END}}}}, "a" + END),
        ({CONFIG: {"eos_token": END}}, "a"),
        ({CONFIG: {"eos_token": {"__type": "AddedToken", "content": END}}}, "a"),
        ({CONFIG: {"image_token": END}}, "a"),
        ({CONFIG: {"additional_special_tokens": [END]}}, "a"),
        ({CONFIG: {"extra_special_tokens": [SPECIAL]}}, "a"),
        ({CONFIG: {"extra_special_tokens": {"image_token": END}}}, "a"),
        ({ADDED: {END: 256}}, "a" + END),
        ({ADDED: {END: 256}, CONFIG: {"eos_token": END}}, "a"),
        ({ADDED: {END: 256}, MAP: {"pad_token": END}}, "a"),
        ({MAP: {"eos_token": SPECIAL}}, "a"),
        ({MAP: {"additional_special_tokens": [END]}}, "a"),
    ],
)
def test_a_token_that_tokenizer_json_lacks(tmp_path, files, text):
    tokenizer = load_tokenizer(write(tmp_path, made.bytes_alone(), files))
    assert tokenizer.encode("a" + END, special=False) == [97, 256]
    assert tokenizer.decode([97, 256]) == text
    assert tokenizer.vocab_size == 257
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.encode("a" + END, special=False) == [97, 256]
    assert saved.decode([97, 256]) == text


def test_a_token_that_only_the_config_calls_special(tmp_path):
    library = made.bytes_alone()
    library.add_tokens([END])
    for files in (
        {CONFIG: {"added_tokens_decoder": {"256": SPECIAL}}},
        {CONFIG: {"eos_token": END}},
        {MAP: {"bos_token": END}},
    ):
        tokenizer = load_tokenizer(write(tmp_path, library, files))
        assert tokenizer.special_ids == {256: END}
        assert tokenizer.decode([97, 256]) == "a"
        for name in files:
            (tmp_path / name).unlink()
    assert load_tokenizer(tmp_path).decode([97, 256]) == "a" + END


def test_files_without_news_change_nothing(tmp_path):
    library = made.bytes_alone()
    library.add_special_tokens([END])
    path = write(tmp_path, library, {CONFIG: {"added_tokens_decoder": {"256": SPECIAL}}})
    (path / "saved").mkdir()
    load_tokenizer(path).save(path / "saved")
    saved, file = (folder / "tokenizer.json" for folder in (path / "saved", path))
    assert saved.read_bytes() == file.read_bytes()


def test_flags_of_the_config_count(tmp_path):
    library = made.bytes_alone()
    library.add_special_tokens([END])
    stripping = {CONFIG: {"added_tokens_decoder": {"256": {**SPECIAL, "lstrip": True}}}}
    tokenizer = load_tokenizer(write(tmp_path, library, stripping))
    assert tokenizer.encode("a  " + END, special=False) == [97, 256]


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({CONFIG: {"bos_token": "<s>", "eos_token": SPECIAL}}, {"bos": "<s>", "eos": END}),
        ({MAP: {"bos_token": "<s>", "eos_token": SPECIAL}}, {"bos": "<s>", "eos": END}),
        # Where both name one, special_tokens_map.json does, unless the config has all tokens.
        ({CONFIG: {"bos_token": "<a>"}, MAP: {"bos_token": "<s>"}}, {"bos": "<s>"}),
        (
            {CONFIG: {"bos_token": "<a>", "added_tokens_decoder": {}}, MAP: {"bos_token": "<s>"}},
            {"bos": "<a>"},
        ),
        ({CONFIG: {"bos_token": None, "eos_token": "", "add_bos_token": True}}, {}),
    ],
)
def test_special_tokens_have_names(tmp_path, files, named):
    """Chat templates write them by these."""
    path = write(tmp_path, made.bytes_alone(), files)
    (path / "chat_template.jinja").write_text("{{ bos_token }}|{{ eos_token }}")
    assert load_tokenizer(path).special_tokens == {f"{key}_token": x for key, x in named.items()}
    template = load_chat_template(path)
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text == f"{named.get('bos', '')}|{named.get('eos', '')}"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({CONFIG: {"added_tokens_decoder": {"300": SPECIAL}}}, "has id 300, but .* gives it 256"),
        ({ADDED: {END: 300}}, "'<|end|>' has id 300, but the tokenizer gives it 256; correct"),
        ({CONFIG: {"added_tokens_decoder": [END]}}, "must be an object of tokens by their ids"),
        ({CONFIG: {"added_tokens_decoder": {"x": SPECIAL}}}, "'x' must be a token id"),
        ({CONFIG: {"added_tokens_decoder": {"256": {}}}}, "{} is no token; it must be a string"),
        ({CONFIG: {"added_tokens_decoder": {"256": {**SPECIAL, "lstrip": 1}}}}, "lstrip=1 must be"),
        ({CONFIG: {"extra_special_tokens": 3}}, "must be a list of tokens or an object"),
        ({CONFIG: {"extra_special_tokens": [3]}}, "3 is no token"),
        ({CONFIG: {"eos_token": {"lstrip": True}}}, "is no token"),
        ({ADDED: {END: "256"}}, "must be a whole number"),
        ({MAP: []}, "must hold a JSON object"),
    ],
)
def test_malformed_files_are_refused(tmp_path, files, message):
    path = write(tmp_path, made.bytes_alone(), files)
    with pytest.raises(CheckpointError, match=message.replace("|", r"\|")) as refusal:
        load_tokenizer(path)
    assert str(tmp_path) in str(refusal.value)
