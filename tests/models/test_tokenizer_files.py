"""tokenizer.json files that are damaged, hostile or only unusual."""

import os
import subprocess
import sys
import time

import pytest
from tokenizers import normalizers, pre_tokenizers, processors

from jspec.models import split_patterns
from jspec.models.errors import CheckpointError
from jspec.models.gguf_tokenizer import SPLITTINGS
from jspec.models.tokenizer import load_tokenizer
from tests.models import tokenizers as made
from tests.parameters import default_run


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; a model directory holds a tokenizer.json"),
        (b"", "is empty; correct it, or copy or download it again"),
        (b"{", "is not valid JSON: .*; correct it, or copy or download it again"),
        (b"[]", "must hold a JSON object, got list"),
        (b'{"model": 3}', "not a tokenizer"),
        (b'{"model": {}}', "not a tokenizer"),
        (b'{"model": {}, "model": {}}', "'model' appears twice"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer has 5000 digits"),
        (b"\xff\xfe{\0}\0", "is not valid JSON"),
    ],
)
def test_bad_files(tmp_path, content, message):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert str(caught.value).isprintable()


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="is no regular file"):
        load_tokenizer(tmp_path)


def test_save_and_load(tmp_path, monkeypatch):
    def full(*paths):
        raise OSError(28, "No space left on device")

    path = made.write(made.byte_level(), tmp_path / "first")
    (tmp_path / "second").mkdir()
    load_tokenizer(path).save(tmp_path / "second")
    assert os.listdir(tmp_path / "second") == ["tokenizer.json"]
    monkeypatch.setattr(os, "replace", full)
    (tmp_path / "third").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be written: No space"):
        load_tokenizer(path).save(tmp_path / "third")
    assert os.listdir(tmp_path / "third") == []
    first, second = (tmp_path / name / "tokenizer.json" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be written"):
        load_tokenizer(path).save(tmp_path / "absent")


def test_the_file_is_utf8_whatever_the_locale(tmp_path):
    library = made.metaspace()
    library.add_tokens(["日本"])
    path = made.write(library, tmp_path)
    (path / "tokenizer.json").write_text(library.to_str(), encoding="utf-8")
    code = f"import jspec; print(jspec.load_tokenizer({str(path)!r}).encode({'日本'!a}))"
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{library.encode('日本').ids}\n", done.stderr


def test_texts_are_neither_cut_nor_padded(tmp_path):
    library = made.with_pattern(r"\p{N}{1,3}")
    library.enable_truncation(3)
    library.enable_padding(length=1 << 40)
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert tokenizer.decode(tokenizer.encode("12 34 five")) == "12 34 five"


LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def llama_3(pattern: str = LLAMA_3):
    """The parts of Llama 3's file; Qwen's has another pattern and NFC."""
    library = made.with_added_tokens(made.byte_level())
    library.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(made.Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    template = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 302)])
    library.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return library


def llama_2():
    """The parts of Llama 2's file."""
    library = made.byte_fallback()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    library.normalizer = normalizers.Sequence(steps)
    return library


@pytest.mark.parametrize("library", [llama_3(), llama_2(), made.metaspace()])
def test_common_kinds(tmp_path, library):
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert tokenizer.encode(made.TEXT) == library.encode(made.TEXT).ids
    assert tokenizer.decode(tokenizer.encode(made.TEXT)) == library.decode(
        library.encode(made.TEXT).ids
    )


LINEAR = sorted({pattern for value in SPLITTINGS.values() for pattern in value.patterns})
LINEAR.remove(split_patterns.SUPERBPE[1])  # its time grows with the square of a run of digits


@pytest.mark.parametrize("pattern", default_run(LINEAR, *LINEAR[::6]))
def test_patterns_of_gguf_files_are_linear(pattern):
    """Long runs of each kind of character take 50 ms; a quadratic pattern needs seconds."""
    library = made.with_pattern(pattern)
    kinds = ["a", "A", " ", "\n", "\r\n", "7", "!", "'s", "é", "日", "\u0301", "/"]
    texts = [run * 30_000 + end for run in kinds for end in ("", "\0")]
    for text in texts:
        begin = time.process_time()
        library.encode(text, add_special_tokens=False)
        assert time.process_time() - begin < 1, text[:4]


def test_a_panic_is_an_error(tmp_path):
    """The library panics where onig gives up, and a panic is no `Exception`."""
    tokenizer = load_tokenizer(made.write(made.with_pattern("(a|a)*$"), tmp_path))
    with pytest.raises(ValueError, match="cannot encode a text of 41 characters"):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.decode(tokenizer.encode("abc")) == "abc"
