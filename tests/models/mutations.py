"""Random damage to JSON and bytes, from a seed."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

# Placeholders for what json.dumps does not write.
_RAW = {
    "@digits": "9" * 5000,
    "@exponent": "1e999",
    "@deep": "[" * 3000 + "]" * 3000,
    "@objects": '{"a":' * 400 + "1" + "}" * 400,
    "@twice": '{"type": 1, "type": 2}',
}
NASTY: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 0.0, -0.5, 1.5, 9e299, 5e-324, float("inf"), float("nan")),
    *(2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**308),
    *(
        "",
        "x",
        "\x1b[31mred",
        "line\nbreak",
        "\u202e",
        "\ud800",
        "\0",
        "é日𝄞",
        "9" * 8192,
        "a/../b",
    ),
    *([], {}, [[]], [None], {"": None}, [0] * 9, ["x"] * 40, {"type": "Sequence"}, [2**62] * 300),
    *_RAW,
]
RARE: list[Any] = [[3] * 40_000, {str(n): n for n in range(5000)}, ["y" * 100] * 2000]


class Mutator:
    """Damages copies of ``trees``.

    ``words`` are keys and values that mean something in them, ``parts`` values that a key may have.
    """

    def __init__(self, seed: int, trees: list, words: list, parts: dict[str, list] | None = None):
        self._random = random.Random(seed)
        self._trees = trees
        self._parts = parts or {}
        self._words = words
        self._names = [v for v in words + NASTY if isinstance(v, str) and not v.startswith("@")]

    def case(self) -> bytes:
        """Damaged JSON: three in four still parse."""
        tree = copy.deepcopy(self._random.choice(self._trees))
        for _ in range(self._random.choice([1, 1, 2, 4])):
            tree = self._damage(tree)
        text = json.dumps(tree)
        if '"@' in text:
            for name, raw in _RAW.items():
                text = text.replace(json.dumps(name), raw)
        content = text.encode()
        return self.damaged(content) if self._random.random() < 0.25 else content

    def damaged(self, content: bytes) -> bytes:
        """Bits flipped, and slices dropped, doubled or moved."""
        data = bytearray(content)
        for _ in range(self._random.randint(1, 3)):
            at = self._random.randrange(len(data) + 1)
            end = min(len(data), at + self._random.choice([1, 2, 8, 100]))
            kind = self._random.randrange(4)
            if kind == 0 and at < len(data):
                data[at] ^= 1 << self._random.randrange(8)
            elif kind == 1:
                del data[at:end]
            elif kind == 2:
                data[at:at] = data[at:end]
            else:
                data[at:end] = self._random.randbytes(end - at)
        return bytes(data)

    def _value(self) -> Any:
        kind = self._random.random()
        if kind < 0.005:
            return self._random.choice(RARE)
        return copy.deepcopy(self._random.choice(NASTY if kind < 0.6 else self._words))

    def _damage(self, tree: Any) -> Any:
        """One change, at a random place of the tree: each level is as likely as the next."""
        inner = isinstance(tree, (dict, list)) and len(tree) > 0
        is_number = isinstance(tree, (int, float)) and abs(tree) < 1e9
        if is_number and self._random.random() < 0.5:
            return self._random.choice([tree + 1, tree * 2, -tree, float(tree), tree / 2, tree**3])
        if not inner or self._random.random() < 0.03:
            return self._value()
        keys = list(tree) if isinstance(tree, dict) else range(len(tree))
        key = self._random.choice(keys)
        kind = self._random.random()
        if kind < 0.25 and isinstance(tree, dict) and tree.keys() & self._parts.keys():
            key = self._random.choice(sorted(tree.keys() & self._parts.keys()))
            tree[key] = copy.deepcopy(self._random.choice(self._parts[key]))
        elif kind < 0.65:
            tree[key] = self._damage(tree[key])
        elif kind < 0.7:
            tree[key] = self._value()
        elif kind < 0.8:
            del tree[key]
        elif isinstance(tree, dict):
            name = self._random.choice([*keys, *self._names])
            tree[name] = self._value()
        else:
            tree.insert(key, copy.deepcopy(tree[key]) if kind < 0.9 else self._value())
        return tree
