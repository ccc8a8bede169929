"""The memory of what a chat template makes while it runs: texts and lists count until freed."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2

MEMORY_LIMIT = 1 << 28  # bytes of all texts and lists at a time
_REFERENCE = 8  # bytes of a list for each item
_PART = 1024  # items of an iterator that are made before they count


class _Account:
    """How many bytes a rendering has made and not freed."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0

    def add(self, size: int) -> None:
        if self.size + size > MEMORY_LIMIT:
            raise jinja2.TemplateRuntimeError(
                f"its texts and lists together have over {MEMORY_LIMIT} bytes"
            )
        self.size += size


_ACCOUNT: ContextVar[_Account | None] = ContextVar("template_memory", default=None)


@contextlib.contextmanager
def counted_memory() -> Iterator[None]:
    """A context in which `made` counts."""
    token = _ACCOUNT.set(_Account())
    try:
        yield
    finally:
        _ACCOUNT.reset(token)


class _Text(str):
    """A text that counts until it is freed."""

    __slots__ = ("_account", "_size")

    def __new__(cls, text: str, account: _Account) -> _Text:
        size = sys.getsizeof(text)
        account.add(size)
        counted = super().__new__(cls, text)
        counted._account, counted._size = account, size
        return counted

    def __del__(self) -> None:
        self._account.size -= self._size


class _List(list):
    """A list that counts until it is freed, with items that may be in no other place."""

    # Those of a list that ran into Python's recursion limit before it was initialised.
    _account, _size = _Account(), 0

    def __init__(self, items: Iterable[Any], account: _Account) -> None:
        super().__init__()
        self._account, items = account, iter(items)
        while part := tuple(itertools.islice(items, _PART)):
            size = sum(map(sys.getsizeof, part)) + _REFERENCE * len(part)
            account.add(size)
            self._size += size
            self.extend(part)

    def __del__(self) -> None:
        self._account.size -= self._size


def made(value: Any) -> Any:
    """``value``, which a template made, counted; an iterator becomes the list of its items."""
    account = _ACCOUNT.get() or _Account()
    if isinstance(value, _Text | _List):
        return value
    if type(value) is str:
        return _Text(value, account) if len(value) > 1 else value
    if type(value) is list or isinstance(value, Iterator):
        return _List(value, account)
    if isinstance(value, str | bytes | tuple | dict | set):
        account.add(sys.getsizeof(value))  # rare, so that they count for good
    return value


class Buffer(list):
    """The texts that a macro or a block writes, of at most ``limit`` characters."""

    _account = _Account()

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._account, self._limit, self._size = _ACCOUNT.get() or _Account(), limit, 0

    def append(self, text: str) -> None:
        self.extend((text,))

    def extend(self, texts: Iterable[str]) -> None:
        texts = tuple(texts)
        self._size += sum(map(len, texts))
        if self._size + len(self) > self._limit:
            raise jinja2.TemplateRuntimeError(f"a text has over {self._limit} characters")
        self._account.add(_REFERENCE * len(texts))
        super().extend(texts)

    def __del__(self) -> None:
        self._account.size -= _REFERENCE * len(self)
