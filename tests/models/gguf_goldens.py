"""Vocabularies for GGUF files, and the token ids that llama.cpp gives texts by them.

`python -m tests.models.gguf_goldens` writes them again into tests/models/gguf_tokenizers, of the
texts there. It needs the package llama-cpp-python, whose version 0.3.36 wrote what is there; the
tests need no more than the files.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.models.gguf_files import write_vocabulary

FOLDER = Path(__file__).parent / "gguf_tokenizers"
TEXTS = json.loads((FOLDER / "texts.json").read_text())
# One name of each splitting; the others share theirs.
NAMES = (
    "default llama-bpe dbrx qwen2 qwen35 stablelm2 gpt-2 starcoder falcon deepseek-llm "
    "deepseek-coder deepseek-v3 tekken gpt-4o poro-chat viking seed-coder bailingmoe minicpm5 "
    "superbpe"
).split()
_CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_USER_DEFINED = ["<tool>", "</tool>"]
_WHOLE_WORDS = ["\u0120world", "\u0120HTTPServer"]  # that no merges lead to


def byte_level() -> dict[str, Any]:
    """A byte-level BPE trained on texts as a whole: its tokens cross what splittings part."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(_parts(), trainer)
    stored = json.loads(library.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get) + _WHOLE_WORDS
    return {
        "model": "gpt2",
        "tokens": tokens + _CONTROL + _USER_DEFINED,
        "token_type": [1] * len(tokens) + [3] * 3 + [4] * 2,
        "merges": [" ".join(merge) for merge in stored["merges"]],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }


def sentencepiece() -> dict[str, Any]:
    """Pieces with scores as SentencePiece's BPE has them, and bytes for rarer characters."""
    library = Tokenizer(models.BPE())
    library.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=600, limit_alphabet=80, show_progress=False)
    library.train_from_iterator(_parts(), trainer)
    vocabulary = json.loads(library.to_str())["model"]["vocab"]
    pieces = sorted(vocabulary, key=vocabulary.get)
    user_defined = ["\n\n", "  ", "   ", *_USER_DEFINED]
    pieces = [piece for piece in pieces if piece not in user_defined]
    bytes_alone = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_alone, *user_defined, *pieces, *_CONTROL[:2]]
    types = [2, 3, 3] + [6] * 256 + [4] * len(user_defined) + [1] * len(pieces) + [3, 3]
    scores = [0.0] * (3 + 256) + [-1000.0] * len(user_defined)
    scores += [-float(rank) for rank in range(len(pieces))] + [-1000.0] * 2
    return {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}


def _parts() -> list[str]:
    texts = [text.replace("<|im_", "").replace("tool>", "") for text in TEXTS]
    return [text[at : at + 60] for text in texts for at in range(0, len(text), 7)]


def files() -> dict[str, dict[str, Any]]:
    """The name of each file, a vocabulary first, and the fields that it has besides that."""
    cases: dict[str, dict[str, Any]] = {f"byte_level {name}": {"pre": name} for name in NAMES}
    cases["sentencepiece"] = {}
    cases["sentencepiece gemma"] = {"add_space_prefix": False}
    cases["sentencepiece ends"] = {"add_bos_token": False, "add_eos_token": True}
    return cases


def _write() -> None:
    import llama_cpp

    FOLDER.mkdir(exist_ok=True)
    vocabularies = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
    ids: dict[str, list[list[int]]] = {}
    for name, fields in files().items():
        with tempfile.TemporaryDirectory() as folder:
            path = write_vocabulary(
                Path(folder) / "model.gguf", **vocabularies[name.split()[0]], **fields
            )
            model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
            ids[name] = [model.tokenize(t.encode(), add_bos=True, special=True) for t in TEXTS]
    for name, fields in vocabularies.items():
        _dump(FOLDER / f"{name}.json", fields)
    _dump(FOLDER / "ids.json", ids)


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    _write()
