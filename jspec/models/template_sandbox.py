"""The Jinja environment of chat templates: what they may use, and how large what they make may be.

Each text, list and number that a template makes is bounded, all of them together are
(`jspec.models.template_memory`), and so is its output; its time is not.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jspec.models.template_memory import Buffer, made

SIZE_LIMIT = 1 << 23  # characters of a text, or items of a list
BITS_LIMIT = 1 << 14  # of a whole number
WIDTH_LIMIT = 10_000  # characters or items that a filter or a method pads to
_ITEM_SIZE = 8  # characters that count for an item of a list, a number or a key
_PADDING = frozenset(
    ("batch", "center", "expandtabs", "indent", "ljust", "rjust", "slice", "zfill")
)
# Filters that give what there is already.
_REFERENCES = frozenset(
    "attr count d default first float int last length max min random round".split()
)
_OF_TEXT = frozenset(("format", "replace", "urlize"))  # filters of a text, which others become
# Filters that make a list of a text's characters.
_OF_ITEMS = frozenset("batch groupby list slice sort unique".split())
# Filters that go through a text character by character, and how many of them they may: a second's.
_WALKS = frozenset(
    "batch groupby join list map max min reject rejectattr select selectattr slice sort sum "
    "unique".split()
)
WALK_LIMIT = 1 << 20
# Filters that write no text and make nothing longer: a list is not walked each time it is counted.
_WITHOUT_TEXT = frozenset(
    "attr count d default dictsort first float groupby int items last length list map max min "
    "random reject rejectattr reverse select selectattr sort sum unique".split()
)
_WIDE_FORMAT = re.compile(r"[0-9]{5}|\*")
_NESTED_FIELD = re.compile(r"\{[^{}]*:[^{}]*\{")
_DIGITS_LIMIT = 100  # of a rounded number
_TIME_FORMAT_LIMIT = 256  # characters


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """What templates are written for: blocks take their line, and a few names exist."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        extensions = [ext.loopcontrols, _Generation]
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=extensions,
            finalize=_bounded_text,
            optimized=False,  # lists that it made once would be made again without being counted
        )
        self.code_generator_class = _BoundedCode
        self.filters |= {"list": iter, "join": _join, "sum": _sum, "tojson": _to_json}
        self.filters |= {name: _bounded(name, used) for name, used in self.filters.items()}
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = _strftime_now

    def _compile(self, source: str, filename: str) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python, as for ``1[0]``
            return super()._compile(source, filename)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        size = 0
        if operator == "+":
            size = _length(left) + _length(right)
        elif operator == "*":
            for text, count in ((left, right), (right, left)):
                size = max(size, _length(text) * count if isinstance(count, int) else 0)
        elif operator == "%" and isinstance(left, str):
            size = _formatted_size("%", left, _size((left, right)))
        _check(size)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
            bits += right.bit_length() if operator == "*" else 0
            if bits > BITS_LIMIT:
                _raise(f"a number has over {BITS_LIMIT} bits")
        return made(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        of = getattr(method, "__self__", None)
        if isinstance(of, str | bytes | int):
            if method.__name__ == "join" and args:
                args = made(iter(args[0])), *args[1:]
            _check_call(method.__name__, (of, *args), kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return result if isinstance(of, Mapping) else made(result)

    def concatenated(self, values: Iterable[Any]) -> str:
        """``~``, the values as texts, one after the other."""
        texts = [str(_bounded_text(value)) for value in values]
        return self.concat(texts)

    def concat(self, texts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The text of a macro or a block."""
        texts = list(texts)
        _check(sum(map(len, texts)))
        return made("".join(texts))

    def made(self, value: Any) -> Any:
        """``value``, counted."""
        return made(value)

    def new_buffer(self) -> list[str]:
        """What a macro or a block of text writes to."""
        return Buffer(SIZE_LIMIT)


def _check_call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise where a filter or a method would make more than `SIZE_LIMIT` characters of ``args``.

    The first of ``args`` is what it is applied to.
    """
    values = (*args, *kwargs.values())
    text, *rest = values or (None,)
    if isinstance(text, bytes) and name != "decode":
        _raise(f"bytes are for decode(), and not for {name}()")
    sizes = [_size(value) for value in values if isinstance(value, str | list | tuple | Mapping)]
    size, texts = sum(sizes), [value for value in rest if isinstance(value, str)]
    longest = max(map(len, texts), default=0)
    if name == "round" and any(isinstance(v, int) and v > _DIGITS_LIMIT for v in rest):
        _raise(f"a number is rounded to over {_DIGITS_LIMIT} digits")
    if name in _PADDING and any(isinstance(v, int) and v > WIDTH_LIMIT for v in rest):
        _raise(f"{name} pads to over {WIDTH_LIMIT}")
    if name == "to_bytes":
        size += max((v for v in rest if isinstance(v, int)), default=0)
    elif not isinstance(text, str):
        pass
    elif name == "replace":
        old, new = (
            *args[1:3],
            *(kwargs[key] for key in ("old", "new") if key in kwargs),
        )[:2]
        size += text.count(str(old)) * len(str(new))
    elif name == "join":
        size += len(text) * sum(map(len, rest))
    elif name == "translate":
        tables = [value.values() for value in rest if isinstance(value, Mapping)]
        size += len(text) * max((_size(v) for values in tables for v in values), default=0)
    elif name in ("%", "format", "format_map"):
        size = _formatted_size("%" if name == "%" else "{", text, size)
    elif name in ("expandtabs", "indent"):
        widths = [v if isinstance(v, int) else len(v) for v in rest if isinstance(v, int | str)]
        size += text.count("\t" if name == "expandtabs" else "\n") * max(widths, default=8)
    elif name in ("urlize", "wordwrap"):
        size += len(text) * longest
    _check(size)


def _formatted_size(mark: str, text: str, size: int) -> int:
    """At most so many characters has the format ``text`` of values of ``size`` characters."""
    if _WIDE_FORMAT.search(text) or (mark == "{" and _NESTED_FIELD.search(text)):
        return SIZE_LIMIT + 1
    width = WIDTH_LIMIT if re.search("[0-9]{3}", text) else 0
    return size + text.count(mark) * (size - len(text) + width)


class _BoundedCode(CodeGenerator):
    """Generates code whose texts are bounded where the environment does not see them made."""

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.new_buffer()")

    def _counted(self, visit: Callable[..., None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._counted(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenated((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Generation(ext.Extension):
    """``{% generation %}`` marks what an assistant said, for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded(name: str, used: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``used``, whose arguments are checked before, and whose result is counted."""
    begin = int(hasattr(used, "jinja_pass_arg"))

    @functools.wraps(used)
    def checked(*args: Any, **kwargs: Any) -> Any:
        before, (value, *after) = args[:begin], args[begin:]
        if name in _WALKS and isinstance(value, str) and len(value) > WALK_LIMIT:
            _raise(f"{name} takes apart a text of over {WALK_LIMIT} characters")
        if name in _OF_TEXT:
            value = str(_bounded_text(value))
        elif name in _OF_ITEMS and isinstance(value, str):
            value = made(iter(value))
        args = (*before, value, *after)
        if name not in _WITHOUT_TEXT:
            _check_call("%" if name == "format" else name, args[begin:], kwargs)
        result = used(*args, **kwargs)
        return result if name in _REFERENCES else made(result)

    return checked


@jinja2.pass_environment
def _join(environment: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, which checks how long the text becomes."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    texts = [str(_bounded_text(item)) for item in made(iter(value))]
    _check(sum(map(len, texts)) + len(str(d)) * len(texts))
    return str(d).join(texts)


@jinja2.pass_environment
def _sum(environment: Any, value: Any, attribute: str | int | None = None, start: Any = 0) -> Any:
    """Jinja's filter, which checks each sum."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    add = functools.partial(environment.call_binop, None, "+")
    return functools.reduce(add, value, start)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter writes it for HTML."""
    _check_call("indent", ("", indent), {})
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    texts = Buffer(SIZE_LIMIT)
    for text in encoder.iterencode(value):
        texts.append(text)
    return "".join(texts)


def _strftime_now(format: str) -> str:
    if len(format) > _TIME_FORMAT_LIMIT:
        _raise(f"a format of times has over {_TIME_FORMAT_LIMIT} characters")
    return datetime.datetime.now().strftime(format)


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
