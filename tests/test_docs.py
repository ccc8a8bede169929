"""README and docs: their Python runs as it stands, and their lists are complete."""

import re
from pathlib import Path

import jax.numpy as jnp
import pytest

import jspec
from jspec.ops.sample import number
from tests.parameters import default_run

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = {page.stem: BLOCK.findall(page.read_text()) for page in PAGES}
# The code of docs/models.md and docs/trainers.md runs in tests/models, which looks at what it
# defines, that of docs/sharding.md is an example's, and that of docs/index.md is README's.
ELSEWHERE = ("models", "trainers", "sharding", "index")
EXECUTED = [name for name, code in CODE.items() if code and name not in ELSEWHERE]


def run(page: str) -> dict:
    """What the blocks of a page define, run one after the other."""
    names = {"__name__": page}
    for index, code in enumerate(CODE[page], 1):
        exec(compile(code, f"{page}, block {index}", "exec"), names)
    return names


# The other pages call what has tests of its own.
PAGES_BY_DEFAULT = ("serving", "policies", "selection", "sampling", "extending")


@pytest.mark.parametrize(
    "page", default_run(EXECUTED, *PAGES_BY_DEFAULT, "simulator", "conformance")
)
def test_the_code_of_a_page_runs(page, small_bundled):
    names = run(page)
    if page == "sampling":
        settings = (jnp.asarray([names[x]], t) for x, t in (("seed", "uint32"), ("position", int)))
        drawn = number(*settings, names["role"])
        assert int(drawn[0]) == int(names["number"])
    if page == "loops":
        check_loops(names)


def check_loops(names: dict) -> None:
    """The page's loops, greedy and sampled, end with the tokens and counts of `jspec.generate`."""
    model, prompts, params, config = (names[x] for x in "model prompts params config".split())
    expected = jspec.generate(model, prompts, params, draft=config.draft, gamma=config.gamma)
    state = names["decode"](model, jspec.start_decoding(model, prompts, params, config))
    for row, (prompt, tokens) in enumerate(zip(prompts, expected.tokens, strict=True)):
        text = state.tokens[row][: len(prompt) + len(tokens)].tolist()
        assert text == [*prompt, *tokens]
    assert int(names["accepted"].sum()) == expected.stats.accepted
    assert names["state"].done.all()  # also with the request that was filled in


@pytest.mark.slow
@pytest.mark.parametrize("page", EXECUTED)
def test_the_code_of_a_page_runs_on_the_bundled_model(page):
    run(page)


def test_the_code_that_two_places_show_is_the_same():
    assert CODE["index"] == CODE["README"]
    example = (ROOT / "examples/sharded_loop.py").read_text()
    assert all(code in example for code in CODE["sharding"])


def test_every_public_name_is_in_the_api():
    listed = re.findall(r"^::: jspec\.([\w.]+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    names = set(jspec.__all__) - {"helix", "ops", "policies"}
    names |= {f"ops.{name}" for name in set(jspec.ops.__all__) - {"operations"}}
    names |= {f"policies.{name}" for name in set(jspec.policies.__all__) - {"GUIDED", "POLICIES"}}
    assert sorted(listed) == sorted(names)


def test_every_page_is_in_the_navigation():
    listed = re.findall(r": (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_path_that_a_page_names_is_there():
    for page in PAGES:
        for path in re.findall(
            r"`((?:examples|tests|jspec|bench|docs)/[\w/.-]+)`", page.read_text()
        ):
            assert (ROOT / path).exists(), (page.name, path)
