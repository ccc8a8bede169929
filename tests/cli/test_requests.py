"""JSON lines of requests: each good line is served as it asks, each bad one refused by number."""

import argparse
import dataclasses
import io
import json
import random
from pathlib import Path

import pytest

from jspec.cli import requests as requests_module
from jspec.cli.requests import Chat, parse_lines, read_requests
from jspec.config import SamplingParams

EMPTY = str(Path(__file__).with_name("__init__.py"))
DEFAULTS = {
    "max_new_tokens": 9,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.75,
    "min_p": 0.25,
    "seed": 3,
    "ignore_eos": False,
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.25,
    "presence_penalty": -0.5,
    "min_new_tokens": 1,
}


def parsed(*lines: str | bytes):
    """What a file of these lines asks for: requests, and refusals by line."""
    raw = b"\n".join(x.encode() if isinstance(x, str) else x for x in lines)
    requests, refused = parse_lines(io.BytesIO(raw), DEFAULTS, ("END",))
    for line in refused:
        assert line.error
        assert line.error.isprintable()
        assert len(line.error) < 400
    return requests, {line.line: line.error for line in refused}


def test_a_line_has_the_settings_of_the_command_unless_it_names_others():
    fields = {
        "max_new_tokens": 5,
        "temperature": 2,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "seed": 11,
        "ignore_eos": True,
        "repetition_penalty": 2,
        "frequency_penalty": 0.5,
        "presence_penalty": 1,
        "min_new_tokens": 3,
    }
    assert fields.keys() == DEFAULTS.keys() == requests_module._FIELDS.keys()
    lines = [{"prompt": "x"}, {"prompt": "x", **fields}]
    lines += [{"prompt": "x", name: value} for name, value in fields.items()]
    requests, refused = parsed(*map(json.dumps, lines))
    assert not refused
    expected = [DEFAULTS, fields, *({**DEFAULTS, name: fields[name]} for name in fields)]
    assert [r.params for r in requests] == [SamplingParams(**settings) for settings in expected]


def test_lines_are_numbered_with_the_blank_ones():
    good = json.dumps({"prompt": "x"})
    requests, refused = parsed("", good, "  \t", "", "{", good, "\r", "7", good)
    assert [r.line for r in requests] == [2, 6, 9]
    assert list(refused) == [5, 8]


def test_line_endings_of_other_systems_and_a_byte_order_mark_are_read():
    good = json.dumps({"prompt": "x"}).encode()
    requests, refused = parsed(b"\xef\xbb\xbf" + good + b"\r", good + b"\r")
    assert [r.line for r in requests] == [1, 2]
    assert not refused


def test_a_line_may_name_its_stop_texts_and_itself():
    lines = [
        {"prompt": "x"},
        {"prompt": "x", "stop": "a", "id": "first"},
        {"prompt": "x", "stop": ["a", "bc"], "id": 7},
        {"prompt": "x", "stop": [], "id": None},
    ]
    requests, _ = parsed(*map(json.dumps, lines))
    assert [r.stop for r in requests] == [("END",), ("a",), ("a", "bc"), ()]
    assert [r.id for r in requests] == [None, "first", 7, None]


USER = {"role": "user", "content": "x"}


def messages(*more: dict, **fields) -> str:
    """A line with a conversation of one good message and ``more``."""
    return json.dumps({"messages": [USER, *more], **fields})


BAD = [
    ("{broken", "is not valid JSON: Expecting property name enclosed in double quotes"),
    ("[1]", "must be a JSON object, got list"),
    ("null", "must be a JSON object, got NoneType"),
    ('{"prompt": ""}', "'prompt' must be a string that is not empty, got ''"),
    ('{"prompt": ["x"]}', "'prompt' must be a string that is not empty, got ['x']"),
    ("{}", "'prompt' must be a string that is not empty"),
    ('{"prompt": "x", "colour": 1}', "unknown field 'colour'; a request has id, prompt, messages"),
    ('{"prompt": "x", "a\\nb": 1}', "unknown field 'a\\nb'; a request has"),
    ('{"prompt": "x", "prompt": "y"}', "is not valid JSON: 'prompt' appears twice in an object"),
    ('{"prompt": "x", "top_k": "3"}', "'top_k' must be a whole number, got '3'"),
    ('{"prompt": "x", "top_k": 2.9}', "'top_k' must be a whole number, got 2.9"),
    ('{"prompt": "x", "top_k": true}', "'top_k' must be a whole number, got True"),
    ('{"prompt": "x", "top_k": null}', "'top_k' must be a whole number, got None"),
    ('{"prompt": "x", "top_k": 2147483648}', "top_k=2147483648 must be below 2147483648"),
    ('{"prompt": "x", "seed": 1.7}', "'seed' must be a whole number, got 1.7"),
    ('{"prompt": "x", "seed": 4294967296}', "seed=4294967296 must be in [0, 2**32), or None"),
    ('{"prompt": "x", "temperature": "hot"}', "'temperature' must be a number, got 'hot'"),
    ('{"prompt": "x", "temperature": -1}', "temperature=-1 must be 0 (greedy) or a positive"),
    ('{"prompt": "x", "temperature": 1e999}', "temperature=inf must be 0 (greedy) or a positive"),
    ('{"prompt": "x", "temperature": NaN}', "temperature=nan must be 0 (greedy) or a positive"),
    (
        '{"prompt": "x", "temperature": 1' + "0" * 400 + "}",
        "temperature=1000",
    ),
    (
        '{"prompt": "x", "temperature": 1' + "0" * 9999 + "}",
        "is not valid JSON: an integer has 10000 digits",
    ),
    ('{"prompt": "x", "ignore_eos": 1}', "'ignore_eos' must be true or false, got 1"),
    ('{"prompt": "x", "ignore_eos": null}', "'ignore_eos' must be true or false, got None"),
    ('{"messages": []}', '\'messages\' must be a list of messages such as {"role": "user", "co'),
    ('{"messages": {"role": "user"}}', "'messages' must be a list of messages such as {"),
    ('{"messages": "hello"}', "'messages' must be a list of messages such as {"),
    ('{"messages": [7]}', "message 1 must have a role and a content alone, as {"),
    ('{"messages": [{"role": "user"}]}', "message 1 must have a role and a content alone, as"),
    (messages({"role": "user", "content": None}), "message 2 must have a role and a content alone"),
    (messages({"role": 1, "content": "x"}), "message 2 must have a role and a content alone, as"),
    (messages(USER | {"name": "a"}), "message 2 must have a role and a content alone, as"),
    (
        messages(USER | {"content": "\ud800"}),
        "'content' of message 2 holds '\\ud800' at character 1",
    ),
    (
        messages(USER | {"role": "a\udfff"}),
        "'role' of message 2 holds '\\udfff' at character 2, wh",
    ),
    (messages(USER, prompt="x"), "a request has 'prompt' or 'messages', not both; leave one out"),
    ('{"prompt": "x", "stop": 1}', "'stop' must be a string or a list of strings"),
    ('{"prompt": "x", "stop": [""]}', "a stop text is empty; give it at least one character"),
    ('{"prompt": "x", "stop": "a\\ud800"}', "a stop text holds '\\ud800' at character 2, which is"),
    ('{"prompt": "x\\udfff"}', "'prompt' holds '\\udfff' at character 2, which is half of a char"),
    ('{"prompt": "x", "id": [1]}', "'id' must be a string or a whole number, got [1]"),
    ('{"prompt": "x", "id": 1.5}', "'id' must be a string or a whole number, got 1.5"),
    ('{"prompt": "x", "id": true}', "'id' must be a string or a whole number, got True"),
    ("[" * 100_000, "is nested too deeply"),
    ('{"prompt": ' * 100_000, "is nested too deeply"),
    (
        b'{"prompt": "\xff"}',
        "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 12",
    ),
    ('{"prompt": "x", "stop": [' + '"a",' * 64 + '"a"]}', "there are 65 stop texts; give at most"),
    ('{"prompt": "x", "stop": "' + "a" * 1025 + '"}', "a stop text has 1025 characters; give at"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=[message[:45] for _, message in BAD])
def test_a_bad_line_is_refused_by_number_and_the_others_are_served(line, message):
    good = json.dumps({"prompt": "x"})
    requests, refused = parsed(good, line, good)
    assert [r.line for r in requests] == [1, 3]
    assert list(refused) == [2]
    assert refused[2].startswith(message)


def test_a_refused_line_keeps_its_name():
    lines = ['{"prompt": "", "id": "a"}', '{"id": "b", "prompt": 1}', '{"id": [], "prompt": "x"}']
    _, refused = parse_lines(io.BytesIO("\n".join(lines).encode()), DEFAULTS, ())
    assert [line.id for line in refused] == ["a", "b", None]


def test_a_line_beyond_the_limit_is_passed_over_piece_by_piece(monkeypatch):
    monkeypatch.setattr(requests_module, "LINE_LIMIT", 64)

    class Counted(io.BytesIO):
        longest = 0

        def readline(self, size=-1):
            line = super().readline(size)
            self.longest = max(self.longest, len(line))
            return line

    good = json.dumps({"prompt": "x"}).encode()
    exact = json.dumps({"prompt": "y" * 49}).encode()
    assert len(exact + b"\n") == 64
    for long in (json.dumps({"prompt": "x" * 10_000}).encode(), exact + b" ", b"x" * 129):
        file = Counted(b"\n".join([good, long, exact, long, good]))
        requests, refused = parse_lines(file, DEFAULTS, ())
        assert [r.line for r in requests] == [1, 3, 5]
        assert [r.line for r in refused] == [2, 4]
        assert {r.error for r in refused} == {"is longer than 64 bytes"}
        assert file.longest <= 65


def arguments(**changes) -> argparse.Namespace:
    nothing = dict.fromkeys(("prompt", "prompt_file", "stdin", "requests", "system"))
    off = dict.fromkeys(("demo", "chat"), False)
    return argparse.Namespace(**{**nothing, **off, **DEFAULTS, "stop": ["END"], **changes})


def test_requests_come_from_stdin(monkeypatch):
    stdin = type("Stdin", (), {"buffer": io.BytesIO(b'{"prompt": "x"}\n{\n')})
    monkeypatch.setattr("sys.stdin", stdin)
    requests, refused = read_requests(arguments(requests="-"))
    assert [(r.prompt, r.line) for r in requests] == [(b"x", 1)]
    assert [r.line for r in refused] == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": "no/such"}, "no/such cannot be read: "),
        ({"requests": "/"}, "/ is no regular file"),
        ({"requests": "/dev/null"}, "/dev/null is no regular file"),
        ({"requests": EMPTY}, f"{EMPTY}: holds no requests; write one JSON object a line"),
        ({"requests": EMPTY, "top_k": -2}, "top_k=-2 must be at least 1"),
        ({"prompt": "x", "stop": ["a\udcff"]}, "a stop text holds '\\udcff' at character 2"),
        ({}, "no prompt; pass --prompt TEXT, --prompt-file F, --requests FILE.jsonl, --demo, or -"),
        ({"prompt": "x", "system": "y"}, "--system goes with --chat; pass both"),
        ({"prompt": "x", "chat": True, "system": "\udcff"}, "--system holds '\\udcff' at charac"),
        ({"prompt": "a\udcff", "chat": True}, "byte 2 of the prompt is not UTF-8, which a message"),
    ],
)
def test_what_serves_nothing_is_an_error(changes, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        read_requests(arguments(**changes))
    assert str(caught.value).startswith(message)


def test_a_line_may_hold_a_conversation():
    talk = [USER, {"role": "assistant", "content": ""}, USER | {"content": "é"}]
    requests, refused = parsed(json.dumps({"messages": talk, "seed": 4, "id": "talk"}))
    assert not refused
    assert requests[0].prompt == talk
    assert (requests[0].params.seed, requests[0].id) == (4, "talk")


def test_chat_makes_conversations_of_prompts():
    """The system message comes first, but for a conversation that has its own."""
    system, other = ({"role": "system", "content": text} for text in ("be kind", "be brief"))
    lines = [{"prompt": "é"}, {"messages": [USER]}, {"messages": [other, USER]}]
    file = "\n".join(map(json.dumps, lines)).encode()

    def prompts(chat: Chat) -> list:
        requests, refused = parse_lines(io.BytesIO(file), DEFAULTS, (), chat)
        assert not refused
        return [request.prompt for request in requests]

    asked = USER | {"content": "é"}
    assert prompts(Chat()) == ["é".encode(), [USER], [other, USER]]
    assert prompts(Chat(True)) == [[asked], [USER], [other, USER]]
    assert prompts(Chat(True, "be kind")) == [[system, asked], [system, USER], [other, USER]]
    (request,), _ = read_requests(arguments(prompt="é", chat=True, system="be kind"))
    assert request.prompt == [system, asked]


# --- any line at all ---------------------------------------------------------------------------

VALUES = [
    *("", "x", "\ud800", "a\u2028b", "\x1b[31m", "\n", "é" * 40, "9" * 30),
    *(0, 1, -1, 2**31, 2**32, 10**19, -(10**19), 0.5, 1e308, 1e-320, True, False, None),
    *([], {}, ["a"], ["\udfff", 1], {"a": [1]}, [[[]]], ["x"] * 70),
    *([USER], [USER, 1], [USER | {"content": "\ud800"}], [USER | {"a": 1}], [USER] * 99),
]
NAMES = ["prompt", "messages", "stop", "id", *DEFAULTS, "colour", "\x1b]0;", "", "prompt "]
JUNK = [b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\xff", b"\x00", b"-", b"9" * 50]
JUNK += [b"e999", b"NaN", b"Infinity", b"\\ud800", b"\\u0000", b"[" * 2000, b"\r", b" ", b"\xe2"]


def any_line(rng: random.Random) -> bytes:
    """A request with fields of any kind, now and then cut, doubled or sprinkled with junk."""
    names = rng.sample(NAMES, rng.randrange(5))
    if rng.random() < 0.8:
        names.append("prompt")
    usual = {"prompt": "x", "stop": "a", "id": "b"} | DEFAULTS
    pairs = []
    for name in names:
        is_usual = name in usual and rng.random() < 0.7
        pairs.append((name, usual[name] if is_usual else rng.choice(VALUES)))
    line = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs)
    line = f"{{{line}}}".encode()
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        at = rng.randrange(len(line) + 1)
        line = line[:at] + rng.choice(JUNK) + line[at + rng.randrange(4) :]
    return line.replace(b"\n", b"")


@pytest.mark.parametrize(
    "count", [4_000, pytest.param(200_000, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_any_line_is_served_or_refused_in_one_line(count):
    """Nothing but the line itself decides: the good one after it is always served."""
    rng, good = random.Random(count), json.dumps({"prompt": "good"}).encode()
    lines = [any_line(rng) for _ in range(count)]
    raw = b"\n".join(line + b"\n" + good for line in lines)
    requests, refused = parse_lines(io.BytesIO(raw), DEFAULTS, ())
    assert [r.line for r in requests if r.line % 2 == 0] == list(range(2, 2 * count + 1, 2))
    served = {r.line for r in requests} | {r.line for r in refused}
    blank = {2 * i + 1 for i, line in enumerate(lines) if not line.strip()}
    assert served | blank == set(range(1, 2 * count + 1))
    assert len(requests) + len(refused) == len(served)
    for line in refused:
        assert line.error.isprintable()
        assert 0 < len(line.error) < 400
    for request in requests:
        assert isinstance(request.prompt, bytes) or request.prompt[0]["content"]
        assert dataclasses.replace(request.params) == request.params
    share = len(requests) / (2 * count)
    assert 0.55 < share < 0.85  # both ways were taken
