"""Random chat templates, most of which are refused: any filter of any value, and large values."""

from __future__ import annotations

from random import Random

from jspec.models.template_sandbox import TemplateSandbox

FILTERS = sorted(TemplateSandbox().filters)
METHODS = (
    "upper strip split splitlines join replace center zfill expandtabs encode format format_map "
    "translate title find count partition items keys get index to_bytes append pop"
).split()
SMALL = (
    "1 0 -1 7 'a' 'é€' '' none true messages messages[0] messages[-1].content ns.x x [] [1,2,3] "
    "{'a':1} (1,2) 1.5 '%s' '{}' '{:{}}' '%(a)s' namespace() loop self range(10) dict(a=1)"
).split()
LARGE = (
    "9999 10**9 -10**9 2**60 range(9999) 'a'*9999 '€'*9999 [0]*9999 [messages]*999 '%9999d' "
    "'{:9999}' '\\n'*9999"
).split()
OPERATORS = ("+", "*", "~", "%", "**", "-", "/", "//", "==", "in", "and", "or", "<")
NAMES = ("indent=", "width=", "d=", "attribute=", "start=", "old=", "new=", "separators=")
CALLS = ("strftime_now({})", "raise_exception({})", "m({})", "dict({})", "joiner({})()")


def template(rng: Random) -> str:
    """A template of a few statements."""
    body = "".join(_statement(rng, 3) for _ in range(rng.randint(1, 4)))
    return "{% set ns = namespace(x=" + _value(rng, 1) + ") %}" + body


def _value(rng: Random, depth: int) -> str:
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(LARGE if rng.random() < 0.12 else SMALL)
    x, y = _value(rng, depth - 1), _value(rng, depth - 1)
    argument = rng.choice(["", x, y, f"{x}, {y}", rng.choice(NAMES) + y])
    if rng.random() < 0.4:
        name = rng.choice(FILTERS)
        if name in ("map", "select", "reject"):
            argument = repr(rng.choice(FILTERS))
        return f"({x})|{name}({argument})"
    kinds = [
        *(f"({x}).{rng.choice(METHODS)}({argument})" for _ in range(3)),
        *(f"({x} {rng.choice(OPERATORS)} {y})" for _ in range(3)),
        f"[{x}, {y}]",
        f"({x})[{rng.choice([':', '1:', '::-1', '0', '-1'])}]",
        f"({x} if {y} else 1)",
        rng.choice(CALLS).format(x),
    ]
    return rng.choice(kinds)


def _statement(rng: Random, depth: int) -> str:
    value = _value(rng, rng.randint(0, 3))
    if depth == 0 or rng.random() < 0.4:
        return "{{ " + value + " }}"
    inner = _statement(rng, depth - 1)
    return rng.choice(
        [
            "{% set ns.x = " + value + " %}",
            "{% set x = " + value + " %}",
            "{% for x in range(3) %}" + inner + "{% endfor %}",
            "{% for x in " + value + " %}{{ loop.length }}{% break %}{% endfor %}",
            "{% if " + value + " %}" + inner + "{% endif %}",
            "{% macro m(x) %}" + inner + "{% endmacro %}{{ m(" + value + ") }}",
            "{% set y %}" + inner + "{% endset %}{{ y|length }}",
            "{% filter " + rng.choice(FILTERS) + " %}" + inner + "{% endfilter %}",
            "{% autoescape true %}" + inner + "{% endautoescape %}",
        ]
    )
