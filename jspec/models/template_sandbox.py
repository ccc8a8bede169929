"""The Jinja environment of chat templates: what they may use, and how large what they make may be.

Texts, lists and numbers that a template makes are bounded, and so is its output; its time is not.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SIZE_LIMIT = 1 << 23  # characters of a text, or items of a list
BITS_LIMIT = 1 << 14  # of a whole number
WIDTH_LIMIT = 10_000  # characters or items that a filter or a method pads to
_ITEM_SIZE = 8  # characters that count for an item of a list, a number or a key
_PADDING = frozenset(("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice"))
# Filters that write no text and make nothing longer: a list is not walked each time it is counted.
_WITHOUT_TEXT = frozenset(
    "attr count d default dictsort first float groupby int items last length list map max min "
    "random reject rejectattr reverse round select selectattr sort sum unique".split()
)
_WIDE_FORMAT = re.compile(r"[0-9]{5}|\*")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """What templates are written for: blocks take their line, and a few names exist."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions = [ext.loopcontrols, _Generation]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_bounded_text
        )
        self.code_generator_class = _BoundedCode
        self.filters = {
            name: used if name in _WITHOUT_TEXT else _bounded(name, used)
            for name, used in self.filters.items()
        }
        self.filters["tojson"] = _to_json
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "+":
            size = _length(left) + _length(right)
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                size = max(size, _length(text) * count if isinstance(count, int) else 0)
        elif operator == "%" and isinstance(left, str):
            size = SIZE_LIMIT + 1 if _WIDE_FORMAT.search(left) else _size((left, right))
        _check(size)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
            bits += right.bit_length() if operator == "*" else 0
            if bits > BITS_LIMIT:
                _raise(f"a number has over {BITS_LIMIT} bits")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        of = getattr(method, "__self__", None)
        if isinstance(of, str | bytes | int):
            _check_call(method.__name__, (of, *args), kwargs)
        return super().call(context, obj, *args, **kwargs)

    def concatenated(self, values: Iterable[Any]) -> str:
        """``~``, the values as texts, one after the other."""
        texts = [str(_bounded_text(value)) for value in values]
        _check(sum(map(len, texts)))
        return "".join(texts)

    def new_buffer(self) -> list[str]:
        """What a macro or a block of text writes to."""
        return _Buffer()


def _check_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise where a filter or a method would make more than `SIZE_LIMIT` characters of ``args``.

    The first of ``args`` is what it is applied to.
    """
    values = (*args, *kwargs.values())
    text, *rest = values
    sizes = [_size(value) for value in values if isinstance(value, str | list | tuple | Mapping)]
    size = sum(sizes)
    if name == "replace" and isinstance(text, str) and len(rest) > 1:
        size += text.count(str(rest[0])) * len(str(rest[1]))
    elif name == "join" and sizes:
        items = max(len(value) for value in values if isinstance(value, str | list | tuple))
        size += items * min(sizes)
    elif name in ("translate", "format") and isinstance(text, str):
        wide = name == "format" and _WIDE_FORMAT.search(text)
        size = SIZE_LIMIT + 1 if wide else size * max(1, text.count("{"))
    elif name in _PADDING and any(isinstance(v, int) and v > WIDTH_LIMIT for v in rest):
        _raise(f"{name} pads to over {WIDTH_LIMIT}")
    elif name in ("expandtabs", "indent") and isinstance(text, str):
        widths = [v if isinstance(v, int) else len(v) for v in rest if isinstance(v, int | str)]
        size += text.count("\t" if name == "expandtabs" else "\n") * max(widths, default=8)
    elif name == "to_bytes":
        size += max((v for v in rest if isinstance(v, int)), default=0)
    _check(size)


class _BoundedCode(CodeGenerator):
    """Generates code whose texts are bounded where the environment does not see them made."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.new_buffer()")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Buffer(list):
    size = 0

    def append(self, text: str) -> None:
        self.extend((text,))

    def extend(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        self.size += sum(map(len, texts))
        _check(self.size + len(self))
        super().extend(texts)


class _Generation(ext.Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded(name: str, used: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``used``, whose arguments are checked before it is called."""
    takes_context = hasattr(used, "jinja_pass_arg")

    @functools.wraps(used)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_call(name, args[1:] if takes_context else args, kwargs)
        return used(*args, **kwargs)

    return checked


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter writes it for HTML."""
    _check_call("indent", (value, indent), {})
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateRuntimeError(str(message))


def _bounded_text(value: Any) -> Any:
    """``value``, which is written as a text; raises where that is too long."""
    if not isinstance(value, str):
        _size(value)
    return value


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _size(value: Any) -> int:
    """Characters of ``value`` as a text, roughly; raises where they are over `SIZE_LIMIT`."""
    size, values = 0, [value]
    while values:
        item = values.pop()
        size += _ITEM_SIZE
        if isinstance(item, str | bytes):
            size += len(item)
        elif isinstance(item, Mapping):
            values += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            values += item
        elif isinstance(item, Namespace):
            _raise("a namespace has no text")
        _check(size + len(values))
    return size


def _check(size: int) -> None:
    if size > SIZE_LIMIT:
        _raise(f"a text or a list has over {SIZE_LIMIT} characters or items")
