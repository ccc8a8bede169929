"""The tokenizer of a GGUF file as the fields of a tokenizer.json, which the library reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jspec.checks import shown
from jspec.models import split_patterns as patterns
from jspec.models.errors import CheckpointError
from jspec.models.files import Fields
from jspec.models.gguf_file import GGUFFile, Strings
from jspec.models.gguf_vocabulary import (
    CONTROL,
    END_NAMES,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    numbers,
    read_vocabulary,
)

_WORK = 1 << 28  # characters looked up where scores become merges; Gemma's take 2**24
_SPACE = "\u2581"


class UnreadTokenizerError(CheckpointError):
    """A file has no tokenizer, or one of a kind that jspec does not read."""


@dataclasses.dataclass(frozen=True)
class Splitting:
    """How a value of ``tokenizer.ggml.pre`` splits texts: by ``patterns``, one after the other.

    ``whole_words``: a word that is a token is that token, whatever the merges say. ``bos``: whether
    a text begins with the token of that name where the file does not say. ``nfc``: whether texts
    are normalised, as the models' own tokenizers do, and llama.cpp does not.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_SPLITTINGS = {
    "default": Splitting(patterns.DEFAULT),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": Splitting(
        patterns.LLAMA3, whole_words=True, bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": Splitting(patterns.LLAMA3),
    "glm4 glm5": Splitting(patterns.LLAMA3, whole_words=True),
    "qwen2": Splitting(patterns.QWEN2, nfc=True),
    "qwen35": Splitting(patterns.QWEN35, nfc=True),
    "stablelm2 deepseek-r1-qwen kormo megrez hunyuan solar-open grok-2": Splitting(patterns.QWEN2),
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4": Splitting(
        patterns.GPT2
    ),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Splitting(
        patterns.DIGITS
    ),
    "falcon": Splitting(patterns.FALCON),
    "deepseek-llm": Splitting(patterns.DEEPSEEK_LLM),
    "deepseek-coder": Splitting(patterns.DEEPSEEK_CODER),
    "deepseek-v3 hunyuan-dense joyai-llm": Splitting(patterns.DEEPSEEK_V3),
    "tekken": Splitting(patterns.TEKKEN, whole_words=True, bos=True),
    "gpt-4o llama4 kanana2 minimax-m2": Splitting(patterns.GPT4O),
    "poro-chat bloom gpt3-finnish": Splitting(patterns.BLOOM),
    "viking": Splitting(patterns.VIKING),
    "seed-coder": Splitting(patterns.SEED_CODER),
    "bailingmoe bailingmoe2 llada-moe": Splitting(patterns.BAILING),
    "minicpm5": Splitting(patterns.MINICPM5, whole_words=True),
    "superbpe": Splitting(patterns.SUPERBPE),
}
SPLITTINGS = {name: split for names, split in _SPLITTINGS.items() for name in names.split()}


def tokenizer_fields(file: GGUFFile) -> dict[str, Any]:
    """What a tokenizer.json of the tokenizer in ``file`` holds.

    Byte-level BPE (``gpt2``) and SentencePiece's BPE (``llama``, Gemma's among it) are read. Raises
    `UnreadTokenizerError` where the file has none or another, and `CheckpointError` where it is
    malformed.
    """
    fields = Fields(file.metadata, str(file.path))
    kind = fields.text("tokenizer.ggml.model", "none")
    vocabulary = read_vocabulary(file)
    if kind in ("none", "no_vocab") or vocabulary is None:
        raise _unread(fields, "the file has no tokenizer")
    if kind == "gpt2":
        return _byte_level(fields, vocabulary)
    if kind == "llama":
        return _sentencepiece(fields, vocabulary)
    raise _unread(
        fields,
        f"tokenizer.ggml.model={shown(kind)} is a kind of tokenizer that jspec does not read; "
        "it reads gpt2 and llama",
    )


def _unread(fields: Fields, reason: str) -> UnreadTokenizerError:
    return UnreadTokenizerError(
        f"{fields.source}: {reason}; put the model's tokenizer.json into its folder"
    )


def _byte_level(fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in SPLITTINGS:
        raise _unread(fields, f"tokenizer.ggml.pre={shown(name)} is unknown to jspec")
    splitting = SPLITTINGS[name]
    merges = fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, Strings):
        raise fields.error("tokenizer.ggml.merges must be a list of strings")
    splits: list[dict[str, Any]] = [
        {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        for pattern in splitting.patterns
    ]
    bytes_alone = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    byte_level = {"type": "ByteLevel", **bytes_alone}
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {"type": "NFC"} if splitting.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "post_processor": _template(fields, vocabulary, bos=splitting.bos),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "ignore_merges": splitting.whole_words,
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
            "merges": list(merges),
        },
    }


def _sentencepiece(fields: Fields, vocabulary: Vocabulary) -> dict[str, Any]:
    """Pairs of characters are joined in the order of the scores of what they become."""
    scores = numbers(fields, "tokenizer.ggml.scores", "fi", len(vocabulary.tokens))
    if scores is None:
        raise fields.error("tokenizer.ggml.scores is missing; a tokenizer of kind llama has one")
    prefix = fields.boolean("tokenizer.ggml.add_space_prefix", True)
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    steps = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = vocabulary.roles.get("unknown", 0)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {"type": "Sequence", "normalizers": [*steps, to_mark]},
        "pre_tokenizer": None,
        "post_processor": _template(fields, vocabulary, bos=True, defaults={"bos": 1, "eos": 2}),
        "decoder": {
            "type": "Sequence",
            "decoders": [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
            "merges": _merges(fields, vocabulary, scores),
        },
    }


def _merges(fields: Fields, vocabulary: Vocabulary, scores: np.ndarray) -> list[list[str]]:
    """Each way to join two tokens into a third, by the score of the third, the highest first."""
    if sum(len(token) ** 2 for token in vocabulary.tokens) > _WORK:
        raise fields.error("tokenizer.ggml.tokens are too many or too long for scores")
    joinable = np.isin(vocabulary.types, (NORMAL, USER_DEFINED, UNUSED)).tolist()
    known = {token for token, use in zip(vocabulary.tokens, joinable, strict=True) if use}
    merges: list[list[str]] = []
    # The sort is stable: of equal scores the shorter token comes first, as in llama.cpp's queue.
    for index in np.argsort(-scores.astype(np.float64), kind="stable").tolist():
        token = vocabulary.tokens[index]
        if joinable[index]:
            for at in range(1, len(token)):
                if token[:at] in known and token[at:] in known:
                    merges.append([token[:at], token[at:]])
    return merges


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    """Tokens that are matched in a text before it is split; control tokens have no text."""
    added = []
    for index in np.flatnonzero(
        np.isin(vocabulary.types, (UNKNOWN, CONTROL, USER_DEFINED))
    ).tolist():
        token = vocabulary.tokens[index]
        is_user_defined = vocabulary.types[index] == USER_DEFINED
        is_end = token in END_NAMES and token.startswith("<|")
        added.append(
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": bool(not is_user_defined or is_end),
            }
        )
    return added


def _template(
    fields: Fields, vocabulary: Vocabulary, *, bos: bool, defaults: dict[str, int] | None = None
) -> dict[str, Any] | None:
    """What adds the tokens before and after a text; None where there are none.

    ``bos``: whether the first is added where the file does not say. ``defaults``: ids of roles that
    it need not name.
    """
    roles = {**(defaults or {}), **vocabulary.roles}
    parts: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for role, usual in (("bos", bos), ("eos", False)):
        key = f"tokenizer.ggml.add_{role}_token"
        if not fields.boolean(key, usual):
            continue
        if not 0 <= roles.get(role, -1) < len(vocabulary.tokens):
            raise fields.error(f"{key} is true, but tokenizer.ggml.{role}_token_id is missing")
        token = vocabulary.tokens[roles[role]]
        part = {"SpecialToken": {"id": token, "type_id": 0}}
        parts = [part, *parts] if role == "bos" else [*parts, part]
        special[token] = {"id": token, "ids": [roles[role]], "tokens": [token]}
    if not special:
        return None
    return {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
