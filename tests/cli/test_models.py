"""`jspec generate --model DIR` on Hugging Face and jspec directories."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import jspec
from jspec.cli import main

GOLDEN = Path(__file__).parents[1] / "golden"


def character_tokenizer(path: Path, size: int) -> None:
    """A tokenizer of single characters: id n is character n."""
    tokenizer = Tokenizer(models.BPE(vocab={chr(n): n for n in range(size)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path / "tokenizer.json"))


@pytest.fixture
def hugging_face(tmp_path) -> Path:
    path = tmp_path / "qwen3"
    shutil.copytree(GOLDEN / "qwen3", path)
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    character_tokenizer(path, size)
    return path


def run(capsys, *arguments: str) -> dict:
    code = main(["generate", "--prompt", "hello, hello, hel", "--max-new-tokens", "12", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


def test_a_hugging_face_directory(capsys, hugging_face):
    result = run(capsys, "--model", str(hugging_face), "--compare", "--json")
    model, tokenizer = jspec.load_model(hugging_face), jspec.load_tokenizer(hugging_face)
    prompt = tokenizer.encode("hello, hello, hel")
    expected = jspec.generate(model, [prompt], jspec.SamplingParams(max_new_tokens=12), draft=None)
    assert tuple(result["tokens"]) == expected.tokens[0]
    assert result["text"] == tokenizer.decode(expected.tokens[0])
    assert result["compare"]["identical"] is True


@pytest.mark.exhaustive
def test_a_saved_model_and_a_draft_model(capsys, hugging_face, tmp_path):
    saved = tmp_path / "saved"
    jspec.save_model(jspec.load_model(hugging_face), saved)
    jspec.load_tokenizer(hugging_face).save(saved)
    plain = run(capsys, "--model", str(hugging_face), "--draft", "none", "--json")
    drafted = run(
        capsys, "--model", str(saved), "--draft-model", str(hugging_face), "--gamma", "3", "--json"
    )
    assert drafted["tokens"] == plain["tokens"]
    # The draft model is the target itself: every draft token is accepted.
    assert drafted["stats"]["acceptance_rate"] == 1.0


def test_a_draft_model_of_another_tokenizer_is_refused(capsys, hugging_face, tmp_path):
    """Where a token that both have differs; one that only padding has does not count."""
    other = shutil.copytree(hugging_face, tmp_path / "other")
    values = json.loads((other / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.__getitem__)[4:6]
    del vocabulary[max(vocabulary, key=vocabulary.__getitem__)]
    (other / "tokenizer.json").write_text(json.dumps(values))
    asked = ["generate", "--prompt", "hello", "--max-new-tokens", "2", "--model", str(hugging_face)]
    assert main([*asked, "--draft-model", str(other)]) == 0
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(values))
    capsys.readouterr()
    assert main([*asked, "--draft-model", str(other)]) == 2
    error = capsys.readouterr().err
    assert f"token 4 is {second!r}, but {first!r} in the model that it is to draft for" in error
    # A directory without a tokenizer says nothing of its tokens.
    (other / "tokenizer.json").unlink()
    assert main([*asked, "--draft-model", str(other)]) == 0


def test_the_models_end_token_may_be_ignored(capsys, hugging_face):
    whole = run(capsys, "--model", str(hugging_face), "--json")
    end, last = whole["tokens"][3], whole["tokens"][8]
    assert end not in whole["tokens"][:3]
    file = hugging_face / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    ended = run(capsys, "--model", str(hugging_face), "--json")
    assert (ended["tokens"], ended["finished"]) == (whole["tokens"][:4], "stop")
    on = run(capsys, "--model", str(hugging_face), "--json", "--ignore-eos")
    assert (on["tokens"], on["finished"]) == (whole["tokens"], "length")
    stop = ("--ignore-eos", "--stop", chr(last))
    stopped = run(capsys, "--model", str(hugging_face), "--json", *stop)
    count = whole["tokens"].index(last) + 1
    assert count > 4
    assert (stopped["tokens"], stopped["finished"]) == (whole["tokens"][:count], "stop")


def test_a_model_without_its_tokenizer_is_one_line(capsys, hugging_face):
    (hugging_face / "tokenizer.json").unlink()
    assert main(["generate", "--prompt", "x", "--model", str(hugging_face)]) == 2
    assert "tokenizer.json" in capsys.readouterr().err


def test_a_corrupt_checkpoint_is_one_line(capsys, hugging_face):
    weights = hugging_face / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    assert main(["generate", "--prompt", "x", "--model", str(hugging_face)]) == 2
    captured = capsys.readouterr()
    assert "model.safetensors" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
