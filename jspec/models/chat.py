"""A model's own chat template: messages to the text that the model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jspec.models.errors import CheckpointError
from jspec.models.files import Fields, directory_of, read_json
from jspec.models.gguf_file import GGUFFile, gguf_path
from jspec.models.gguf_vocabulary import read_vocabulary
from jspec.models.special_tokens import SETTINGS, read_special_tokens
from jspec.models.tokenizer import Tokenizer

FILE = "chat_template.jinja"
SIZE_LIMIT = 1 << 20

Message = Mapping[str, Any]  # a role, a content, and what else the template reads


class ChatTemplate:
    """A Jinja chat template of a Hugging Face tokenizer, run in a sandbox.

    The sandbox keeps a template from Python's internals; it does not limit its time.

    Args:
        source: the template.
        special: special tokens that it may name, by name (``bos_token``, ``eos_token``, ...).
        where: origin of the template, for error messages.

    Raises:
        CheckpointError: ``source`` is no valid template.
    """

    def __init__(self, source: str, special: Mapping[str, str], where: str):
        self._special = dict(special)
        self._where = where
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{where}: no chat template: {_line(error)}") from None

    def render(
        self, messages: Sequence[Message], *, generation_prompt: bool = True, **settings: Any
    ) -> str:
        """Render a conversation to text, special tokens included.

        Args:
            messages: mappings with a ``role`` and a ``content``.
            generation_prompt: whether to append the start of the model's answer.
            **settings: variables of the template, such as ``tools`` or ``enable_thinking``.

        Returns:
            The text.

        Raises:
            ValueError: the template refuses the messages.
        """
        _check(messages)
        variables = {"tools": None, "documents": None} | self._special | settings
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=generation_prompt, **variables
            )
        # A template calls methods of what it is given, which raise what they like.
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{self._where}: the chat template refuses the messages: {_line(error)}"
            ) from None

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Message], **settings: Any
    ) -> list[int]:
        """Render a conversation and convert it to token ids.

        Args:
            tokenizer: the model's tokenizer.
            messages: as in `render`.
            **settings: as in `render`.

        Returns:
            The token ids. Special tokens are those that the template writes.
        """
        return tokenizer.encode(self.render(messages, **settings), special=False)


def load_chat_template(path: str | Path) -> ChatTemplate | None:
    """Load the chat template of a model.

    A GGUF file may hold a template and the special tokens that it names. If it has none, and in a
    model directory, the template is chat_template.jinja or a field of tokenizer_config.json, which
    also names the special tokens.

    Args:
        path: a model directory or a GGUF file.

    Returns:
        The template, or None if the model has none.

    Raises:
        CheckpointError: a file is malformed.
    """
    if (stored := gguf_path(path)) is not None:
        template = _gguf_template(GGUFFile(stored))
        if template is not None:
            return template
    directory = directory_of(path)
    file, settings = (directory / name for name in (FILE, SETTINGS))
    fields = Fields(read_json(settings) if settings.is_file() else {}, str(settings))
    source, where = (
        (_read(file), str(file)) if file.is_file() else (_named_template(fields), fields.source)
    )
    if source is None:
        return None
    return ChatTemplate(source, read_special_tokens(directory).named, where)


def _gguf_template(file: GGUFFile) -> ChatTemplate | None:
    source = Fields(file.metadata, str(file.path)).text("tokenizer.chat_template", None)
    if source is None:
        return None
    if len(source) > SIZE_LIMIT:
        raise CheckpointError(f"{file.path}: tokenizer.chat_template has over {SIZE_LIMIT} bytes")
    vocabulary = read_vocabulary(file)
    special = {} if vocabulary is None else vocabulary.special_tokens()
    return ChatTemplate(source, special, str(file.path))


def _read(file: Path) -> str:
    if file.stat().st_size > SIZE_LIMIT:
        raise CheckpointError(f"{file} has over {SIZE_LIMIT} bytes, too many for a chat template")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: byte {error.start + 1} is not UTF-8") from None


def _named_template(fields: Fields) -> str | None:
    """A string, or a list of named ones of which the one named default counts."""
    value = fields.values.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    named = value if isinstance(value, list) else []
    for item in named:
        if isinstance(item, dict) and item.get("name") == "default":
            return Fields(item, f"{fields.source}: chat_template").text("template")
    raise fields.error("chat_template must be a string or a list with one named default")


def _check(messages: Sequence[Message]) -> None:
    way_out = 'pass messages such as [{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError(f"messages={messages!r:.80} are no conversation; {way_out}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role: {message!r:.80}; {way_out}")


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates are written for: blocks take their line, and a few names are at hand."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
    return environment


class _Generation(ext.Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: object) -> NoReturn:
    raise jinja2.TemplateRuntimeError(str(message))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
