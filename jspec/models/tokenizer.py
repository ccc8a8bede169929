"""Text to token ids and back, for tokenizer.json files and for byte-level models."""

from __future__ import annotations

import codecs
import contextlib
import json
import operator
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from jspec.checks import shown
from jspec.models.errors import CheckpointError, on_one_line
from jspec.models.files import check_directory, directory_of, read_json
from jspec.models.gguf_file import GGUFFile, gguf_path
from jspec.models.gguf_tokenizer import UnreadTokenizerError, tokenizer_fields
from jspec.models.gguf_vocabulary import read_vocabulary
from jspec.models.special_tokens import read_special_tokens
from jspec.models.token_bytes import byte_alphabet, byte_decoder

FILE_LIMIT = 64 << 20
_BROKEN = "\ufffd"
_MAX_PENDING = 4  # tokens that may wait for the rest of a character; its bytes are no more


class Tokenizer:
    """A Hugging Face tokenizer that also encodes and decodes bytes; `load_tokenizer` returns one.

    A byte-level vocabulary without merges (id b is byte b) encodes any bytes. Other tokenizers
    need UTF-8. Where the bytes of a token do not depend on its neighbours, `decode` joins them,
    which gives the text of the tokenizers library, except that an invalid byte does not change the
    complete characters next to it.

    Attributes:
        vocab_size: number of token ids.
        special_ids: the special tokens, which have no text, by id, as they are spelled.
        special_tokens: special tokens by the name that the model's files give them, such as
            ``{"eos_token": "</s>"}``.
        byte_level: whether id b is byte b, so that bytes that are not UTF-8 can be encoded.
    """

    def __init__(
        self,
        library: LibraryTokenizer,
        values: dict[str, Any],
        content: bytes,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ):
        self._library = library
        self._content = content
        self.special_tokens = dict(special_tokens)
        self.vocab_size = library.get_vocab_size(with_added_tokens=True)
        added = library.get_added_tokens_decoder()
        self._added = [token.content for token in added.values()]
        self.special_ids = {index: token.content for index, token in added.items() if token.special}
        self._joined = byte_decoder(values.get("decoder"))
        self._pieces: dict[int, bytes] = {}
        self._template = self._read_template() if _is_byte_level(values) else None
        self.byte_level = self._template is not None

    def _read_template(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after a text; None where a text is not kept as it is."""
        byte = ord("a")
        around = self._encode("a", special=True)
        if self._encode("a", special=False) != [byte] or around.count(byte) != 1:
            return None
        at = around.index(byte)
        return around[:at], around[at + 1 :]

    def encode(self, text: str | bytes, *, special: bool = True) -> list[int]:
        """Convert ``text`` to token ids.

        Args:
            text: a string, or bytes; UTF-8 unless the tokenizer is byte-level.
            special: whether to add the special tokens around a document, as BOS. Special tokens
                spelled out in ``text`` become one token each either way, except in bytes that are
                not UTF-8.

        Returns:
            The token ids.

        Raises:
            ValueError: ``text`` is not UTF-8, or the tokenizer cannot encode it.
        """
        try:
            data = text.encode() if isinstance(text, str) else text
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start + 1} of the text is half of a surrogate pair, which is no "
                "text; remove it"
            ) from None
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            if self._template is None:
                raise ValueError(
                    f"byte {error.start + 1} of the text is not UTF-8, which this model's "
                    "tokenizer needs; convert the text, or use a byte-level model"
                ) from None
            return self._encode_bytes(data, self._template, special)
        if self._template is not None and not any(token in text for token in self._added):
            return self._encode_bytes(data, self._template, special)
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        with _library_errors(f"the tokenizer cannot encode a text of {len(text)} characters"):
            return self._library.encode(text, add_special_tokens=special).ids

    @staticmethod
    def _encode_bytes(data: bytes, template: tuple[list[int], list[int]], special: bool):
        before, after = template if special else ([], [])
        return [*before, *data, *after]

    def decode(self, tokens: Iterable[int], *, prompt: Iterable[int] = ()) -> str:
        """Convert token ids to text, without special tokens and unknown ids.

        Args:
            tokens: token ids.
            prompt: token ids before them. Tokenizers like that of Llama 2 drop the first space of a
                text, which after a prompt is not the first.

        Returns:
            What the text of ``prompt`` and ``tokens`` adds to that of ``prompt``; bytes that are
            not UTF-8 become U+FFFD.
        """
        prompt = list(prompt)
        if prompt:
            return self.stream(prompt)(list(tokens), True)
        if self._joined is None:
            return self._decode(self._known(tokens))
        return self.raw(tokens).decode(errors="replace")

    def token_of(self, text: str) -> int | None:
        """The token that spells ``text`` wherever it stands.

        Args:
            text: a text.

        Returns:
            The id of a special token of this spelling, or of a token whose text contains ``text``
            after any other token; None where no single token is known to.
        """
        try:
            ids = self.encode(text, special=False)
        except ValueError:
            return None
        if len(ids) != 1:
            return None
        # A token may also stand for what a normalizer makes of the text, or for all unknown texts.
        spelling = self.special_ids.get(ids[0])
        if spelling is None:
            spelling = "" if self._joined is None else self.decode(ids)
        return ids[0] if text in spelling else None

    def ordinary_tokens(self) -> dict[int, str]:
        """The tokens of the vocabulary by id, without special and other added ones."""
        added = self._library.get_added_tokens_decoder().keys()
        vocabulary = self._library.get_vocab(with_added_tokens=False)
        return {index: token for token, index in vocabulary.items() if index not in added}

    def first_difference(self, other: Tokenizer) -> int | None:
        """The first id with another ordinary token in ``other``, of those that both have."""
        mine, others = self.ordinary_tokens(), other.ordinary_tokens()
        differing = (index for index in mine.keys() & others.keys() if mine[index] != others[index])
        return min(differing, default=None)

    def raw(self, tokens: Iterable[int]) -> bytes:
        """Convert token ids to bytes, without special tokens and unknown ids.

        Args:
            tokens: token ids.

        Returns:
            The bytes, exact where those of a token do not depend on its neighbours, else the
            UTF-8 of `decode`.
        """
        if self._joined is None:
            return self._decode(self._known(tokens)).encode()
        data = self._bytes(tokens)
        return data[_leading(data, self._joined.leading) :]

    def save(self, path: str | Path) -> None:
        """Write tokenizer.json into the model directory ``path``.

        It is the file as it was loaded, or one with the tokens that other files added to it.

        Raises:
            CheckpointError: the file cannot be written.
        """
        file = Path(path) / "tokenizer.json"
        partial = file.with_name(f".tokenizer.{uuid.uuid4().hex}.partial")
        try:
            partial.write_bytes(self._content)
            os.replace(partial, file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be written: {error.strerror}") from None
        finally:
            partial.unlink(missing_ok=True)

    def stream(self, prompt: Iterable[int] = ()) -> Callable[[Sequence[int], bool], str]:
        """Create an incremental decoder that never splits a character.

        Args:
            prompt: token ids before the first ones, as in `decode`.

        Returns:
            A function ``(new_tokens, final) -> new_text``. The texts of its calls, joined, equal
            `decode` of all tokens. ``final``: no more tokens follow.
        """
        return self._stream_text(prompt) if self._joined is None else self._stream_bytes(prompt)

    def _stream_bytes(self, prompt: Iterable[int]) -> Callable[[Sequence[int], bool], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        leading = self._joined.leading if self._joined else 0

        def advance(tokens: Iterable[int], final: bool) -> str:
            nonlocal leading
            data = self._bytes(tokens)
            spaces = _leading(data, leading)
            leading = leading - spaces if spaces == len(data) else 0
            return decoder.decode(data[spaces:], final)

        advance(prompt, False)
        # The text of the prompt ends in this, unless the next bytes complete a character.
        broken = decoder.getstate()[0].decode(errors="replace")

        def advance_after_prompt(tokens: Sequence[int], final: bool) -> str:
            nonlocal broken
            text = advance(tokens, final)
            if text:
                text, broken = text.removeprefix(broken), ""
            return text

        return advance_after_prompt

    def _stream_text(self, prompt: Iterable[int]) -> Callable[[Sequence[int], bool], str]:
        # A token's text may depend on the one before it: both are decoded, and what that one gives
        # alone is cut off. Bytes that a decoder joins only after other steps wait for each other.
        context = self._known(prompt)[-_MAX_PENDING:]
        pending: list[int] = []
        shown = self._decode(context)

        def new_text() -> str:
            text = self._decode(context + pending)
            before = shown if text.startswith(shown) else shown.rstrip(_BROKEN)
            return text[len(before) :]

        def advance(tokens: Sequence[int], final: bool) -> str:
            nonlocal context, pending, shown
            new = []
            for token in self._known(tokens):
                pending.append(token)
                text = new_text()
                if text.endswith(_BROKEN) and len(pending) < _MAX_PENDING:
                    continue
                new.append(text)
                context, shown, pending = pending, self._decode(pending), []
            if final and pending:
                new.append(new_text())
            return "".join(new)

        return advance

    def _decode(self, tokens: list[int]) -> str:
        with _library_errors(f"the tokenizer cannot decode the token ids {shown(tokens)}"):
            return self._library.decode(tokens, skip_special_tokens=True)

    def _known(self, tokens: Iterable[int]) -> list[int]:
        """``tokens`` without special tokens and unknown ids."""
        return [int(token) for token in tokens if self._piece(token) is not None]

    def _bytes(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self._piece(token) or b"" for token in tokens)

    def _piece(self, token: int) -> bytes | None:
        """The bytes of a token, empty where unknown; None for special tokens and unknown ids."""
        number = operator.index(token)
        if number not in self._pieces and 0 <= number < 2**32:
            spelling = self._library.id_to_token(number)
            if spelling is not None and number not in self.special_ids:
                self._pieces[number] = self._joined.of(spelling) if self._joined else b""
        return self._pieces.get(number)


def _leading(data: bytes, limit: int) -> int:
    return min(len(data) - len(data.lstrip(b" ")), limit)


@contextlib.contextmanager
def _library_errors(message: str) -> Iterator[None]:
    """Raise what the library raises as a `ValueError` that begins with ``message``."""
    try:
        yield
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"{message}: {on_one_line(error)}") from None
        raise


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model: that in a GGUF file, else the tokenizer.json of its directory.

    Tokens that tokenizer_config.json, special_tokens_map.json or added_tokens.json add or call
    special count as in transformers.

    A tokenizer is trusted as code is: with one that is made to do harm, the tokenizers library can
    run without end, fill the memory or abort the process (docs/checkpoints.md says what to do).

    Args:
        path: a model directory or a GGUF file. Where the file has no tokenizer, or one of a kind
            that jspec does not read, a tokenizer.json in its folder serves.

    Raises:
        CheckpointError: there is no tokenizer, or the tokenizers library cannot read it.
    """
    file = directory_of(path) / "tokenizer.json"
    if (stored := gguf_path(path)) is not None:
        metadata = GGUFFile(stored)
        try:
            values = tokenizer_fields(metadata)
        except UnreadTokenizerError:
            if not file.exists():
                raise
        else:
            return _gguf_tokenizer(metadata, values)
    if not file.exists():
        if stored is None:
            check_directory(Path(path))
        raise CheckpointError(f"{file} does not exist; a model directory holds a tokenizer.json")
    values, content = read_json(file, FILE_LIMIT), file.read_bytes()
    if not isinstance(values.get("model"), dict):
        raise CheckpointError(f"{file}: not a tokenizer (it has no model)")
    library = _library(content, file)
    special_tokens = read_special_tokens(file.parent)
    if special_tokens.add_to(library):
        content = library.to_str().encode()
    return _tokenizer(library, values, content, special_tokens.named, file)


def _gguf_tokenizer(file: GGUFFile, values: dict[str, Any]) -> Tokenizer:
    content = json.dumps(values, ensure_ascii=False).encode()
    if len(content) > FILE_LIMIT:
        raise CheckpointError(
            f"{file.path}: its tokenizer takes {len(content)} bytes as JSON, more than the "
            f"{FILE_LIMIT} that it may"
        )
    vocabulary = read_vocabulary(file)
    named = {} if vocabulary is None else vocabulary.special_tokens()
    return _tokenizer(_library(content, file.path), values, content, named, file.path)


def _library(content: bytes, source: Path) -> LibraryTokenizer:
    try:
        with _library_errors("not a tokenizer"):
            library = LibraryTokenizer.from_str(content.decode("utf-8-sig"))
            # Prompts are neither cut nor padded, whatever the file says.
            library.no_truncation()
            library.no_padding()
        return library
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _tokenizer(
    library: LibraryTokenizer,
    values: dict[str, Any],
    content: bytes,
    special_tokens: Mapping[str, str],
    source: Path,
) -> Tokenizer:
    try:
        return Tokenizer(library, values, content, special_tokens)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None


def _is_byte_level(values: dict[str, Any]) -> bool:
    """Whether id b is byte b, and nothing but a prefix or a template is added to a text."""
    model, splits, decoder = (values.get(key) for key in ("model", "pre_tokenizer", "decoder"))
    changes = ("merges", "dropout", "ignore_merges", "end_of_word_suffix")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return (
        isinstance(model, dict)
        and isinstance(splits, dict)
        and isinstance(decoder, dict)
        and isinstance(vocabulary, dict)
        and model.get("type") == "BPE"
        and not any(model.get(key) for key in (*changes, "continuing_subword_prefix"))
        and all(vocabulary.get(c) == byte for byte, c in enumerate(byte_alphabet()))
        and values.get("normalizer") is None
        and splits.get("type") == decoder.get("type") == "ByteLevel"
    )
