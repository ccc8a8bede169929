"""What to decode: prompts from the command line, a file, stdin or a JSONL file of requests."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from jspec.config import SamplingParams

_FIELDS = {
    "max_new_tokens": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "seed": int,
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt with its settings; ``line`` is its number in a JSONL file, from 1."""

    prompt: bytes
    params: SamplingParams
    stop: tuple[str, ...]
    line: int | None = None


@dataclasses.dataclass(frozen=True)
class Refused:
    """A line of a JSONL file that cannot be served, and why."""

    line: int
    error: str


def read_requests(arguments: argparse.Namespace) -> tuple[list[Request], list[Refused]]:
    """The requests that the arguments ask for, and the lines that could not be read.

    Raises `ValueError` or `OSError` where nothing can be served.
    """
    defaults = {name: getattr(arguments, name) for name in _FIELDS}
    stop = _stop(arguments.stop)
    if arguments.requests is not None:
        return _read_lines(Path(arguments.requests), defaults, stop)
    prompt = _prompt(arguments)
    if not prompt:
        raise ValueError("the prompt is empty; give it at least one character")
    return [Request(prompt, SamplingParams(**defaults), stop)], []


def _prompt(arguments: argparse.Namespace) -> bytes:
    if arguments.prompt is not None:
        # Arguments that are no UTF-8 reach Python as surrogates; this gives the bytes back.
        return arguments.prompt.encode(errors="surrogateescape")
    if arguments.prompt_file is not None:
        return _read(Path(arguments.prompt_file))
    if arguments.stdin is not None:
        return sys.stdin.buffer.read()
    raise ValueError("no prompt; pass --prompt TEXT, --prompt-file F, --requests FILE.jsonl or -")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None


def _read_lines(path: Path, defaults: dict[str, Any], stop: tuple[str, ...]):
    requests: list[Request] = []
    refused: list[Refused] = []
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            requests.append(_request(json.loads(line), defaults, stop, number))
        except (ValueError, RecursionError) as error:
            refused.append(Refused(number, str(error)))
    if not requests and not refused:
        raise ValueError(f"{path}: holds no requests; write one JSON object a line")
    return requests, refused


def _request(value: Any, defaults: dict[str, Any], stop: tuple[str, ...], number: int) -> Request:
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got {type(value).__name__}")
    unknown = sorted(set(value) - set(_FIELDS) - {"prompt", "stop"})
    if unknown:
        known = ", ".join(["prompt", "stop", *_FIELDS])
        raise ValueError(f"unknown field {unknown[0]!r}; a request has {known}")
    prompt = value.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("'prompt' must be a string that is not empty")
    settings = defaults | {k: _number(k, value[k]) for k in _FIELDS if k in value}
    own = value.get("stop", list(stop))
    own = [own] if isinstance(own, str) else own
    if not isinstance(own, list) or not all(isinstance(s, str) for s in own):
        raise ValueError("'stop' must be a string or a list of strings")
    text = prompt.encode(errors="surrogatepass")
    return Request(text, SamplingParams(**settings), _stop(own), number)


def _number(name: str, value: Any) -> Any:
    wanted = _FIELDS[name]
    allowed = (int, float) if wanted is float else int
    if isinstance(value, bool) or not isinstance(value, allowed):
        kind = "a number" if wanted is float else "a whole number"
        raise ValueError(f"{name!r} must be {kind}, got {value!r}")
    return wanted(value)


def _stop(texts: list[str]) -> tuple[str, ...]:
    if any(not text for text in texts):
        raise ValueError("a stop text is empty; give it at least one character")
    return tuple(texts)
