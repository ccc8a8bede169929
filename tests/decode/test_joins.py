"""A drafter and a policy of a user's own join generation and the command by the table alone."""

import itertools
import json
import re

import numpy as np
import pytest

from jspec import cli
from jspec.config import SamplingParams
from jspec.decode import step as step_module
from jspec.decode.draft import DRAFTERS, Chain, NgramDraft, SelfDraft, named_draft
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.policies import POLICIES
from tests.decode.common import prompts, requests
from tests.decode.followers import Followers
from tests.policies.common import NormTopK


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "followers", Followers)
    monkeypatch.setitem(POLICIES, "norms", NormTopK)


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        pytest.param("tiny", "followers:window=3", marks=pytest.mark.exhaustive),
        pytest.param("tiny", "norms:budget=4", marks=pytest.mark.slow),
        pytest.param("sharp", "followers:window=3", marks=pytest.mark.slow),
        ("sharp", "norms:budget=4"),
    ],
)
def test_generation_gives_the_plain_tokens(draft, name, request):
    model = request.getfixturevalue(name)
    plain = generate(model, prompts(), requests(), draft=None)
    got = generate(model, prompts(), requests(), draft=named_draft(draft), gamma=3)
    assert got.tokens == plain.tokens
    assert got.stats.drafted > 40


def test_the_drafter_learns_from_what_was_committed(sharp):
    config = StepConfig(3, Followers())
    state = start_decoding(sharp, prompts(), SamplingParams(max_new_tokens=30), config)
    for row, text in enumerate(prompts()):
        followers = set(itertools.pairwise(text[:-1]))
        known = [(t, int(n)) for t, n in enumerate(state.draft[row]) if n >= 0]
        assert set(known) <= followers
        assert len(known) == len({before for before, _ in followers})
    before = np.asarray(state.draft)
    for _ in range(4):
        state = step_module.speculative_step(sharp, state, config)
    assert (np.asarray(state.draft) != before).any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("draft", ["followers", "norms:budget=64"])
def test_the_command_knows_them(draft, capsys, short_command):
    arguments = ["generate", "--prompt", "def add(a, b):\n", "--max-new-tokens", "6"]
    assert cli.main([*arguments, "--draft", draft, "--gamma", "2", "--compare", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["compare"]["identical"]
    assert result["stats"]["drafted"] > 0


def test_their_settings_are_checked():
    with pytest.raises(ValueError, match=r"'norms' has no setting 'size=3'; it has budget="):
        named_draft("norms:size=3")


# --- the cache is never copied -----------------------------------------------------------------


def cache_sized_copies(model, config, batch: int, capacity: int) -> tuple[list[str], float]:
    """Copies in a compiled step of as many elements as a column of the cache has, and the step's
    temporary memory over the cache's bytes."""
    params = SamplingParams(max_new_tokens=20)
    state = start_decoding(model, [[1, 2, 3]] * batch, params, config, capacity=capacity)
    compiled = step_module.speculative_step.lower(Models(model), state, config).compile()
    (module,) = compiled.runtime_executable().hlo_modules()
    size = state.cache.keys(0).size
    result = [
        line.strip()
        for line in module.to_string().splitlines()
        for shape in re.findall(r"= f32\[([\d,]+)\]\S* copy\(", line)
        if np.prod([int(n) for n in shape.split(",")]) >= size
    ]
    return result, compiled.memory_analysis().temp_size_in_bytes / state.cache.nbytes


def test_a_drafter_that_writes_into_the_cache_costs_no_copy_of_it(tiny):
    copies, temporary = cache_sized_copies(tiny, StepConfig(4, Followers()), 3, 4096)
    assert not copies
    assert temporary < 0.25


def test_verifying_from_the_state_before_would_cost_one(tiny, monkeypatch):
    """What the test above looks for is there where the drafted state is dropped, as in 0.1.0."""

    class Dropped(Followers):
        def draft(self, models, state, gamma):
            return super().draft(models, state, gamma)[0], state

    copies, temporary = cache_sized_copies(tiny, StepConfig(4, Dropped()), 3, 4096)
    assert copies
    assert temporary > 0.9


@pytest.mark.exhaustive
def test_a_policy_as_a_drafter_costs_no_copy_either(tiny):
    draft = Chain(NgramDraft(), SelfDraft(NormTopK()), inner=1, rounds=2)
    copies, _ = cache_sized_copies(tiny, StepConfig(4, draft), 3, 4096)
    assert not copies
