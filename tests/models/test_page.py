"""docs/models.md and docs/checkpoints.md: the code runs, and the tables are complete."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import LayerSpec, SamplingParams
from jspec.models.families import FAMILIES
from jspec.typing import Model
from tests.decode.common import full_logits

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FAMILIES_PAGE = ((DOCS / name).read_text() for name in ("models.md", "checkpoints.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def run(blocks: list[str], names: dict) -> dict:
    for code in blocks:
        exec(compile(code, "docs/models.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def example():
    """What the page's code blocks define, but for the model with stacked layers."""
    return run([code for code in BLOCKS if "StackedGPT" not in code], {"__name__": "page"})


@pytest.fixture(scope="module")
def examples(example):
    """What all of them define."""
    return run([code for code in BLOCKS if "StackedGPT" in code], dict(example))


def test_the_model_is_a_page_of_code():
    """From its config to its logits, in less than 40 lines that are not blank."""
    model = BLOCKS[0].split("import jspec\n")[1].split("model = ")[0]
    assert 20 < len([line for line in model.splitlines() if line]) < 40


def by_brute_force(model, prompt, params: SamplingParams, gamma: int) -> list[int]:
    """A pass over the whole text for each token, drawn from its exact probabilities by the numbers
    of docs/sampling.md. In a draft that is always accepted these are of role DRAFT, 0, and that of
    the token after it is of role BONUS, 3."""
    text, end = list(prompt), len(prompt) + params.max_new_tokens
    while len(text) < end:
        drafted = min(gamma, end - len(text) - 1)
        for role in [0] * drafted + [3]:
            padded = jnp.asarray([text + [0] * (model.config.max_context - len(text))])
            law = jspec.ops.token_probabilities(
                full_logits(model, padded)[0, len(text) - 1], params
            )
            with jax.enable_x64(True):
                key = jax.random.fold_in(jax.random.key(params.seed or 0), len(text))
                number = int(jax.random.bits(jax.random.fold_in(key, role), dtype="uint64"))
            text.append(int(np.searchsorted(np.cumsum(law), number / 2**64, side="right")))
    return text[len(prompt) :]


@pytest.mark.exhaustive
@pytest.mark.parametrize("prefix", ["", "stacked_", "linen_"])
def test_the_examples_decode_what_brute_force_does(examples, prefix):
    """A greedy and a sampled row, by the default draft, which reads all of a text so short."""
    model, result = examples[f"{prefix}model"], examples[f"{prefix}result"]
    assert result.stats.acceptance_rate == 1
    for prompt, params, tokens in zip(
        examples["prompts"], examples["params"], result.tokens, strict=True
    ):
        assert list(tokens) == by_brute_force(model, prompt, params, gamma=4)
    assert [p.temperature for p in examples["params"]] == [0, 0.8]


@pytest.mark.exhaustive
def test_the_example_decodes_to_the_last_of_its_learned_positions(example):
    """Drafts run past the table of positions; what it gives there reaches no token."""
    model, params = example["model"], example["params"]
    prompts = [list(range(model.config.max_context - 32)), [7] * (model.config.max_context - 32)]
    result = jspec.generate(model, prompts, params)
    assert result.finished == ("length", "length")
    for prompt, row, tokens in zip(prompts, params, result.tokens, strict=True):
        assert list(tokens) == by_brute_force(model, prompt, row, gamma=4)


def table(heading: str, pattern: str, page: str = PAGE) -> list[str]:
    """The matches of ``pattern`` in the first cells of the table below ``heading``."""
    rows = page.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| ")]
    return [name for cell in cells[1:] for name in re.findall(pattern, cell)]


def test_the_tables_are_complete():
    fields = [field.name for field in dataclasses.fields(LayerSpec)]
    assert table("What a layer says of itself", r"`(\w+)`") == fields
    assert table("Families", r"`(\w+)`", FAMILIES_PAGE) == sorted(FAMILIES)
    assert table("What `attend` does", r"`(\w+)`") == ["q", "k", "v", "sinks", "up"]


def test_the_example_has_every_member_of_the_protocol(example):
    members = {name for name in vars(Model) if not name.startswith("_")}
    assert members == {"config", "dtype", "logits"}
    assert all(hasattr(example["model"], name) for name in members)
    offered = table("What a model offers", r"`(?:model\.)?(\w+(?:\.\w+)?)\b")
    assert offered == [
        "config.vocab_size",
        "config.layers",
        "config.max_context",
        "config.stop_tokens",
        "dtype",
        "model",
        "logits",
    ]
