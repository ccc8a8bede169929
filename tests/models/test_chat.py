"""Chat templates: what they give, what they may not do, and where they are found."""

import json

import pytest

from jspec.models.chat import ChatTemplate, load_chat_template
from jspec.models.errors import ChatTemplateError, CheckpointError
from tests.models.gguf_files import write_vocabulary

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
    assert template(PLAIN).render(TALK, add_generation_prompt=False) == text


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
    with pytest.raises(ChatTemplateError, match=message) as refusal:
        template(source).render(TALK)
    assert str(refusal.value).startswith("model/config: the chat template refuses")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "messages", ["hello", [], {"role": "user"}, ["hello"], [{"content": "no role"}], [{"role": 3}]]
)
def test_messages_without_a_role_are_refused(messages):
    with pytest.raises(ValueError, match=r'pass messages such as \[\{"role": "user"'):
        template(PLAIN).render(messages)


DEEP = 2000


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{% break %}",
        "{{ 1|nope }}",
        "{% if 1 %}" * 100 + "{% endif %}" * 100,
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{{ " + "(" * DEEP + "1" + ")" * DEEP + " }}",
        "{{ " + "[" * DEEP + "]" * DEEP + " }}",
        "{{ " + "1+" * DEEP + "1 }}",
    ],
    ids=["syntax", "break", "filter", "ifs", "fors", "parentheses", "lists", "sums"],
)
def test_a_malformed_template_is_refused_when_somebody_chats(source):
    bad = template(source)
    with pytest.raises(ChatTemplateError, match=r"^model/config: no chat template: ") as refusal:
        bad.render(TALK)
    assert str(refusal.value).isprintable()
    assert bad.render(TALK, chat_template="{{ 1 }}") == "1"


def test_a_message_without_content_writes_nothing():
    source = (
        "{% for m in messages %}[{{ m.content }}{{ 'calls' if m.tool_calls is defined }}]"
        "{% endfor %}"
    )
    talk = [
        {"role": "assistant", "content": None, "tool_calls": [1]},
        {"role": "user", "content": "Hi", "tool_calls": None},
    ]
    assert template(source).render(talk) == "[calls][Hi]"
    assert talk[0]["content"] is None


def test_reasoning_has_several_names():
    source = "{{ messages[0].thinking }}{{ messages[0].reasoning_content }}"
    for name in ("thinking", "reasoning", "reasoning_content"):
        assert template(source).render([{"role": "assistant", name: "x"}]) == "xx"


TURNS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{{ m.content if m.content is string else m.content[0].text }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (TURNS, "The answer ", "<user>Hi</><assistant>The answer "),
        (TURNS.replace("if", "| trim if", 1), " The ", "<user>Hi</><assistant>The"),
        (TURNS, [{"type": "text", "text": "The"}], "<user>Hi</><assistant>The"),
        (TURNS, "", "<user>Hi</><assistant>"),
    ],
)
def test_the_last_message_is_continued(source, content, expected):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    chat = template(source)
    assert chat.render(talk, continue_final_message=True) == expected
    assert chat.render(talk, continue_final_message=True, add_generation_prompt=False) == expected
    assert talk[1]["content"] == content
    assert chat.render(talk[:1]).endswith("<assistant>")
    assert chat.render(talk[:1], add_generation_prompt=False) == "<user>Hi</>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "pass one of them"),
        (
            {"chat_template": "X"},
            "chat_template='X' is no template, nor the name .* it has 'default'",
        ),
        ({"chat_template": 3}, "chat_template=3 is no template"),
        ({"messages": []}, "messages= is no variable of a chat template"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs= is no variable"),
        ({"sampling_params": 1, "tokenize": True}, "sampling_params= is no variable .* as params"),
        ({"tools": [len]}, "tools=.* must be a list of JSON schemas"),
        ({"tools": {}}, "tools={} must be a list"),
    ],
)
def test_settings_are_served_or_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        template(PLAIN).render(TALK, **settings)


def test_a_message_that_cannot_be_continued():
    for talk, message in (
        ([{"role": "assistant"}], "the last message has no text"),
        ([{"role": "assistant", "content": [{"type": "image"}]}], "the last message has no text"),
        ([{"role": "system", "content": "x"}], "does not write the last message as it is"),
    ):
        with pytest.raises(ValueError, match=message):
            template("{{ messages[0].role }}").render(talk, continue_final_message=True)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = [
    {"name": "tool_use", "template": "T{{ tools[0].function.name }}"},
    {"name": "default", "template": "D"},
    {"name": "rag", "template": "R{{ documents|length }}"},
]


@pytest.mark.parametrize("layout", ["list", "files", "both", "gguf"])
def test_templates_have_names(layout, tmp_path):
    path = tmp_path
    listed = NAMED if layout == "list" else [{**NAMED[0], "template": "old"}, NAMED[1]]
    if layout in ("list", "both"):
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    if layout in ("files", "both"):
        (path / "additional_chat_templates").mkdir()
        for one in NAMED:
            name = "chat_template" if one["name"] == "default" else one["name"]
            folder = path if one["name"] == "default" else path / "additional_chat_templates"
            (folder / f"{name}.jinja").write_text(one["template"])
    if layout == "gguf":
        keys = {"default": "chat_template", "rag": "chat_template.rag"}
        stored = {keys.get(one["name"], "chat_template.tool_use"): one["template"] for one in NAMED}
        path = write_vocabulary(
            path / "model.gguf", **{f"tokenizer.{k}": v for k, v in stored.items()}
        )
    chat = load_chat_template(path)
    assert chat is not None
    assert chat.render(TALK) == "D"
    assert chat.render(TALK, tools=TOOLS) == "Tf"
    assert chat.render(TALK, tools=TOOLS, chat_template="default") == "D"
    assert chat.render(TALK, documents=[{}], chat_template="rag") == "R1"
    assert chat.render(TALK, chat_template="{{ messages|length }}") == "4"


def test_templates_without_a_default_need_a_name(tmp_path):
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"chat_template": NAMED[:1] + NAMED[2:]}))
    chat = load_chat_template(tmp_path)
    assert chat is not None
    with pytest.raises(ChatTemplateError, match=r"named default; pass .* one of 'tool_use', 'rag'"):
        chat.render(TALK)
    assert chat.render(TALK, tools=TOOLS) == "Tf"


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
        ('{"chat_template": 3}', "must be a string or a list of templates with names"),
        ('{"chat_template": [3]}', "a list of templates with names"),
        ('{"chat_template": [{"template": ""}]}', "name is missing; it must be a string"),
        ('{"chat_template": [{"name": "default"}]}', "template is missing; it must be a string"),
        ("[", "is not valid JSON"),
    ],
    ids=["number", "numbers", "unnamed", "without", "malformed"],
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
