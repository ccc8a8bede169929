"""`jspec generate --chat`, and lines with messages: the checkpoint's own chat template."""

import json
import shutil
from pathlib import Path

import pytest

import jspec
from tests.cli.test_models import GOLDEN, character_tokenizer

# Characters of the small vocabulary alone: each is a token of its own.
TEMPLATE = "{% for m in messages %}<{{ m.role|length }}>{{ m.content }}{% endfor %}<a>"
TALK = [{"role": "system", "content": "hem"}, {"role": "user", "content": "hello"}]
ASKED = ("--max-new-tokens", "8", "--json")


@pytest.fixture
def model(tmp_path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen3", path)
    character_tokenizer(path, json.loads((path / "config.json").read_text())["vocab_size"])
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture
def expected(model) -> list[int]:
    """What `LLM.chat` answers."""
    llm = jspec.LLM(model, draft=jspec.NgramDraft())
    assert llm.tokenizer.decode(llm.encode_chat(TALK)) == "<6>hem<4>hello<a>"
    return list(llm.chat(TALK, jspec.SamplingParams(max_new_tokens=8))[0].tokens)


def test_the_prompt_is_a_message_to_the_template(run, model, expected, tmp_path):
    code, out, err = run(
        "--model", str(model), "--chat", "--system", "hem", "--prompt", "hello", *ASKED
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == expected

    file = tmp_path / "in.jsonl"
    bare = {"prompt": "<6>hem<4>hello<a>"}
    refused = {"messages": [{"role": "user", "content": 7}]}
    file.write_text("\n".join(map(json.dumps, [{"messages": TALK}, bare, refused])))
    code, out, err = run("--model", str(model), "--requests", str(file), "--batch", "1", *ASKED)
    assert code == 2
    assert [r["tokens"] for r in json.loads(out)["results"]] == [expected, expected]
    assert err.startswith("jspec: error: line 3: message 1 must have a role and a content alone")


def test_a_model_without_a_template_says_the_way_out(run, model, tmp_path, monkeypatch):
    (model / "tokenizer_config.json").unlink()
    way_out = "the model has no chat template for messages; give it a plain prompt, without --chat"
    for which in (("--model", str(model)), ()):
        with monkeypatch.context() as patch:  # a large model is not loaded in vain
            patch.setattr("jspec.cli.generate.load_model", None)
            code, out, err = run(*which, "--chat", "--prompt", "hello", *ASKED)
        assert (code, out) == (2, "")
        assert err.startswith(f"jspec: error: {way_out}")
        assert err.count("\n") == 1
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"messages": TALK, "id": 5}))
    code, out, _ = run("--model", str(model), "--requests", str(file), *ASKED)
    assert code == 2
    (refused,) = json.loads(out)["errors"]
    assert (refused["line"], refused["id"]) == (1, 5)
    assert refused["error"].startswith(way_out)


def test_a_template_that_refuses_is_one_line(run, model):
    settings = {"chat_template": "{{ raise_exception('no\nsuch role') }}"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    code, out, err = run("--model", str(model), "--chat", "--prompt", "hello", *ASKED)
    assert (code, out) == (2, "")
    assert "the chat template refuses the messages: no such role" in err
    assert err.count("\n") == 1
