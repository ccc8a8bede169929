"""On a CPU a step in which no row drafted passes one token."""

import jax
import pytest

from jspec.config import SamplingParams
from jspec.decode import step as step_module
from jspec.decode.draft import NoDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from tests.decode.common import DRAFTERS, NGRAM, prompts
from tests.parameters import default_run

STEPS = 12


def passes(
    model, config: StepConfig, texts, monkeypatch, **settings
) -> tuple[list[int], list[bool]]:
    """Tokens of the pass of each of `STEPS` steps, and whether a row drafted."""
    widths, right = [], step_module.run_target

    def run_target(models, state, drafted, config):
        jax.debug.callback(lambda: widths.append(config.gamma + 1), ordered=True)
        return right(models, state, drafted, config)

    monkeypatch.setattr(step_module, "run_target", run_target)
    settings |= {"max_new_tokens": 64, "temperature": 1.0}
    params = [SamplingParams(seed=row, **settings) for row in range(len(texts))]
    state = start_decoding(model, texts, params, config, capacity=256)
    run = jax.jit(lambda models, state: step_module.decode_step(models, state, config))
    drafted = []
    for _ in range(STEPS):
        state, record = run(Models(model), state)
        drafted.append(bool(record.drafted.any()))
    jax.effects_barrier()
    return widths, drafted


@pytest.mark.parametrize("rows", default_run([1, 3], "3"))
def test_a_step_without_a_draft_passes_one_token(rows, tiny, monkeypatch):
    widths, drafted = passes(tiny, StepConfig(4, NGRAM), prompts()[1 : rows + 1], monkeypatch)
    assert widths == [5 if any_drafted else 1 for any_drafted in drafted]
    assert {1, 5} == set(widths)


@pytest.mark.parametrize("name", ["padded", "streaming"])
def test_other_passes_have_one_width(name, tiny, monkeypatch):
    """Those without a drafter have the shape of verification, and drafts with logits are drawn from
    numbers of their own."""
    draft = NoDraft() if name == "padded" else DRAFTERS[name]
    widths, _ = passes(tiny, StepConfig(4, draft), prompts()[:1], monkeypatch, draft_limit=0)
    assert widths == [5] * STEPS


def test_a_gpu_takes_one_width(tiny, monkeypatch):
    config = StepConfig(4, NGRAM)
    assert step_module._may_branch(config, Models(tiny))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not step_module._may_branch(config, Models(tiny))
