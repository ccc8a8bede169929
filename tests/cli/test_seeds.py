"""Seeds of the command: told, fresh for each request, and enough to repeat it."""

import json
import re

import pytest


def test_same_seed_same_text(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--temperature", "1", "--json"]
    first, again, other = (
        json.loads(run(*arguments, "--seed", seed)[1])["tokens"] for seed in ("7", "7", "8")
    )
    assert first == again
    assert first != other


def test_a_fresh_seed_is_told_and_repeats_the_text(run, source):
    arguments = ["--prompt-file", source, "--max-new-tokens", "24", "--temperature", "0.8"]
    _, text, table = run(*arguments)
    (seed,) = re.findall(r"^ *seed +(\d+) *$", table, re.MULTILINE)
    assert run(*arguments, "--seed", seed)[1] == text
    first, second = (json.loads(run(*arguments, "--json")[1]) for _ in range(2))
    assert first["seed"] != second["seed"]
    repeated = json.loads(run(*arguments, "--seed", str(first["seed"]), "--json")[1])
    assert repeated["seed"] == first["seed"]
    assert repeated["tokens"] == first["tokens"]


@pytest.mark.exhaustive
def test_each_sampled_line_has_another_seed(run, tmp_path):
    file = tmp_path / "requests.jsonl"
    asked = {"prompt": "def f(x):\n", "max_new_tokens": 32, "temperature": 1.0}
    # An answer that ends at once could equal another one.
    asked |= {"ignore_eos": True}
    lines = [asked, asked | {"temperature": 0.0}, asked | {"seed": 7}, asked]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, _, third, fourth = json.loads(run("--requests", str(file), "--json")[1])["results"]
    assert third["seed"] == 7
    assert len({first["seed"], 7, fourth["seed"]}) == 3
    assert first["tokens"] != fourth["tokens"]
    file.write_text("\n".join(json.dumps(asked | {"seed": r["seed"]}) for r in (fourth, first)))
    again = json.loads(run("--requests", str(file), "--json")[1])["results"]
    assert [r["tokens"] for r in again] == [fourth["tokens"], first["tokens"]]
    _, _, table = run("--requests", str(file))
    assert f"{fourth['seed']} (line 1), {first['seed']} (line 2)" in table
