"""tokenizer.json files that are damaged, hostile or only unusual."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jspec.models import guarded
from jspec.models.errors import CheckpointError
from jspec.models.guarded import GuardedTokenizer
from jspec.models.library_tokenizer import LibraryTokenizer
from jspec.models.split_patterns import KNOWN_PATTERNS
from jspec.models.tokenizer import load_tokenizer
from jspec.models.tokenizer_kinds import unproven
from tests.models import tokenizers as made

# Each character costs it 2^23 attempts, close to the number at which the library gives up.
SLOW = r"(?:(?:.|.){23}\x00|.)"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(guarded, "CALL_SECONDS", 1)
    monkeypatch.setattr(guarded, "LOAD_SECONDS", 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist; a model directory holds a tokenizer.json"),
        (b"", "is not valid JSON"),
        (b"{", "is not valid JSON"),
        (b"[]", "not a tokenizer"),
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


# what runs where


def changed(library, **parts):
    for name, part in parts.items():
        setattr(library, name, part)
    return library


GROWING = normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 16)
LONG_WORDS = models.WordPiece(vocab={"a": 0}, unk_token="a", max_input_chars_per_word=10**9)
STRIPPED = made.bytes_alone()
STRIPPED.add_tokens([AddedToken("<mask>", lstrip=True)])
UNPROVEN = {
    "pre_tokenizer has the pattern": made.with_pattern(SLOW),
    "normalizer has the pattern": changed(
        made.bytes_alone(), normalizer=normalizers.Replace(made.Regex("a+"), "b")
    ),
    r"normalizer has the pattern {'Regex': '\\p": changed(
        made.bytes_alone(), normalizer=normalizers.Replace(made.Regex(r"\p{N}{1,3}"), "b")
    ),
    "decoder has the pattern": changed(
        made.bytes_alone(), decoder=decoders.Replace(made.Regex("a+"), "b")
    ),
    "normalizer lengthens texts": changed(made.bytes_alone(), normalizer=GROWING),
    "pre_tokenizer is no list": changed(
        made.bytes_alone(),
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 17),
    ),
    "a model of type 'Unigram'": made.Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)),
    "max_input_chars_per_word=1000000000": made.Tokenizer(LONG_WORDS),
    "an added token with lstrip": STRIPPED,
    "post_processor has a template that repeats itself": changed(
        made.bytes_alone(), post_processor=processors.TemplateProcessing(single="$A $A")
    ),
}


@pytest.mark.parametrize("reason", UNPROVEN)
def test_what_is_not_known_to_be_linear(reason):
    found = unproven(json.loads(UNPROVEN[reason].to_str()))
    assert found is not None
    assert found.startswith(reason)


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
    return changed(library, normalizer=normalizers.Sequence(steps))


@pytest.mark.parametrize(
    "library", [llama_3(), llama_3(LLAMA_3.replace("{1,3}", "")), llama_2(), made.metaspace()]
)
def test_common_kinds_run_in_this_process(tmp_path, library):
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert isinstance(tokenizer._backend, LibraryTokenizer)
    assert tokenizer.encode(made.TEXT) == library.encode(made.TEXT).ids
    assert tokenizer.decode(tokenizer.encode(made.TEXT)) == library.decode(
        library.encode(made.TEXT).ids
    )


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_known_patterns_are_linear(pattern):
    """Long runs of each kind of character take 50 ms; a quadratic pattern needs seconds."""
    tokenizer = LibraryTokenizer(made.with_pattern(pattern).to_str())
    kinds = ["a", "A", " ", "\n", "\r\n", "7", "!", "'s", "é", "日", "\u0301", "/"]
    texts = [run * 30_000 + end for run in kinds for end in ("", "\0")]
    assert unproven(json.loads(tokenizer._backend.to_str())) is None
    for text in texts:
        begin = time.process_time()
        tokenizer.encode(text, False)
        assert time.process_time() - begin < 1, text[:4]


# a process of its own


def test_a_guarded_tokenizer_gives_the_same(tmp_path):
    library = made.with_added_tokens(made.with_pattern(r"[a-m]+|\d"))
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert isinstance(tokenizer._backend, GuardedTokenizer)
    assert tokenizer.vocab_size == library.get_vocab_size()
    for text in ("a cat, 12", "", "<think>x<eos>", "x" * 100_000):
        tokens = tokenizer.encode(text)
        assert tokens == library.encode(text).ids
        assert tokenizer.decode(tokens) == library.decode(tokens)


def test_a_slow_pattern_is_stopped(tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(guarded, "BYTES_A_SECOND", 60)
    tokenizer = load_tokenizer(made.write(made.with_pattern(SLOW), tmp_path))
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"cannot encode a text of 60 characters: .* than 2 s or"):
        tokenizer.encode("b" * 60)
    assert time.monotonic() - begin < 4
    # The next text is served by a new process.
    assert tokenizer.encode("ab") == [65, 66]


def test_a_text_that_grows_without_bound_is_stopped(tmp_path, impatient):
    library = changed(made.with_pattern("x"), normalizer=GROWING)
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    with pytest.raises(ValueError, match=r"cannot encode .* more than 1 s or 4 GiB"):
        tokenizer.encode("a")


def test_an_answer_that_is_too_long_is_not_read(tmp_path):
    growing = normalizers.Sequence([normalizers.Replace("a", "aaaa")] * 9)
    library = changed(made.with_pattern("x"), normalizer=growing)
    tokenizer = load_tokenizer(made.write(library, tmp_path))
    assert len(library.encode("a").ids) == 4**9
    with pytest.raises(ValueError, match="cannot encode a text of 1 characters"):
        tokenizer.encode("a")


def test_a_pattern_that_compiles_without_end(tmp_path, impatient):
    values = json.loads(made.with_pattern("x").to_str())
    values["pre_tokenizer"]["pattern"]["Regex"] = "(?:" * 6 + "a" + "{1000})" * 6
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_ctrl_c_reaches_a_tokenizer_that_hangs(tmp_path):
    path = made.write(made.with_pattern(SLOW), tmp_path)
    code = f"""
import os, signal, threading, time, jspec
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
tokenizer = jspec.load_tokenizer({str(path)!r})
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    tokenizer.encode("b" * 90)
except KeyboardInterrupt:
    print(time.monotonic() - begin < 2, tokenizer.encode("ab"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "True [65, 66]\n"


def test_a_process_that_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "absent"))
    path = made.write(made.with_pattern("x"), tmp_path)
    with pytest.raises(CheckpointError, match=r"its process cannot start: No such file"):
        load_tokenizer(path)


def test_a_panic_is_an_error(tmp_path, capfd):
    """The library panics where onig gives up; nothing of that reaches the terminal."""
    path = made.write(made.with_pattern("(a|a)*$"), tmp_path)
    with pytest.raises(ValueError, match="cannot encode a text of 41 characters: it failed inside"):
        load_tokenizer(path).encode("a" * 40 + "!")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ValueError, match="failed inside"):
        LibraryTokenizer((path / "tokenizer.json").read_text()).encode("a" * 40 + "!", False)


def test_docs_say_what_runs_where():
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    section = page.split("\n## Tokenizers\n")[1].split("\n## ")[0]
    seconds = re.search(r"(\d+) s, and another for each (\d+) KB", section)
    assert seconds is not None
    assert [int(n) for n in seconds.groups()] == [
        guarded.CALL_SECONDS,
        guarded.BYTES_A_SECOND // 1000,
    ]
