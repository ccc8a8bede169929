"""What bounds chat templates, whose sizes are limited and whose time is not."""

import json
import time

import jinja2
import pytest

from jspec.models.chat import ChatTemplate
from jspec.models.errors import ChatTemplateError

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
        DOUBLED % ("[1]", "ns.x + ns.x"),
        DOUBLED % ("'a'", "[ns.x, ns.x]") + "{{ ns.x }}",
        DOUBLED % ("'a'", "[ns.x, ns.x]") + "{{ ns.x|tojson }}",
        DOUBLED % ("'a'", "[ns.x, ns.x]") + "{{ ns.x|string }}",
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
        "{{ cycler() }}",
        "{{ lipsum(10**6) }}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns|tojson }}",
    ],
)
def test_a_template_that_grows_without_bound_is_refused(source):
    begin = time.process_time()
    with pytest.raises(ChatTemplateError, match=r"^where: the chat template refuses") as refusal:
        ChatTemplate(source, {}, "where").render(TALK)
    assert str(refusal.value).isprintable()
    assert time.process_time() - begin < 8


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
