"""`jspec generate` end to end on the bundled model: text, table, JSON, drafts, stops."""

import json

import pytest


def test_text_goes_to_stdout_and_the_table_to_stderr(run, source):
    code, out, err = run("--prompt-file", source, "--max-new-tokens", "24")
    assert code == 0
    assert out.endswith("\n")
    assert "tokens/s" in err
    assert "tokens/s" not in out
    assert max(map(len, err.splitlines())) <= 100


def test_json_names(run, source):
    _, out, err = run("--prompt-file", source, "--max-new-tokens", "16", "--json")
    result = json.loads(out)
    names = {"text", "tokens", "finished", "seed", "stats", "compare", "environment"}
    assert set(result) == names
    assert result["compare"] is None
    assert err == ""
    stats = result["stats"]
    assert stats["mean_accepted_length"] == stats["committed"] / stats["steps"]
    for position in stats["acceptance_by_position"]:
        assert set(position) == {"attempts", "accepted", "rate"}
    assert stats["decode_tokens_per_s"] > 0
    assert result["environment"]["platform"] == "cpu"


def test_text_is_the_tokens(run, source):
    _, out, _ = run("--prompt-file", source, "--max-new-tokens", "16", "--json")
    result = json.loads(out)
    assert result["text"] == bytes(t for t in result["tokens"] if t < 256).decode(errors="replace")


def test_stdin_and_bytes_that_are_no_utf8(run):
    code, out, _ = run("-", "--max-new-tokens", "8", "--json", stdin=b"\xff\xfe\x00 x = \x80")
    assert code == 0
    assert len(json.loads(out)["tokens"]) == 8


def test_plain_decoding_may_be_shaped_like_verification(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--draft", "none", "--json"]
    plain, padded = (json.loads(run(*arguments, *more)[1]) for more in ([], ["--gamma", "4"]))
    assert padded["tokens"] == plain["tokens"]
    assert padded["stats"]["steps"] == 24


@pytest.mark.exhaustive
def test_a_draft_takes_settings(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--json"]
    default, never = (
        json.loads(run(*arguments, *more)[1])
        for more in ([], ["--draft", "ngram:min_match=100,max_match=100"])
    )
    assert default["stats"]["drafted"] > never["stats"]["drafted"] == 0
    assert default["tokens"] == never["tokens"]


def test_a_backend_is_named_by_operation(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "12", "--json"]
    code, out, _ = run(*arguments, "--backend", "attention=xla", "--backend", "verify_greedy=xla")
    assert code == 0
    assert len(json.loads(out)["tokens"]) == 12
    preferred = json.loads(run(*arguments, "--backend", "xla")[1])
    assert preferred["tokens"] == json.loads(out)["tokens"]
    chosen = {choice["operation"]: choice["backend"] for choice in preferred["backends"]}
    assert set(chosen.values()) == {"xla"}
    assert {"attention", "verify_and_commit"} <= set(chosen)


def test_stop_text_ends_before_it(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "48", "--json"]
    whole = json.loads(run(*arguments)[1])["text"]
    stop = whole[20:24]
    result = json.loads(run(*arguments, "--stop", stop)[1])
    assert result["text"] == whole[: whole.index(stop)]
    assert result["finished"] == "stop"


def test_stop_of_one_byte_ends_in_the_step(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "48", "--json"]
    whole = json.loads(run(*arguments)[1])["text"]
    stop = whole[20]
    result = json.loads(run(*arguments, "--stop", stop)[1])
    assert result["text"] == whole[: whole.index(stop)]
    assert result["stats"]["committed"] == whole.index(stop) + 1


def test_stop_text_leaves_nothing_behind_it_in_any_count(run, source):
    """A stop text of several tokens is found after a chunk, which has decoded more."""
    arguments = ["--prompt-file", source, "--max-new-tokens", "48", "--json"]
    whole = json.loads(run(*arguments)[1])
    stop = whole["text"][9:13]
    result = json.loads(run(*arguments, "--stop", stop)[1])
    count = whole["text"].index(stop) + 4
    assert result["tokens"] == whole["tokens"][:count]
    stats = result["stats"]
    assert stats["committed"] == count
    assert stats["accepted"] <= count
    assert stats["steps"] <= whole["stats"]["steps"]
    assert stats["drafted"] <= whole["stats"]["drafted"]
