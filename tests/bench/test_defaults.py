"""The suite `defaults`: its texts, its settings and its ratios."""

import pytest

import jspec
from bench import defaults
from bench.settings import Settings
from jspec.models.bundled import bundled_path


@pytest.fixture(scope="module")
def tokenizer() -> jspec.Tokenizer:
    return jspec.load_tokenizer(bundled_path())


@pytest.mark.parametrize("kind", defaults.KINDS)
def test_prompts_have_the_size_of_the_case(kind, tokenizer):
    case = defaults.DEFAULTS.case(f"text={kind},B=3,S=200")
    prompts = defaults.prompts_of(tokenizer, case)
    assert len(prompts) == 3
    assert all(0.9 * 200 <= len(prompt) <= 1.1 * 200 for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 3


def test_an_edit_begins_to_write_its_source_again(tokenizer):
    source = tokenizer.encode(
        "def total(x):\n    total_of = 1\n    return total(x) + total(2)\n" * 4
    )
    text = tokenizer.decode(defaults.edited(tokenizer, source, 2 * len(source)))
    before, _, after = text.partition("# The same code with total_new in place of total:\n\n")
    assert "total_new" not in before.removesuffix("\n\n")
    assert after.startswith("def total_new(x):\n    total_of = 1\n")


@pytest.mark.exhaustive
def test_settings_are_compared_with_plain_decoding(short_bundled, tokenizer, monkeypatch):
    monkeypatch.setattr(defaults, "_loaded", lambda settings: (short_bundled, tokenizer))
    monkeypatch.setattr(defaults, "keep_programs", lambda: None)
    seconds = {0: 1.0, 1: 0.5, None: 0.8}

    def time(self):
        self.seconds.append(seconds[self.gamma])

    monkeypatch.setattr(defaults.Setting, "time", time)
    case = defaults.DEFAULTS.case("text=edit,S=64,new=8,sampling=t0.8")
    settings = Settings(quick=True, only=("gamma 1", "default"))
    rows = {row["name"]: row for row in defaults.rows(case, settings)}
    assert [*rows] == ["plain", "gamma 1", "default"]
    assert {name: row["vs_plain"] for name, row in rows.items()} == {
        "plain": 1.0,
        "gamma 1": 2.0,
        "default": 1.25,
    }
    assert rows["default"]["vs_best"] == 0.625
    assert rows["default"]["tokens_per_s"] == 10
    assert all(row["identical"] == 1 for row in rows.values())
    assert [gamma for gamma, _ in rows["gamma 1"]["steps_at_gamma"]] == [1]
    assert rows["plain"]["programs"] > 0
