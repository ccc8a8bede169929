"""A model's own chat template: messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from jspec.checks import shown
from jspec.models.errors import ChatTemplateError, CheckpointError, on_one_line
from jspec.models.files import Fields, directory_of, read_json
from jspec.models.gguf_file import GGUFFile, gguf_path
from jspec.models.gguf_vocabulary import read_vocabulary
from jspec.models.special_tokens import SETTINGS, read_special_tokens
from jspec.models.template_memory import counted_memory
from jspec.models.template_sandbox import SIZE_LIMIT as TEXT_LIMIT
from jspec.models.template_sandbox import TemplateSandbox
from jspec.models.tokenizer import Tokenizer

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"
GGUF_KEY = "tokenizer.chat_template"
SIZE_LIMIT = 1 << 20
_CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends, as in transformers
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Arguments of transformers and vLLM that are no variables of a template.
_NOT_VARIABLES = frozenset(
    "messages tokenize padding truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask sanitize_control_tokens sampling_params use_tqdm lora_request "
    "chat_template_kwargs chat_template_content_format mm_processor_kwargs "
    "tokenization_kwargs".split()
)

Message = Mapping[str, Any]  # a role, a content, and what else the template reads


class ChatTemplate:
    """The Jinja chat template of a Hugging Face tokenizer, run in a sandbox.

    It is compiled when it is first rendered. The sandbox keeps a template from Python's internals
    and bounds the sizes of what it makes, each and together; it does not limit its time.

    Args:
        source: the template, or templates by name, of which ``default`` is usual and ``tool_use``
            serves conversations with tools.
        special: special tokens that it may name, by name (``bos_token``, ``eos_token``, ...).
        where: origin of the template, for error messages.

    Raises:
        CheckpointError: ``source`` is no text, or has over 2**20 characters.
    """

    def __init__(self, source: str | Mapping[str, str], special: Mapping[str, str], where: str):
        self._sources = dict(source) if isinstance(source, Mapping) else {"default": source}
        self._special = dict(special)
        self._where = where
        self._compiled: dict[str, jinja2.Template] = {}
        for text in self._sources.values():
            if not isinstance(text, str) or len(text) > SIZE_LIMIT:
                raise CheckpointError(
                    f"{where}: chat_template must be a string of at most {SIZE_LIMIT} characters"
                )

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **settings: Any,
    ) -> str:
        """Render a conversation to text, special tokens included.

        Args:
            messages: mappings with a ``role`` and a ``content``; None counts as missing.
            add_generation_prompt: whether to append the start of the model's answer; None does
                unless the last message is continued.
            continue_final_message: whether the text ends where the last message does, so that the
                model goes on with it.
            chat_template: the name of one of the model's templates, or another template; None takes
                ``tool_use`` for a conversation with tools if there is one, else ``default``.
            **settings: variables of the template, such as ``tools`` or ``enable_thinking``.

        Returns:
            The text.

        Raises:
            ChatTemplateError: the template is malformed, refuses the messages, or makes too long a
                text of them.
            ValueError: an argument is invalid.
        """
        _check_settings(settings)
        messages = _normalized(messages)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "continue_final_message=True goes on with the last message, and "
                "add_generation_prompt=True begins another; pass one of them"
            )
        last = _mark_end(messages) if continue_final_message else ""
        variables = {"tools": None, "documents": None, **self._special, **settings}
        variables |= {"messages": messages, "add_generation_prompt": bool(add_generation_prompt)}
        text = self._run(self._source(chat_template, settings.get("tools")), variables)
        return self._cut_at_mark(text, last) if continue_final_message else text

    def encode(
        self, tokenizer: Tokenizer, messages: Sequence[Message], /, **settings: Any
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

    def _source(self, chosen: Any, tools: Any) -> str:
        """The template for these arguments."""
        names = ", ".join(map(shown, self._sources))
        if chosen is None:
            usual = ["tool_use", "default"] if tools is not None else ["default"]
            chosen = next((name for name in usual if name in self._sources), None)
            if chosen is None:
                raise ChatTemplateError(
                    f"{self._where}: no chat template is named default; pass chat_template= with "
                    f"one of {names}"
                )
        if not isinstance(chosen, str) or (chosen not in self._sources and "{" not in chosen):
            raise ValueError(
                f"chat_template={shown(chosen)} is no template, nor the name of one of the model's"
                + (f"; it has {names}" if names else "")
            )
        return self._sources.get(chosen, chosen)

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        with counted_memory():
            try:
                if source not in self._compiled:
                    self._compiled[source] = TemplateSandbox().from_string(source)
            # What Jinja lets through, Python's compiler may refuse, as a break outside a loop.
            except Exception as error:
                raise self._error("no chat template", error) from None
            return self._text(self._compiled[source], variables)

    def _text(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in template.generate(variables):
                pieces.append(piece)
                size += max(len(piece), 1)
                if size > TEXT_LIMIT:
                    raise jinja2.TemplateRuntimeError(f"it writes over {TEXT_LIMIT} characters")
            return "".join(pieces)  # pieces of ``{% filter first %}`` may be no texts
        # A template calls methods of what it is given, which raise what they like.
        except Exception as error:
            raise self._error("the chat template refuses the messages", error) from None

    def _error(self, what: str, error: Exception) -> ChatTemplateError:
        reason = on_one_line(error) or type(error).__name__
        return ChatTemplateError(f"{self._where}: {what}: {reason}")

    def _cut_at_mark(self, text: str, last: str) -> str:
        mark = _CONTINUED.strip()
        if mark not in text or last.strip() not in text:
            raise ChatTemplateError(
                f"{self._where}: the chat template does not write the last message as it is, which "
                "continue_final_message=True needs"
            )
        end = text.rindex(mark)
        # Where the space after the mark is gone, the template strips messages.
        return text[:end] if text.startswith(_CONTINUED, end) else text[:end].rstrip()


def load_chat_template(path: str | Path) -> ChatTemplate | None:
    """Load the chat template of a model, or its templates by name.

    A GGUF file may hold templates and the special tokens that they name. If it has none, and in a
    model directory, a template is chat_template.jinja, or a file in additional_chat_templates, or a
    field of tokenizer_config.json; files come before the field.

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
    settings = directory / SETTINGS
    fields = Fields(read_json(settings) if settings.is_file() else {}, str(settings))
    sources, where = _named_templates(fields), str(settings)
    files = {path.stem: path for path in sorted((directory / FOLDER).glob("*.jinja"))}
    files |= {"default": directory / FILE} if (directory / FILE).is_file() else {}
    for name, file in files.items():
        sources[name], where = _read(file), str(file)
    if not sources:
        return None
    return ChatTemplate(sources, read_special_tokens(directory).named, where)


def _gguf_template(file: GGUFFile) -> ChatTemplate | None:
    fields = Fields(file.metadata, str(file.path))
    sources = {
        key.removeprefix(GGUF_KEY).removeprefix(".") or "default": fields.text(key)
        for key in file.metadata
        if key == GGUF_KEY or key.startswith(f"{GGUF_KEY}.")
    }
    if not sources:
        return None
    vocabulary = read_vocabulary(file)
    special = {} if vocabulary is None else vocabulary.special_tokens()
    return ChatTemplate(sources, special, str(file.path))


def _read(file: Path) -> str:
    if file.stat().st_size > SIZE_LIMIT:
        raise CheckpointError(f"{file} has over {SIZE_LIMIT} bytes, too many for a chat template")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file}: byte {error.start + 1} is not UTF-8") from None


def _named_templates(fields: Fields) -> dict[str, str]:
    """The field of tokenizer_config.json: a string, or a list of templates with names."""
    value = fields.values.get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise fields.error("chat_template must be a string or a list of templates with names")
    items = [Fields(item, f"{fields.source}: chat_template") for item in value]
    return {item.text("name"): item.text("template") for item in items}


def _normalized(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages without fields that are None, which templates would write as a word."""
    way_out = 'pass messages such as [{"role": "user", "content": "Hello"}]'
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(f"messages={shown(messages)} are no conversation; {way_out}")
    if not messages:
        raise ValueError(f"messages=[] are no conversation; {way_out}")
    normalized = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} has no role: {shown(message)}; {way_out}")
        fields = {key: value for key, value in message.items() if value is not None}
        # The name of it differs between models; templates read the first or the second.
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        normalized.append(fields)
    return normalized


def _check_settings(settings: Mapping[str, Any]) -> None:
    if refused := sorted(_NOT_VARIABLES & settings.keys()):
        raise ValueError(
            f"{refused[0]}= is no variable of a chat template; pass variables by their names, as "
            "enable_thinking=False, and sampling parameters as params"
        )
    tools = settings.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(f"tools={shown(tools)} must be a list of JSON schemas, which are mappings")


def _mark_end(messages: list[dict[str, Any]]) -> str:
    """Append the mark to the last text of the last message; returns that text."""
    content = messages[-1].get("content")
    if isinstance(content, str):
        messages[-1]["content"] = content + _CONTINUED
        return content
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part.get("text"), str)]
    if not texts:
        raise ValueError("continue_final_message=True, but the last message has no text")
    text = texts[-1]["text"]
    texts[-1]["text"] += _CONTINUED
    messages[-1]["content"] = parts
    return text
