"""Small tokenizers of every kind, built with the library."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jspec.models.token_bytes import byte_alphabet

TEXT = "the cat sat on the mat, isn't it? né € 𝄞 日本語テキスト"


def byte_level() -> Tokenizer:
    """A byte-level BPE with merges, as Llama 3 and Qwen have."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([TEXT] * 9, trainer)
    return made


def bytes_alone() -> Tokenizer:
    """Byte-level without merges: id b is byte b."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """Characters, and bytes for those that are not in the vocabulary, as Llama 2 and Gemma have."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁the", "cat", "é", "日", "▁▁", "", "\ufffd", " ", "x▁y"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    return made


def metaspace() -> Tokenizer:
    pieces = ["▁", "a", "b", "▁the", "▁cat", "é", "日", "▁▁", "", "\ufffd"]
    made = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    made.decoder = decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    pieces = "[UNK] a ##b the ##cat . 's not do é ##日 n't , ##".split()
    vocabulary = {piece: number for number, piece in enumerate([*pieces, ""])}
    made = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    return made


def no_decoder() -> Tokenizer:
    made = word_piece()
    made.decoder = None
    return made


def word_ends() -> Tokenizer:
    """A token's text depends on whether it is the last."""
    pieces = ["a</w>", "b", "the</w>", "c", "é</w>"]
    made = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[]))
    made.decoder = decoders.BPEDecoder()
    return made


def with_pattern(pattern: str) -> Tokenizer:
    """Characters, split by a regular expression."""
    vocabulary = {chr(code): code - 32 for code in range(32, 127)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    made.decoder = decoders.Fuse()
    return made


def with_added_tokens(made: Tokenizer) -> Tokenizer:
    added = [AddedToken(text, special=False) for text in ("<think>", "日é")]
    made.add_tokens(added)
    made.add_special_tokens(["<eos>"])
    return made


def write(made: Tokenizer, path: Path, **changes) -> Path:
    """Save it in the directory ``path``; ``changes`` are fields of tokenizer.json."""
    path.mkdir(parents=True, exist_ok=True)
    values = json.loads(made.to_str()) | changes
    (path / "tokenizer.json").write_text(json.dumps(values))
    return path
