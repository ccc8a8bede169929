"""What to decode: prompts and conversations from the command line, a file, stdin or JSON lines."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

from jspec.checks import shown
from jspec.cli import demo
from jspec.cli.errors import one_line
from jspec.config import SamplingParams
from jspec.models.files import open_regular, parse_json

Message = dict[str, str]  # a role and a content

LINE_LIMIT = 2**24  # bytes of a request: four for each token of a context of four million
STOP_LIMIT, STOP_LENGTH = 64, 1024  # stop texts, and characters of each: all are looked for always
_FIELDS = {
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "repetition_penalty": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "min_new_tokens": int,
    "seed": int,
    "ignore_eos": bool,
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_MESSAGE = '{"role": "user", "content": "Hello"}'


@dataclasses.dataclass(frozen=True)
class CliRequest:
    """A prompt with its settings.

    The prompt is a text, or the messages of a conversation. ``line`` is its number among JSON
    lines, from 1, and ``id`` what the line calls it.
    """

    prompt: bytes | list[Message]
    params: SamplingParams
    stop: tuple[str, ...]
    line: int | None = None
    id: str | int | None = None


@dataclasses.dataclass(frozen=True)
class Chat:
    """Whether a prompt is a user's message, and the system message before a conversation."""

    asked: bool = False
    system: str | None = None

    def prompt(self, text: bytes) -> bytes | list[Message]:
        """``text``, as a conversation where that was asked for."""
        if not self.asked:
            return text
        try:
            return self.conversation([{"role": "user", "content": text.decode()}])
        except UnicodeDecodeError as error:
            raise ValueError(
                f"byte {error.start + 1} of the prompt is not UTF-8, which a message must be; "
                "convert it, or leave out --chat"
            ) from None

    def conversation(self, messages: list[Message]) -> list[Message]:
        """``messages`` after the system message, unless they start with one."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system}, *messages]


@dataclasses.dataclass(frozen=True)
class Refused:
    """A line that cannot be served, and why; its ``id`` where it could be read."""

    line: int
    error: str
    id: str | int | None = None


def read_requests(arguments: argparse.Namespace) -> tuple[list[CliRequest], list[Refused]]:
    """The requests that the arguments ask for, and the lines that could not be read.

    Raises `ValueError` or `OSError` where nothing can be served.
    """
    defaults = {name: getattr(arguments, name) for name in _FIELDS}
    stop = _stop(arguments.stop)
    checked = SamplingParams(**defaults)
    chat = _chat(arguments)
    if arguments.requests is not None:
        return _read_lines(arguments.requests, defaults, stop, chat)
    prompt = _prompt(arguments)
    if not prompt:
        raise ValueError("the prompt is empty; give it at least one character")
    if arguments.demo:
        stop += (demo.END,)
    return [CliRequest(chat.prompt(prompt), checked, stop)], []


def _chat(arguments: argparse.Namespace) -> Chat:
    system = arguments.system
    if system is not None:
        if not arguments.chat:
            raise ValueError("--system goes with --chat; pass both")
        _encoded("--system", system)
    return Chat(arguments.chat, system)


def _prompt(arguments: argparse.Namespace) -> bytes:
    if arguments.prompt is not None:
        # Arguments that are no UTF-8 reach Python as surrogates; this gives the bytes back.
        return arguments.prompt.encode(errors="surrogateescape")
    if arguments.prompt_file is not None:
        try:
            with open_regular(arguments.prompt_file) as file:
                return file.read()
        except OSError as error:
            raise _unreadable(arguments.prompt_file, error) from None
    if arguments.stdin is not None:
        return sys.stdin.buffer.read()
    if arguments.demo:
        return demo.prompt()
    raise ValueError(
        "no prompt; pass --prompt TEXT, --prompt-file F, --requests FILE.jsonl, --demo, or - for "
        "stdin"
    )


def _unreadable(path: str, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read: {error.strerror}")


def _read_lines(
    path: str, defaults: dict[str, Any], stop: tuple[str, ...], chat: Chat
) -> tuple[list[CliRequest], list[Refused]]:
    try:
        if path == "-":
            requests, refused = parse_lines(sys.stdin.buffer, defaults, stop, chat)
        else:
            with open_regular(path) as file:
                requests, refused = parse_lines(file, defaults, stop, chat)
    except OSError as error:
        raise _unreadable(path, error) from None
    if not requests and not refused:
        raise ValueError(f"{path}: holds no requests; write one JSON object a line")
    return requests, refused


def parse_lines(
    file: BinaryIO, defaults: dict[str, Any], stop: tuple[str, ...], chat: Chat = Chat()
) -> tuple[list[CliRequest], list[Refused]]:
    """The requests of JSON lines, and the lines that are none.

    ``defaults`` and ``stop`` serve where a line does not name its own. Blank lines are skipped, but
    counted.
    """
    requests: list[CliRequest] = []
    refused: list[Refused] = []
    for number, line in enumerate(_lines(file), start=1):
        if line is not None and not line.strip():
            continue
        name = None
        try:
            value = _parsed(line)
            name = _id(value)
            params, stop_texts = _settings(value, defaults, stop)
            requests.append(CliRequest(_asked(value, chat), params, stop_texts, number, name))
        except ValueError as error:
            refused.append(Refused(number, one_line(str(error)), name))
    return requests, refused


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of ``file``, None for one beyond the limit, which is never held whole."""
    while line := file.readline(LINE_LIMIT + 1):
        if len(line) <= LINE_LIMIT:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT)
        yield None


def _parsed(line: bytes | None) -> dict[str, Any]:
    """The JSON object of a line. Raises `ValueError` for anything else."""
    if line is None:
        raise ValueError(f"is longer than {LINE_LIMIT} bytes")
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {type(value).__name__}")
    return value


def _id(value: dict[str, Any]) -> str | int | None:
    name = value.get("id")
    if isinstance(name, bool) or not (name is None or isinstance(name, (str, int))):
        raise ValueError(f"'id' must be a string or a whole number, got {shown(name)}")
    return name


def _asked(value: dict[str, Any], chat: Chat) -> bytes | list[Message]:
    """The prompt or the conversation of a line."""
    if "messages" not in value:
        prompt = value.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f"'prompt' must be a string that is not empty, got {shown(prompt)}")
        return chat.prompt(_encoded("'prompt'", prompt))
    if "prompt" in value:
        raise ValueError("a request has 'prompt' or 'messages', not both; leave one out")
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"'messages' must be a list of messages such as {_MESSAGE}")
    for number, message in enumerate(messages, start=1):
        _check_message(number, message)
    return chat.conversation(messages)


def _check_message(number: int, message: Any) -> None:
    parts = ("role", "content")
    is_message = isinstance(message, dict) and set(message) == set(parts)
    if not is_message or not all(isinstance(message[part], str) for part in parts):
        raise ValueError(f"message {number} must have a role and a content alone, as {_MESSAGE}")
    for part in parts:
        _encoded(f"{part!r} of message {number}", message[part])


def _settings(
    value: dict[str, Any], defaults: dict[str, Any], stop: tuple[str, ...]
) -> tuple[SamplingParams, tuple[str, ...]]:
    """The settings of a line and its stop texts."""
    known = ["id", "prompt", "messages", "stop", *_FIELDS]
    unknown = sorted(set(value) - set(known))
    if unknown:
        raise ValueError(f"unknown field {shown(unknown[0])}; a request has {', '.join(known)}")
    settings = defaults | {k: _setting(k, value[k]) for k in _FIELDS if k in value}
    stop_texts = value.get("stop", list(stop))
    stop_texts = [stop_texts] if isinstance(stop_texts, str) else stop_texts
    if not isinstance(stop_texts, list) or not all(isinstance(s, str) for s in stop_texts):
        raise ValueError("'stop' must be a string or a list of strings")
    return SamplingParams(**settings), _stop(stop_texts)


def _setting(name: str, value: Any) -> Any:
    kind = _FIELDS[name]
    allowed = (int, float) if kind is float else kind
    is_flag = isinstance(value, bool)  # Python takes True for a number
    if is_flag != (kind is bool) or not isinstance(value, allowed):
        raise ValueError(f"{name!r} must be {_KINDS[kind]}, got {shown(value)}")
    return value


def _encoded(name: str, text: str) -> bytes:
    """``text`` as UTF-8. Raises `ValueError` for half of a character, which JSON can spell."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{name} holds {half!r} at character {error.start + 1}, which is half of a character"
        ) from None


def _stop(texts: list[str]) -> tuple[str, ...]:
    if len(texts) > STOP_LIMIT:
        raise ValueError(f"there are {len(texts)} stop texts; give at most {STOP_LIMIT}")
    for text in texts:
        if not text:
            raise ValueError("a stop text is empty; give it at least one character")
        if len(text) > STOP_LENGTH:
            raise ValueError(f"a stop text has {len(text)} characters; give at most {STOP_LENGTH}")
        _encoded("a stop text", text)
    return tuple(texts)
