"""Damaged files give a model's settings or one `CheckpointError`, in bounded time and memory.

100,000 cases of each kind with ``-m slow``, few of them by default.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import re
import resource
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jspec import ModelConfig
from jspec.models import saved
from jspec.models.errors import CheckpointError
from jspec.models.families import model_config
from jspec.models.files import read_json
from jspec.models.rope import rope_frequencies
from jspec.models.safetensors_file import stored_tensors
from jspec.models.tokenizer import load_tokenizer
from jspec.models.weights import quantization_of
from tests.conftest import TINY
from tests.models import tokenizers as made
from tests.models.helpers import GOLDEN
from tests.models.mutations import Mutator
from tests.models.test_checkpoint import QUANTIZATION

COUNTS = [
    pytest.param(400, id="few"),
    pytest.param(1_500, id="some", marks=pytest.mark.exhaustive),
    pytest.param(100_000, id="many", marks=pytest.mark.slow),
]
SECONDS = 1.0  # of processor time for a case
MEMORY = 400 << 20  # bytes that all cases together may add at their peak


def campaign(file: Path, contents: Iterator[bytes], use: Callable[[], None], count: int) -> None:
    """Write each of ``contents`` to ``file`` and ``use`` it: only `CheckpointError` may come."""
    refused = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    writer = file.open("wb", buffering=0)  # opening for each case takes longer than all the rest
    for number, content in enumerate(itertools.islice(contents, count)):
        writer.seek(0)
        writer.write(content)
        writer.truncate()
        if number % 1000 == 0:  # code in C that hangs lets no exception through
            faulthandler.dump_traceback_later(300, exit=True)
        begin = time.process_time()
        try:
            use()
        except CheckpointError as error:
            refused += 1
            message = str(error)
            assert str(file) in message, (number, content[:500])
            assert message.isprintable(), (number, message)
            assert len(message) < len(str(file)) + 600, (number, message)
        except BaseException:
            print(number, content[:2000])
            raise
        assert time.process_time() - begin < SECONDS, (number, content[:500])
    writer.close()
    faulthandler.cancel_dump_traceback_later()
    # Damage that is mostly harmless, or refused at the first byte, would show nothing.
    assert 0.3 * count < refused < 0.99 * count
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MEMORY


def headers(mutator: Mutator) -> Iterator[bytes]:
    for number in itertools.count():
        text = mutator.case()
        size = struct.pack("<Q", len(text)) if number % 8 else mutator.damaged(bytes(8))[:8]
        yield size + text + bytes(24 + 16)


@pytest.mark.parametrize("count", COUNTS)
def test_safetensors(tmp_path, count):
    file = tmp_path / "model.safetensors"
    tree = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [8], "data_offsets": [24, 40]},
    }
    words = ["a", "b", "dtype", "shape", "data_offsets", "F64", "I8", "BOOL", [2, 3], [0, 24], 40]

    def use():
        for tensor in stored_tensors(file):
            if 0 < len(tensor.shape) < 4 and tensor.nbytes:
                assert sum(block.nbytes for _, block in tensor.blocks()) == tensor.nbytes

    parts = {
        "dtype": ["F32", "BF16", "I64", "F4"],
        "shape": [[2, 3], [1, 6], [2**62] * 300, [1] * 400, [2**62, 2**62], [0, 2**63], [6]],
        "data_offsets": [[0, 24], [24, 40], [0, 0], [24, 2**62], [2**62, 2**62 + 16]],
    }
    campaign(file, headers(Mutator(1, [tree] * 3 + [{}], words, parts)), use, count)


def use_ropes(config: ModelConfig) -> None:
    for spec in {spec for spec in config.layers if spec.key_size < 1 << 16}:
        size = spec.key_size if config.latent is None else config.latent.rope_size
        if size < 1 << 16:
            rope_frequencies(size, config.ropes[spec.rope])


WORDS = [
    *("llama", "qwen3", "yarn", "llama3", "linear", "default", "rope_type", "factor", "type"),
    *("rope_scaling", "rope_parameters", "rope_theta", "head_dim", "layer_types", "eos_token_id"),
    *("original_max_position_embeddings", "beta_fast", "attention_factor", "quantization_config"),
    *("sliding_window", "use_sliding_window", "mscale", "mscale_all_dim", "full_attention"),
    *(8.0, 32, 1024, 4096, 1e-6, {"rope_type": "yarn", "factor": 4.0}),
]


PARTS = {
    "model_type": ["llama", "qwen2", "qwen3"],
    "rope_scaling": [{"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 2}, None],
    "rope_parameters": [{"rope_type": "default", "rope_theta": 1e6}, {}],
    "factor": [1, 1e12, 1e-6, 9e299],
    "kind": ["linear", "yarn", "llama3"],
    "theta": [1.0000000000000002, 1e12],
    "beta_fast": [1e12, 1e-6],
    "attention_factor": [1e12, None],
    "original_context": [1, 2**31 - 1],
    "max_position_embeddings": [1, 2**31 - 1],
    "num_hidden_layers": [1, 1024, 1025],
}


@pytest.mark.filterwarnings("ignore:.* is outside the vocabulary:UserWarning")
@pytest.mark.parametrize("count", COUNTS)
def test_config(tmp_path, count):
    file = tmp_path / "config.json"
    trees = [json.loads(path.read_text()) for path in sorted(GOLDEN.glob("*/config.json"))]
    trees += [trees[0] | {"quantization_config": QUANTIZATION}]

    def use():
        values = read_json(file)
        config = model_config(values, source=str(file))
        quantization_of(values, str(file))
        use_ropes(config)

    mutator = Mutator(2, trees, WORDS, PARTS)
    campaign(file, (mutator.case() for _ in itertools.count()), use, count)


@pytest.mark.parametrize("count", COUNTS)
def test_saved_settings(tmp_path, count):
    file = tmp_path / saved.SETTINGS
    saved.write_settings(tmp_path, TINY)
    tree = json.loads(file.read_text())
    scaling = {"kind": "yarn", "factor": 4.0, "original_context": 32, "attention_factor": 1.0}
    scaled = tree["config"] | {"ropes": [{"theta": 1e4, "scaling": scaling}]}
    trees = [tree, tree | {"config": scaled}, tree | {"format": 1}]
    words = [*WORDS, "kind", "window", "values_in_keys", "softcap", "layers", "format", "config"]
    mutator = Mutator(3, trees, words, PARTS)

    def use():
        config, _ = saved.read_settings(tmp_path)
        use_ropes(config)

    campaign(file, (mutator.case() for _ in itertools.count()), use, count)


def sequence(key: str, steps: list) -> dict:
    return {"type": "Sequence", key: steps}


@pytest.mark.parametrize("count", COUNTS)
def test_tokenizer(tmp_path, count):
    file = tmp_path / "tokenizer.json"
    kinds = [made.with_added_tokens(kind()) for kind in (made.metaspace, made.word_piece)]
    kinds += [made.byte_fallback(), made.bytes_alone(), made.with_pattern(r"\p{N}{1,3}")]
    trees = [json.loads(kind.to_str()) for kind in kinds]
    padding = {"strategy": {"Fixed": 1 << 20}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    replacing = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Isolated", "invert": False}
    words = [
        *("ByteLevel", "Replace", "Split", "Strip", "Fuse", "ByteFallback", "Metaspace", "Prepend"),
        *("NFKC", "Unigram", "WordPiece", "BPE", "TemplateProcessing", "type", "content", "lstrip"),
    ]
    parts = {
        "normalizer": [{"type": "NFC"}, replacing, sequence("normalizers", [replacing] * 3)],
        "pre_tokenizer": [split, sequence("pretokenizers", [split] * 2), {"type": "Whitespace"}],
        "decoder": [*(tree["decoder"] for tree in trees), sequence("decoders", [replacing] * 3)],
        "model": [tree["model"] for tree in trees],
        "pattern": [{"String": "a"}, {"String": ""}, {"Regex": "a+|b"}, {"Regex": "("}],
        "content": ["aaaa", "", "\ufffd"],
        "padding": [padding],
    }
    mutator = Mutator(4, trees, words, parts)

    def use():
        loaded = load_tokenizer(tmp_path)
        failed = ""
        try:
            tokens = loaded.encode("the cat's 1234 é日𝄞 " * 20)
            assert len(tokens) < 100_000
            loaded.decode([*tokens[:50], 3, 300, 2**31])
        except ValueError as error:
            failed = str(error)
        assert re.fullmatch(r"(the tokenizer cannot .*)?", failed)
        assert failed.isprintable()

    campaign(file, (mutator.case() for _ in itertools.count()), use, count)
