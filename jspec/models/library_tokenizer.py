"""A small interface to the tokenizers library: imported, or as a script in a separate process.

As a script it reads requests from stdin and answers on stdout, an object of JSON a line. It imports
nothing of jspec, so that it starts fast. `jspec.models.guarded` is the other side.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator

from tokenizers import Tokenizer

MEMORY = 4 << 30  # bytes of address space that the script may use


class LibraryTokenizer:
    """The tokenizer of a tokenizer.json's ``text``. Whatever the library raises is a `ValueError`.

    Texts are neither cut nor padded, whatever the file says: decoding needs all of the prompt and
    nothing else.
    """

    def __init__(self, text: str):
        with _as_value_error():
            self._backend = Tokenizer.from_str(text)
            self._backend.no_truncation()
            self._backend.no_padding()
            self.vocab_size = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of ``text``, with the template's tokens if ``special``."""
        with _as_value_error():
            return self._backend.encode(text, add_special_tokens=special).ids

    def decode(self, tokens: list[int]) -> str:
        """Text of ``tokens``, uint32 each, without special tokens."""
        with _as_value_error():
            return self._backend.decode(tokens, skip_special_tokens=True)

    def token(self, number: int) -> str | None:
        """The entry of the vocabulary with the id ``number``, a uint32, or None."""
        with _as_value_error():
            return self._backend.id_to_token(number)


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library has no one type for what it refuses
        raise ValueError(str(error)) from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Rust, and no Exception
            raise
        raise ValueError(f"it failed inside: {error}") from None


def _serve() -> None:
    import resource
    import signal

    with contextlib.suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    tokenizer = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # Unhandled, the alarm ends the process, whatever the library is doing.
        signal.alarm(request["seconds"])
        try:
            if request["call"] == "load":
                tokenizer = LibraryTokenizer(*request["arguments"])
                value = tokenizer.vocab_size
            else:
                value = getattr(tokenizer, request["call"])(*request["arguments"])
            reply = {"value": value}
        except ValueError as error:
            reply = {"error": str(error)[:1000]}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()
        signal.alarm(0)


if __name__ == "__main__":
    _serve()
