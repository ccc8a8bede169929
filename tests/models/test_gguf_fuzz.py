"""Damaged GGUF files give a model's settings or one `CheckpointError`, in bounded time and memory.

Numbers, names and counts of the header are replaced where they lie, and bytes anywhere in it.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from jspec import ModelConfig
from jspec.models.checkpoint import load_model
from jspec.models.gguf_file import GGUFFile, _Reader
from jspec.models.gguf_weights import GGUFWeights
from jspec.models.tokenizer import load_tokenizer
from tests.models.gguf_files import write_gguf, write_vocabulary
from tests.models.mutations import Mutator
from tests.models.test_fuzz import COUNTS, campaign

INTEGERS = (0, 1, 2, 3, 5, 7, 8, 9, 12, 13, 77, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
INTEGERS += (2**33, 2**40, 2**48, 2**60, 2**62, 2**63, 2**64 - 1)
VOCABULARY = {
    "model": "gpt2",
    "pre": "default",
    "tokens": ["a", "b", "ab", "<|im_end|>"],
    "token_type": [1, 1, 1, 3],
    "merges": ["a b"],
    "eos_token_id": 3,
    "chat_template": "{{ messages[0].content }}",
}


def spans(monkeypatch: pytest.MonkeyPatch, path: Path) -> list[tuple[int, int]]:
    """The start and the size of each value of the header, in the order of reading."""
    found: list[tuple[int, int]] = []
    read = _Reader._bytes

    def recorded(reader, size, what):
        found.append((reader.at, size))
        return read(reader, size, what)

    with monkeypatch.context() as patch:
        patch.setattr(_Reader, "_bytes", recorded)
        GGUFFile(path)
    return [(8, 8), (16, 8), *found]


class GGUFMutator:
    """Damages copies of the files ``contents``, whose headers have values at ``places``."""

    def __init__(self, seed: int, contents: list[bytes], places: list[list[tuple[int, int]]]):
        self._random = random.Random(seed)
        self._bytes = Mutator(seed, [{}], [])
        self._files = list(zip(contents, places, strict=True))
        self._words = sorted(
            {text[at : at + size] for text, all_ in self._files for at, size in all_ if size > 8}
        )

    def case(self) -> bytes:
        content, places = self._random.choice(self._files)
        for _ in range(self._random.choice([1, 1, 2, 3])):
            at, size = self._random.choice(places)
            if at + size > len(content):
                continue
            content = content[:at] + self._value(content, at, size) + content[at + size :]
        if self._random.random() < 0.2:
            end = places[-1][0] + 8
            content = self._bytes.damaged(content[:end]) + content[end:]
        return (
            content[: self._random.randrange(len(content))]
            if self._random.random() < 0.02
            else content
        )

    def _value(self, content: bytes, at: int, size: int) -> bytes:
        if size in (4, 8):
            if self._random.random() < 0.2:
                number = self._random.choice([float("nan"), float("inf"), -1.0, 0.0, 1e30, 1e-30])
                return struct.pack("<f" if size == 4 else "<d", number)
            near = int.from_bytes(content[at : at + size], "little") + self._random.choice([-1, 1])
            number = self._random.choice([*INTEGERS, near])
            return (number % 256**size).to_bytes(size, "little")
        if size > 8 and self._random.random() < 0.5:  # another name of the same length, or cut
            word = self._random.choice(self._words)[:size]
            return word + b"_" * (size - len(word))
        return self._random.randbytes(size)


@pytest.mark.filterwarnings("ignore:.*is outside the vocabulary of")
@pytest.mark.parametrize("count", COUNTS)
def test_gguf(tmp_path, monkeypatch, count):
    names = ("llama2", "qwen2_yarn", "qwen3_moe", "gemma3", "gpt_oss")
    tokenizer = {f"tokenizer.ggml.{key}": value for key, value in VOCABULARY.items()}
    paths = [write_gguf(tmp_path / f"{name}.gguf", name) for name in names]
    paths.append(write_gguf(tmp_path / "all.gguf", "qwen3", **tokenizer))
    paths.append(write_vocabulary(tmp_path / "vocabulary.gguf", **VOCABULARY))
    file = tmp_path / "folder" / "model.gguf"
    file.parent.mkdir()
    mutator = GGUFMutator(
        5, [p.read_bytes() for p in paths], [spans(monkeypatch, p) for p in paths]
    )

    def cases() -> Iterator[bytes]:
        while True:
            yield mutator.case()

    numbers = itertools.count()

    def use() -> None:
        number = next(numbers)
        if number % 4 == 0:
            load_tokenizer(file)
        elif number % 50 == 1:
            load_model(file)
        else:
            weights = GGUFWeights(file)
            weights.check_counts()
            assert isinstance(weights.config, ModelConfig)

    campaign(file, cases(), use, count)
