"""Tokens that the files next to a tokenizer.json add, name, or call special.

The rules are those of transformers 5: added_tokens_decoder of tokenizer_config.json comes first;
special_tokens_map.json and added_tokens.json count only where it is missing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from jspec.checks import shown
from jspec.models.files import INTEGER_LIMIT, Fields, read_json

SETTINGS = "tokenizer_config.json"
_MAP, _ADDED = "special_tokens_map.json", "added_tokens.json"
# In the order in which transformers gives those that are new their ids.
_NAMES = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True)
class Declared:
    """A token that a file declares.

    Attributes:
        content: its spelling.
        index: its id, None where the file does not say.
        flags: how it is matched in a text, and whether it is special; what is missing is left to
            the tokenizer.
    """

    content: str
    index: int | None
    flags: dict[str, bool]


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """What the files of a model directory declare.

    Attributes:
        named: special tokens by name, such as ``eos_token``.
        declared: all tokens, in the order in which new ones get their ids.
        source: the file that declares them, for error messages.
    """

    named: dict[str, str]
    declared: list[Declared]
    source: Fields

    def add_to(self, library: LibraryTokenizer) -> bool:
        """Add the tokens to a tokenizer, and mark special ones; returns whether it changed.

        Raises:
            CheckpointError: a token has another id in the tokenizer than in the file.
        """
        added = {token.content: token for token in library.get_added_tokens_decoder().values()}
        changed = []
        for token in self.declared:
            plain = not token.flags.get("special", False)
            old = added.get(token.content) or AddedToken(token.content, normalized=plain)
            flags = {flag: token.flags.get(flag, getattr(old, flag)) for flag in _FLAGS}
            is_special = flags["special"] or old.special  # the library does not undo it
            new = AddedToken(token.content, **{**flags, "special": is_special})
            if token.content not in added or _flags(new) != _flags(old):
                changed.append(new)
                added[token.content] = new
        for special, group in itertools.groupby(changed, key=lambda token: token.special):
            (library.add_special_tokens if special else library.add_tokens)(list(group))
        for token in self.declared:
            index = library.token_to_id(token.content)
            if token.index not in (None, index):
                raise self.source.error(
                    f"token {shown(token.content)} has id {token.index}, but the tokenizer gives "
                    f"it {index}; correct tokenizer.json, which must hold the tokens before it"
                )
        return bool(changed)


def read_special_tokens(directory: Path) -> SpecialTokens:
    """What tokenizer_config.json and the files of its kind in ``directory`` declare.

    Raises:
        CheckpointError: one of them is malformed.
    """
    settings = _fields(directory / SETTINGS)
    added = settings.get("added_tokens_decoder")
    values, indices = dict(settings.values), {}
    if added is None:
        values |= _fields(directory / _MAP).values
        indices = _indices(_fields(directory / _ADDED))
        added = {}
    elif not isinstance(added, dict):
        raise settings.error("added_tokens_decoder must be an object of tokens by their ids")
    source = Fields(values, settings.source)
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    named = dict(_named(source, values))
    if isinstance(extra, dict):  # such as {"image_token": "<image>"}
        named |= {key: _declared(source, value, None) for key, value in extra.items()}
        extra = []
    elif not isinstance(extra, list):
        raise source.error("extra_special_tokens must be a list of tokens or an object of them")
    special = [*named.values(), *(_declared(source, value, None) for value in extra)]
    special = [dataclasses.replace(t, flags=t.flags | {"special": True}) for t in special]
    names = {token.content for token in special}
    by_id = [_declared(source, value, _index(source, key)) for key, value in added.items()]
    by_id += [
        Declared(content, index, {"special": content in names, "normalized": content not in names})
        for content, index in indices.items()
    ]
    by_id.sort(key=lambda token: token.index or 0)
    declared = [token for token in (*by_id, *special) if token.content]
    named_texts = {key: token.content for key, token in named.items() if token.content}
    return SpecialTokens(named_texts, declared, source)


def _fields(path: Path) -> Fields:
    return Fields(read_json(path) if path.exists() else {}, str(path))


def _named(source: Fields, values: dict[str, Any]) -> Iterator[tuple[str, Declared]]:
    for key in dict.fromkeys((*_NAMES, *values)):
        value = values.get(key)
        if key.endswith("_token") and isinstance(value, str | dict):
            yield key, _declared(source, value, None)


def _declared(source: Fields, value: Any, index: int | None) -> Declared:
    """A token from its spelling, or from an object with a ``content`` and flags."""
    if isinstance(value, str):
        return Declared(value, index, {})
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str):
        raise source.error(f"{shown(value)} is no token; it must be a string, or have a content")
    fields = Fields(value, f"{source.source}: token {shown(content)}")
    return Declared(content, index, {f: fields.boolean(f) for f in _FLAGS if fields.has(f)})


def _index(source: Fields, key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 11 and int(key) <= INTEGER_LIMIT):
        raise source.error(f"added_tokens_decoder: {shown(key)} must be a token id")
    return int(key)


def _indices(fields: Fields) -> dict[str, int]:
    return {content: fields.count(content) for content in fields.values}


def _flags(token: AddedToken) -> list[bool]:
    return [getattr(token, flag) for flag in _FLAGS]
