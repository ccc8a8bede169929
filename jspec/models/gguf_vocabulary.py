"""The vocabulary of a GGUF file: its tokens, their types, and which of them end a text."""

from __future__ import annotations

import dataclasses

import numpy as np

from jspec.checks import shown
from jspec.models.files import Fields
from jspec.models.gguf_file import GGUFFile, Strings

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Roles of tokens as a file calls them, and as chat templates do.
ROLES = {
    "bos": "bos",
    "eos": "eos",
    "unknown": "unk",
    "padding": "pad",
    "seperator": "sep",  # as the format spells it
    "cls": "cls",
    "mask": "mask",
}
_ENDS = ("eos", "eot", "eom")
NO_TOKEN = (None, -1, 2**32 - 1)  # as files write that they have no such token
# Tokens that end a text or a turn wherever they are control tokens, as llama.cpp has them.
END_NAMES = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <\uff5cend\u2581of\u2581sentence\uff5c> [e~[".split()
)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """``tokens`` by id, the type of each, int32 ``[V]``, and the ids of the ``roles`` that a file
    names, such as ``bos`` and ``eot``."""

    tokens: list[str]
    types: np.ndarray
    roles: dict[str, int]

    def special_tokens(self) -> dict[str, str]:
        """The tokens that a chat template may name: ``bos_token``, ``eos_token``, ..."""
        return {
            f"{name}_token": self.tokens[self.roles[role]]
            for role, name in ROLES.items()
            if role in self.roles
        }

    def stop_tokens(self) -> list[int]:
        """Ids that end a text or a turn: those that the file names, then those known by name."""
        stops = [self.roles[role] for role in _ENDS if role in self.roles]
        named = {
            token: index
            for index in np.flatnonzero(np.isin(self.types, (CONTROL, USER_DEFINED))).tolist()
            if (token := self.tokens[index]) in END_NAMES
            and (self.types[index] == CONTROL or token.startswith("<|"))
        }
        if {"<|call|>", "<|return|>"} <= named.keys() or {"<|calls|>", "<|flush|>"} <= named.keys():
            # In these formats it ends a message, and the turn goes on.
            end = named.pop("<|end|>", None)
            stops = [stop for stop in stops if stop != end]
        return list(dict.fromkeys([*stops, *named.values()]))


def read_vocabulary(file: GGUFFile) -> Vocabulary | None:
    """The vocabulary of ``file``, None where it has no tokens.

    Raises `CheckpointError` where it is malformed.
    """
    fields = Fields(file.metadata, str(file.path))
    stored = fields.get("tokenizer.ggml.tokens")
    if stored is None:
        return None
    if not isinstance(stored, Strings):
        raise fields.error("tokenizer.ggml.tokens must be a list of strings")
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(stored)]
    if len(set(tokens)) != len(tokens):
        raise fields.error("tokenizer.ggml.tokens has a token twice")
    types = numbers(fields, "tokenizer.ggml.token_type", "i", len(tokens))
    if types is None:
        types = np.full(len(tokens), NORMAL, np.int32)
    roles = {}
    for role in (*ROLES, "eot", "eom"):
        key = f"tokenizer.ggml.{role}_token_id"
        if fields.get(key) in NO_TOKEN:
            continue
        if role in _ENDS:
            ends = fields.tokens(key, len(tokens))
            roles |= {role: ends[0]} if ends else {}
            continue
        roles[role] = fields.count(key)
        if roles[role] >= len(tokens):
            raise fields.error(f"{key}={roles[role]} must be below {len(tokens)}, its tokens")
    return Vocabulary(tokens, types, roles)


def numbers(fields: Fields, key: str, kinds: str, count: int) -> np.ndarray | None:
    """``count`` numbers under ``key`` of a dtype whose kind is among ``kinds``; None if absent."""
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) < count:
        got = f"{len(value)} of {value.dtype}" if isinstance(value, np.ndarray) else shown(value)
        raise fields.error(f"{key} must be a list of {count} numbers, got {got}")
    return value[:count]
