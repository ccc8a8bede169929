"""The bytes that a token stands for, where its neighbours do not change them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True)
class ByteDecoder:
    """A decoder of tokenizer.json that joins the bytes of tokens.

    ``of`` gives the bytes of a token as the vocabulary spells it. At most ``leading`` spaces are
    dropped where a text begins.
    """

    of: Callable[[str], bytes]
    leading: int = 0


def byte_decoder(decoder: Any) -> ByteDecoder | None:
    """A decoder for the "decoder" of a tokenizer.json that joins bytes; None for other kinds.

    Two kinds do: ByteLevel, as GPT-2, Llama 3 and Qwen have it, and ByteFallback after
    replacements, as Llama 2, Mistral and Gemma have it.
    """
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteDecoder(_of_byte_level)
    if "ByteFallback" not in kinds:
        return None
    at = kinds.index("ByteFallback")
    replacements = [pair for step in steps[:at] if (pair := _replacement(step)) is not None]
    leading = _leading(steps[-1]) if kinds[-1] == "Strip" else 0
    ends = [["Fuse"], ["Fuse", "Strip"]]
    if len(replacements) < at or kinds[at + 1 :] not in ends or leading is None:
        return None

    def of(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        byte = _BYTE.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return ByteDecoder(of, leading)


def _steps(decoder: Any) -> list[dict[str, Any]]:
    is_sequence = isinstance(decoder, dict) and decoder.get("type") == "Sequence"
    steps = decoder.get("decoders") if is_sequence else [decoder]
    return [step for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    """The text that a Replace step replaces and its replacement; None for other steps."""
    pattern, content = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, dict) else None
    if step.get("type") != "Replace" or not isinstance(content, str):
        return None
    return (old, content) if isinstance(old, str) and old else None


def _leading(step: dict[str, Any]) -> int | None:
    """How many leading spaces a Strip takes; None where it takes anything else."""
    start = step.get("start")
    if step.get("content") != " " or step.get("stop") != 0 or type(start) is not int:
        return None
    return start


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's table): itself where it
    prints, else the next unused one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in prints else next(spare)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


def _of_byte_level(token: str) -> bytes:
    # An added token may hold characters that stand for no byte: then all of it is text.
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()
