"""Chat templates: what they give, what they may not do, and where they are found."""

import json

import pytest

from jspec.models.chat import ChatTemplate, load_chat_template
from jspec.models.errors import CheckpointError

TALK = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": "Is 1 < 2?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Ünd 'so'?"},
]
PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "model/config")


def test_a_conversation_is_one_text():
    text = "<s><|system|>Be brief.<|user|>Is 1 < 2?<|assistant|>Yes.<|user|>Ünd 'so'?"
    assert template(PLAIN).render(TALK) == text + "<|assistant|>"
    assert template(PLAIN).render(TALK, generation_prompt=False) == text


def test_what_templates_use_is_at_hand():
    source = (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.role }};{% endgeneration %}{% endfor %}"
        "{{ tools | tojson }}|{{ tools | tojson(indent=1) | length }}|{{ eos_token }}|"
        "{{ thinking | default('off') }}|{{ strftime_now('%Y') | length }}|"
        "{% if documents is none %}none{% endif %}"
    )
    tools = [{"name": "<ü>"}]
    long = len(json.dumps(tools, indent=1, ensure_ascii=False))
    expected = f'system;user;[{{"name": "<ü>"}}]|{long}|</s>|on|4|none'
    assert template(source).render(TALK, tools=tools, thinking="on") == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[9].content + 1 }}", "refuses the messages"),
        ("{{ 1 // 0 }}", "refuses the messages: integer division"),
        ("{{ messages.__class__.__mro__ }}", "unsafe|refuses"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{% for i in range(10000000) %}.{% endfor %}", "too big|Range"),
    ],
    ids=["raise", "missing", "arithmetic", "internals", "mutation", "range"],
)
def test_a_refusal_is_one_line_that_names_the_file(source, message):
    with pytest.raises(ValueError, match=message) as refusal:
        template(source).render(TALK)
    assert str(refusal.value).startswith("model/config: the chat template refuses")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "messages", ["hello", [], {"role": "user"}, ["hello"], [{"content": "no role"}], [{"role": 3}]]
)
def test_messages_without_a_role_are_refused(messages):
    with pytest.raises(ValueError, match=r'pass messages such as \[\{"role": "user"'):
        template(PLAIN).render(messages)


def test_what_is_no_template_is_refused():
    with pytest.raises(CheckpointError, match=r"model/config: no chat template: .*endfor"):
        template("{% for m in messages %}")


def test_a_template_is_read_where_tokenizers_keep_it(tmp_path):
    settings, file = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    assert load_chat_template(tmp_path) is None

    settings.write_text(json.dumps({"bos_token": {"content": "<s>"}, "chat_template": PLAIN}))
    result = load_chat_template(tmp_path)
    assert result is not None
    assert result.render(TALK[1:2]) == "<s><|user|>Is 1 < 2?<|assistant|>"

    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    settings.write_text(json.dumps({"chat_template": named, "bos_token": "<b>"}))
    result = load_chat_template(tmp_path)
    assert result is not None
    assert result.render(TALK) == "yes"

    file.write_text("{{ bos_token }}ü", encoding="utf-8")  # the file comes before the field
    result = load_chat_template(tmp_path)
    assert result is not None
    assert result.render(TALK) == "<b>ü"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"chat_template": 3}', "must be a string or a list with one named default"),
        ('{"chat_template": [{"name": "rag", "template": ""}]}', "one named default"),
        ('{"chat_template": [{"name": "default"}]}', "template is missing; it must be a string"),
        ("[", "is not valid JSON"),
    ],
    ids=["number", "unnamed", "without", "malformed"],
)
def test_malformed_settings_are_refused(content, message, tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=message) as refusal:
        load_chat_template(tmp_path)
    assert "tokenizer_config.json" in str(refusal.value)


@pytest.mark.parametrize("content", [b"\xff", b" " * (1 << 20) + b" "], ids=["bytes", "huge"])
def test_a_file_that_is_no_text_is_refused(content, tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load_chat_template(tmp_path)
