"""Text to token ids and back, for tokenizer.json files and for byte-level models."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Backend

from jspec.models.errors import CheckpointError


class Tokenizer:
    """A Hugging Face tokenizer that speaks bytes.

    A byte-level vocabulary without merges (id b is byte b) is used as such: then any bytes can be
    encoded, UTF-8 or not, and nothing is lost on the way back. Other tokenizers need UTF-8.
    """

    def __init__(self, backend: _Backend, *, byte_level: bool):
        self._backend = backend
        self.byte_level = byte_level
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str | bytes, *, special: bool = True) -> list[int]:
        """Token ids of ``text``, with the special tokens that open a document unless told not to.

        Raises `ValueError` for bytes that this tokenizer cannot read.
        """
        if self.byte_level:
            opening = self._backend.encode("", add_special_tokens=special).ids
            return [*opening, *(text.encode() if isinstance(text, str) else text)]
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"byte {error.start} of the text is not UTF-8, which this model's tokenizer "
                    "needs; convert the text, or use a byte-level model"
                ) from None
        return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of ``tokens``; special tokens vanish, bytes that are no UTF-8 become U+FFFD."""
        if self.byte_level:
            return self.raw(tokens).decode(errors="replace")
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def raw(self, tokens: Iterable[int]) -> bytes:
        """Bytes of ``tokens``, exact for a byte-level tokenizer."""
        if self.byte_level:
            return bytes(token for token in tokens if token < 256)
        return self.decode(list(tokens)).encode()

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json into the model directory ``path``."""
        self._backend.save(str(Path(path) / "tokenizer.json"))

    def stream(self) -> Callable[[Sequence[int], bool], str]:
        """A function ``(new tokens, final) -> new text`` that never splits a character."""
        return self._stream_bytes() if self.byte_level else self._stream_text()

    def _stream_bytes(self) -> Callable[[Sequence[int], bool], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda tokens, final: decoder.decode(self.raw(tokens), final)

    def _stream_text(self) -> Callable[[Sequence[int], bool], str]:
        # A token's text can depend on its neighbours, so a short tail is decoded again; the window
        # moves on whenever the text ends on a whole character.
        pending: list[int] = []
        shown = ""

        def advance(tokens: Sequence[int], final: bool) -> str:
            nonlocal pending, shown
            pending = [*pending, *tokens]
            text = self.decode(pending)
            if text.endswith("\ufffd") and not final:
                return ""
            new = text[len(shown) :]
            pending = pending[-8:]
            shown = self.decode(pending)
            return new

        return advance


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer.json of a model directory. Raises `CheckpointError` where there is none."""
    file = Path(path) / "tokenizer.json"
    try:
        text = file.read_text()
    except OSError as error:
        raise CheckpointError(
            f"{file}: cannot be read ({error.strerror}); a model directory holds a tokenizer.json"
        ) from None
    try:
        backend = _Backend.from_str(text)
        model = json.loads(text)["model"]
    except Exception as error:  # the library raises plain Exception for malformed files
        raise CheckpointError(f"{file}: not a tokenizer ({error})") from None
    return Tokenizer(backend, byte_level=_is_byte_level(model))


def _is_byte_level(model: dict) -> bool:
    """Whether the vocabulary is the 256 bytes in order, as byte-level BPE spells them."""
    vocabulary = model.get("vocab")
    if model.get("type") != "BPE" or model.get("merges") or not isinstance(vocabulary, dict):
        return False
    in_order = sorted(vocabulary, key=vocabulary.__getitem__)
    return in_order[:256] == byte_alphabet()


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2's table): itself where it
    prints, else the next unused one from U+0100 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in prints else next(spare)) for byte in range(256)]
