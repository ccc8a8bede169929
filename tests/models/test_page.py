"""docs/models.md: its code runs as it stands, and its tables name what there is."""

import dataclasses
import re
from pathlib import Path

import jax.numpy as jnp
import pytest

from jspec import LayerSpec
from jspec.models.families import FAMILIES
from jspec.typing import Model
from tests.decode.common import full_logits

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text()


@pytest.fixture(scope="module")
def example():
    """What the page's code block defines."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names = {"__name__": "page"}
    exec(compile(code, "docs/models.md", "exec"), names)
    return names


def test_the_example_decodes_what_a_pass_without_a_cache_chooses(example):
    for prompt, tokens in zip(example["prompts"], example["result"].tokens, strict=True):
        assert len(tokens) == 32
        logits = full_logits(example["model"], jnp.asarray([[*prompt, *tokens]]))
        assert jnp.argmax(logits, axis=-1)[0, len(prompt) - 1 : -1].tolist() == list(tokens)


def table(heading: str, pattern: str) -> list[str]:
    """What ``pattern`` finds in the first cells of the table below ``heading``."""
    rows = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| ")]
    return [name for cell in cells[1:] for name in re.findall(pattern, cell)]


def test_the_tables_are_complete():
    fields = [field.name for field in dataclasses.fields(LayerSpec)]
    assert table("What a layer says of itself", r"`(\w+)`") == fields
    assert table("Families that jspec loads", r"`(\w+)`") == list(FAMILIES)
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
