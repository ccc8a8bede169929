"""Chat templates against transformers' own renderer; needs the extra "parity".

The templates are ours, in the constructs of those of Llama 3, Qwen2.5 and Qwen3.
"""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jspec.models.chat import load_chat_template
from jspec.models.tokenizer import byte_alphabet, load_tokenizer

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]

HEADERS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|head|>system<|tail|>\\n\\nToday: " + date_string + "\\n\\n" + system_message + "<|end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '<|tail|>\\n\\n' }}
        {{- message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at a time") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant<|tail|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" + eos_token }}
    {%- else %}
        {{- "<|head|>tool<|tail|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant<|tail|>\\n\\n' }}
{%- endif %}
"""
THINKING = """\
{%- if tools %}
    {{- '<|head|>system\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '<|tail|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- set text = message.content if message.content is string else '' %}
    {%- set answer = text.startswith('<answer>') and text.endswith('</answer>') %}
    {%- if ns.searching and message.role == "user" and not(answer) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n') %}
            {%- set thought = thought.split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<|head|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>' }}
            {{- '\\n\\n' + content }}
        {%- else %}
            {{- '<|head|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|tail|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|head|>user' }}
        {%- endif %}
        {{- '\\n<answer>\\n' + message.content + '\\n</answer>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|tail|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|head|>' + message.role + '\\n' + message.content + '<|tail|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|head|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
USER = {"role": "user", "content": "  Wie spät ist es? <|end|> 你好\n"}
CALL = {"function": {"name": "time", "arguments": {"zone": "Zürich", "at": [1, None, True]}}}
NOTHING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TALKS = {
    "user": [USER],
    "system": [{"role": "system", "content": "Be brief.\n"}, USER],
    "answered": [USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n3"}, USER],
    "tools": [
        USER,
        {"role": "assistant", "content": "<think>a</think>b", "tool_calls": [CALL]},
        {"role": "tool", "content": "half past nine"},
        {"role": "tool", "content": "or so"},
    ],
}
SETTINGS = {
    "plain": {},
    "date": {"date_string": "1 Jan 2026"},
    "quick": {"enable_thinking": False},
    "tools": {"tools": [{"type": "function", "function": {"name": "time<>", "description": "ü"}}]},
}


@pytest.fixture(scope="module", params=[HEADERS, THINKING], ids=["headers", "thinking"])
def both(request, tmp_path_factory):
    """A small BPE tokenizer with a chat template by transformers, and its directory."""
    transformers = pytest.importorskip("transformers")
    vocabulary = {piece: i for i, piece in enumerate([*byte_alphabet(), "st"])}
    backend = Tokenizer(models.BPE(vocabulary, [("s", "t")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token="<|eot|>",
        additional_special_tokens=["<|head|>", "<|tail|>", "<|end|>"],
        chat_template=request.param,
    )
    path = tmp_path_factory.mktemp("chat")
    theirs.save_pretrained(path)
    return theirs, path


@pytest.mark.parametrize("generation_prompt", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
def test_the_same_ids(both, talk, settings, generation_prompt):
    theirs, path = both
    expected = theirs.apply_chat_template(
        talk, add_generation_prompt=generation_prompt, return_dict=False, **settings
    )
    template = load_chat_template(path)
    assert template is not None
    text = template.render(talk, add_generation_prompt=generation_prompt, **settings)
    assert load_tokenizer(path).encode(text, special=False) == expected


@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
def test_the_last_message_is_continued_as_there(both, talk):
    theirs, path = both
    template = load_chat_template(path)
    assert template is not None
    for last in (talk[-1], {"role": "assistant", "content": "It is "}):
        whole = [*talk[:-1], last]
        try:
            expected = theirs.apply_chat_template(
                whole, continue_final_message=True, tokenize=False
            )
        except Exception:
            with pytest.raises(ValueError, match="template"):
                template.render(whole, continue_final_message=True)
        else:
            assert template.render(whole, continue_final_message=True) == expected


def test_no_content_writes_nothing_as_there(both):
    theirs, path = both
    template = load_chat_template(path)
    assert template is not None
    talk = [USER, NOTHING, {"role": "tool", "content": "9"}]
    for settings in ({}, {"tools": SETTINGS["tools"]["tools"]}):
        try:
            expected = theirs.apply_chat_template(
                talk, add_generation_prompt=True, tokenize=False, **settings
            )
        except Exception:
            with pytest.raises(ValueError, match="refuses the messages"):
                template.render(talk, **settings)
        else:
            assert template.render(talk, **settings) == expected


def test_templates_with_names_are_chosen_as_there(tmp_path):
    transformers = pytest.importorskip("transformers")
    named = {"default": "D{{ messages|length }}", "tool_use": "T{{ tools|tojson }}", "rag": "R"}
    backend = Tokenizer(models.BPE({"a": 0}, []))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=named)
    theirs.save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = load_chat_template(tmp_path)
    assert template is not None
    for settings in ({}, SETTINGS["tools"], {"chat_template": "rag"}, {"chat_template": "{{ 1 }}"}):
        expected = theirs.apply_chat_template([USER], tokenize=False, **settings)
        assert template.render([USER], **settings) == expected
