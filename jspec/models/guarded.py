"""A tokenizer in a process of its own, with bounds on its time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from typing import Any

from jspec.models import library_tokenizer

LOAD_SECONDS = 30
CALL_SECONDS = 5  # and one more for each of
BYTES_A_SECOND = 100_000  # a tenth of what the library does on one slow core


class GuardedTokenizer:
    """`LibraryTokenizer` for a file that could make the library hang or fill the memory.

    A call that takes longer than it may, or ends the process, raises `ValueError`; the next call
    has a new process. Ctrl-C works at any time.
    """

    def __init__(self, text: str):
        self._text = text
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        with self._lock:
            self.vocab_size: int = self._start()

    def encode(self, text: str, special: bool) -> list[int]:
        return self._call("encode", text, special)

    def decode(self, tokens: list[int]) -> str:
        return self._call("decode", tokens)

    def token(self, number: int) -> str | None:
        return self._call("token", number)

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._process is None:
                self._start()
            return self._ask(name, arguments, CALL_SECONDS)

    def _start(self) -> int:
        # Wherever this process found the library, the other one finds it too.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", library_tokenizer.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a panic of Rust writes there
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process alone
            )
        except OSError as error:
            raise ValueError(f"its process cannot start: {error.strerror}") from None
        self._end = weakref.finalize(self, _end, process)
        return self._ask("load", (self._text,), LOAD_SECONDS)

    def _ask(self, name: str, arguments: tuple, seconds: int) -> Any:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        line = json.dumps(arguments).encode()
        seconds += len(line) // BYTES_A_SECOND
        reply, answered = b"", False
        try:
            request = b'{"call": "%b", "seconds": %d, "arguments": %b}\n'
            process.stdin.write(request % (name.encode(), seconds, line))
            process.stdin.flush()
            # What grows a text a hundredfold is not read.
            reply = process.stdout.readline(65536 + 100 * len(line))
            answered = reply.endswith(b"\n")
        except BrokenPipeError:
            pass
        finally:
            if not answered:  # Ctrl-C comes here too: the answer must not meet the next question
                self._process = None
                self._end()
        if not answered:
            raise ValueError(
                f"it needs more than {seconds} s or {library_tokenizer.MEMORY >> 30} GiB, and was "
                "stopped"
            )
        result = json.loads(reply)
        if "error" in result:
            raise ValueError(result["error"])
        return result["value"]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
