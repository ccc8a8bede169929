"""What bounds chat templates, whose sizes are limited and whose time is not."""

import itertools
import json
import random
import time
import tracemalloc

import jinja2
import pytest

from jspec.models import template_memory
from jspec.models.chat import ChatTemplate
from jspec.models.errors import ChatTemplateError
from tests.models import random_templates

TALK = [{"role": "user", "content": "Hi"}]

# Loops of 30 double what they begin with a thousand million times.
DOUBLED = (
    "{%% set ns = namespace(x=%s) %%}{%% for i in range(30) %%}{%% set ns.x = %s %%}{%% endfor %%}"
)


LONG = "{% for i in range(99999) %}" + "a" * 1000 + "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{% macro r(n) %}{{ r(n) }}{% endmacro %}{{ r(1) }}",
        "{{ 9**(9**9) }}",
        "{{ 'a' * 10**15 }}",
        "{{ [1] * 10**9 }}",
        "{{ 10**5000 * 10**5000 }}",
        DOUBLED % ("'a'", "ns.x + ns.x"),
        DOUBLED % ("'a'", "ns.x ~ ns.x"),
        pytest.param(DOUBLED % ("[1]", "ns.x + ns.x"), marks=pytest.mark.exhaustive),
        pytest.param(
            DOUBLED % ("'a'", "[ns.x, ns.x]") + "{{ ns.x }}", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            DOUBLED % ("'a'", "[ns.x, ns.x]") + "{{ ns.x|tojson }}", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            DOUBLED % ("'a'", "[ns.x, ns.x]") + "{{ ns.x|string }}", marks=pytest.mark.exhaustive
        ),
        DOUBLED % ("'a'", "{1: ns.x, 2: ns.x}") + "{{ ns.x ~ 1 }}",
        DOUBLED % ("'a'", "namespace(a=ns.x, b=ns.x)") + "{{ ns.x }}",
        DOUBLED % ("'aa'", "ns.x.replace('a', 'aa')"),
        DOUBLED % ("'aa'", "ns.x|replace('a', 'aa')"),
        DOUBLED % ("'aa'", "ns.x.join([ns.x, ns.x])"),
        DOUBLED % ("'aa'", "[ns.x, ns.x]|join(ns.x)"),
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ '\\n'|indent(10**9) }}",
        "{{ '\t'.expandtabs(10**9) }}",
        "{{ [1]|batch(10**9, 0)|list }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ [1]|tojson(indent=10**9) }}",
        "{{ (1).to_bytes(10**9, 'big') }}",
        LONG,
        "{% macro m() %}" + LONG + "{% endmacro %}{{ m() }}",
        "{% set x %}" + LONG + "{% endset %}",
        "{{ ('x' * 8000000)|rejectattr('a')|list|length }}",
        "{{ cycler() }}",
        "{{ lipsum(10**6) }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns|tojson }}",
        "{{ ('y' * 2000).join(('x' * 99999)|list) }}",
        "{{ '{:{w}}'.format('x', w=10**9) }}",
        "{{ '{:{w}}'.format_map({'w': 10**9}) }}",
        "{{ ('%(a)s' * 9999) % {'a': 'y' * 9999} }}",
        "{{ '%9999d' * 9999 % (range(9999)|list) }}",
        "{{ ('x' * 40000)|wordwrap(1, wrapstring='y' * 4000) }}",
        "{{ 'a.com ' * 9999|urlize(target='x' * 9999) }}",
        "{{ ('x' * 9999)|replace(new='y' * 9999, old='x') }}",
        "{{ ('x' * 9999).translate({120: 'y' * 9999}) }}",
        "{{ [1]|replace('1', 'y' * 10**7) }}",
        "{{ '1'.zfill(10**9) }}",
        "{{ 'x'.encode().ljust(10**4) }}",
        "{% filter list %}a{% endfilter %}",
        "{{ 1.5|round(10**9, 'ceil') }}",
        "{{ strftime_now('%999d' * 9999) }}",
        "{{ ([1] * 9999)|tojson(separators=('x' * 9999, ':')) }}",
        "{% set ns = namespace(x=[1] * 99) %}{% for i in range(99) %}{% set ns.x = [ns.x] %}"
        "{% endfor %}{{ ns.x|tojson(indent=9999) }}",
    ],
)
def test_a_template_that_grows_without_bound_is_refused(source):
    begin = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"^where: the chat template refuses") as refusal:
        ChatTemplate(source, {}, "where").render(TALK)
    assert str(refusal.value).isprintable()
    assert time.process_time() - begin < 8


@pytest.mark.parametrize(
    "source",
    [
        "{{ range(999)|map('center', 9999)|list|length }}",
        "{{ (['x' * 30000] * 99)|map('upper')|first }}",
        "{{ ('€' * 30000)|list|length }}",
        "{{ ('€' * 30000)|sort|length }}",
        "{{ ('€' * 30000)|select|join('y')|length }}",
        "{% for x in ('€' * 30000)|select %}{{ loop.length }}{% endfor %}",
        "{{ ([[0] * 9999] * 50)|sum(start=[])|length }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = ns.x + [('x' * 30000)"
        "[i:]] %}{% endfor %}",
        "{% macro f(n) %}{% set x %}{{ 'x' * 30000 }}{% endset %}{{ f(n) ~ x }}{% endmacro %}"
        "{{ f(1) }}",
        "{% macro f(n) %}{% set x = [" + "0," * 9999 + "] %}{{ f(n) ~ x }}{% endmacro %}{{ f(1) }}",
        "".join(f"{{% set x{i} = 'x' * 30000 ~ 'y' %}}" for i in range(40)),
    ],
    ids=map(str, itertools.count()),
)
def test_all_that_a_template_makes_is_bounded(source, monkeypatch):
    """Each part is small enough; together they have over 2**20 bytes."""
    monkeypatch.setattr(template_memory, "MEMORY_LIMIT", 1 << 20)
    with pytest.raises(ChatTemplateError, match="texts and lists together have over 1048576 bytes"):
        ChatTemplate(source, {}, "where").render(TALK)


def test_the_bound_is_that_of_the_memory(monkeypatch):
    monkeypatch.setattr(template_memory, "MEMORY_LIMIT", 1 << 24)
    source = "{{ range(99999)|map('center', 9999)|list|length }}"
    tracemalloc.start()
    try:
        with pytest.raises(ChatTemplateError, match="texts and lists together"):
            ChatTemplate(source, {}, "where").render(TALK)
        assert tracemalloc.get_traced_memory()[1] < 1.2 * template_memory.MEMORY_LIMIT
    finally:
        tracemalloc.stop()


def test_what_is_freed_counts_no_more():
    """A thousand texts of 8 MB, one after the other."""
    source = (
        "{% set ns = namespace(x='') %}{% for i in range(1000) %}{% set ns.x = 'x' * 8000000 %}"
    )
    assert ChatTemplate(source + "{% endfor %}{{ ns.x|length }}", {}, "").render(TALK) == "8000000"


@pytest.mark.parametrize("seed", range(4))
def test_a_random_template_renders_or_is_refused_in_one_line(seed, monkeypatch):
    monkeypatch.setattr(template_memory, "MEMORY_LIMIT", 1 << 22)
    rng = random.Random(seed)
    texts = []
    for _ in range(100):
        try:
            texts.append(ChatTemplate(random_templates.template(rng), {}, "where").render(TALK))
        except ChatTemplateError as error:
            texts.append(str(error) if str(error).isprintable() else None)
    assert all(isinstance(text, str) for text in texts)


def test_python_warns_of_nothing_in_a_template():
    with pytest.raises(ChatTemplateError, match="refuses the messages: 'int' object is not subsc"):
        ChatTemplate("{% set x = 1[1:] %}", {}, "where").render(TALK)


def test_long_conversations_are_rendered():
    source = (
        "{% set ns = namespace(x='') %}{% for m in messages %}"
        "{% set ns.x = ns.x + m.content.replace('a', 'b') ~ '\n' %}{% endfor %}{{ ns.x|indent }}"
    )
    talk = [{"role": "user", "content": "a" * 500}] * 4000
    text = ChatTemplate(source, {}, "where").render(talk)
    assert text == "\n    ".join(["b" * 500] * 4000) + "\n"


def test_the_time_of_counting_messages_is_linear():
    """Qwen3's template counts them for each one; walking them each time takes seconds."""
    source = "{% for m in messages %}{{ messages|length }}{{ (messages|last).role }}{% endfor %}"
    talk = [{"role": "user", "content": "a", "parts": [1] * 20}] * 3000
    begin = time.process_time()
    assert len(ChatTemplate(source, {}, "where").render(talk)) == 3000 * 8
    assert time.process_time() - begin < 2


def test_numbers_and_widths_of_real_templates_are_allowed():
    source = (
        "{{ 'x' * 3 }}{{ '%03d' % 7 }}{{ '{:>4}'.format('a') }}{{ [1, 2] + [3] }}{{ 2 ** 10 }}"
        "{{ [1, 2, 3]|batch(2)|list }}{{ 'a,b'.split(',')|join(' ') }}{{ 'a\tb'.expandtabs(4) }}"
        "{{ [{'a': 1}]|tojson(indent=4) }}{{ messages|map(attribute='role')|list }}{{ 1 ~ 'b' }}"
    )
    plain = jinja2.Environment()
    plain.filters["tojson"] = json.dumps
    expected = plain.from_string(source).render(messages=TALK)
    assert ChatTemplate(source, {}, "where").render(TALK) == expected
