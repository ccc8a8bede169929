"""What compiles, when, and what a compiled step is made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.config import SamplingParams
from jspec.decode import step as step_module
from jspec.decode.chunks import Chunks
from jspec.decode.generation import generate
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk, speculative_step
from jspec.dispatch import Backends
from tests.decode.common import DRAFTERS, LENGTHS, NGRAM, STREAMING, options_of, prompts, requests
from tests.parameters import default_run


def test_switching_gamma_and_limits_compiles_once_for_each_gamma(sharp, compiled):
    speculative_step.clear_cache()
    configs = [StepConfig(gamma, NGRAM) for gamma in (2, 3, 5)]
    state = start_decoding(sharp, prompts(), SamplingParams(max_new_tokens=100), configs[-1])
    for config in configs:
        state = speculative_step(sharp, state, config)
    limits = [jnp.full((8,), limit, jnp.int32) for limit in range(12)]
    first = compiled()
    assert first >= 3
    for round_, limit in enumerate(limits):
        state = dataclasses.replace(state, draft_limits=limit)
        state = speculative_step(sharp, state, configs[round_ % 3])
        assert compiled() == first, f"round {round_} compiled"
    assert speculative_step._cache_size() == 3


def test_other_requests_of_the_same_shapes_compile_nothing(sharp, compiled):
    """Settings, seeds, limits, draft limits and prompts are traced."""

    def run(seed: int, temperature: float, lengths, new: int):
        params = [
            SamplingParams(
                max_new_tokens=new,
                temperature=temperature + row % 2,
                top_k=row,
                seed=seed + row,
                draft_limit=(seed + row) % 4,
                stop_tokens=(seed,),
            )
            for row in range(4)
        ]
        return generate(sharp, prompts(lengths, seed=seed), params, draft=STREAMING)

    assert run(1, 0.5, (40, 2, 9, 3), 20).stats.compile_s >= 0
    first = compiled()
    assert first > 0
    again = run(2, 1.5, (5, 33, 60, 1), 30)
    assert compiled() == first
    assert again.stats.compile_s == 0


def test_ending_a_row_by_hand_compiles_nothing(sharp, compiled):
    """The caller's end goes back into the state, which must stay the same to the program."""

    def run(end: int):
        def on_tokens(row, tokens):
            return row == end

        return generate(sharp, prompts(), requests(), draft=STREAMING, on_tokens=on_tokens)

    run(0)
    first = compiled()
    assert run(3).finished[3] == "stop"
    assert compiled() == first


def primitives(jaxpr) -> set[str]:
    """Names of all primitives in a jaxpr, inner ones included."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    names |= primitives(inner)
    return names


@pytest.mark.parametrize("source", default_run(list(DRAFTERS), "plain", "model", "streaming"))
def test_a_step_is_one_program_without_the_host(source, tiny, other, monkeypatch):
    monkeypatch.setattr(step_module, "_may_branch", lambda *_: False)  # as on a GPU
    gamma = 0 if source == "plain" else 4
    config = StepConfig(gamma, DRAFTERS[source], Backends(attention="xla"))
    models = Models(tiny, other if source == "model" else None)
    params = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=3)
    state = start_decoding(models, [[1, 2, 3]], params, config)
    assert state.mode == "filtered"

    traced = speculative_step.trace(models, state, config)
    names = primitives(traced.jaxpr.jaxpr)
    assert "dot_general" in names
    assert not {name for name in names if "callback" in name}
    # A condition or a loop of unknown length would make a GPU wait for the host.
    assert not names & {"cond", "while"}

    executable = traced.lower().compile().runtime_executable()
    (module,) = executable.hlo_modules()
    text = module.to_string()
    assert "dot" in text
    for host in ("callback", "infeed", "outfeed", " send(", " recv("):
        assert host not in text


def test_the_step_takes_its_state(tiny):
    """The state is donated: its buffers serve the next one, and the old one is gone."""
    config = StepConfig(2, NGRAM)
    state = start_decoding(tiny, [[1, 2, 3]], SamplingParams(max_new_tokens=8), config)
    speculative_step(tiny, state, config)
    assert state.cache.keys(0).is_deleted()


@pytest.mark.parametrize("source", default_run(["streaming", "model"], "streaming"))
def test_a_chunk_is_its_steps(source, sharp, other):
    """A chunk of 5 steps and 5 single steps end in the same state."""
    config = StepConfig(3, DRAFTERS[source])
    models = Models(sharp, other if source == "model" else None)
    chunk = start_decoding(models, prompts(), requests(), config)
    chunk, record = decode_chunk(models, chunk, config, 5)
    single = start_decoding(models, prompts(), requests(), config)
    for _ in range(5):
        single = speculative_step(models, single, config)
    assert record.tokens.shape == (5, 8, 4)
    assert (record.done[-1] == single.done).all()
    assert record.done[0].sum() < record.done[-1].sum() < 8  # rows end on the way
    assert (chunk.tokens == single.tokens).all()
    assert (chunk.lengths == single.lengths).all()
    assert (chunk.lengths - record.committed.sum(axis=0)).tolist() == list(LENGTHS)


def test_a_chunk_is_read_in_one_copy(sharp, monkeypatch):
    """All that the host takes of a chunk is one array, with the same fields there as here."""
    options = options_of(sharp, draft=STREAMING, gamma=3, steps_per_chunk=5)
    state = start_decoding(sharp, prompts(), requests(), options.config)
    read, right = [], jax.device_get

    def device_get(tree):
        read.append(tree)
        return right(tree)

    monkeypatch.setattr(jax, "device_get", device_get)
    chunks = Chunks(options, len(state.done))
    _, chunk = chunks.start(state, np.full(len(state.done), 8))
    record = chunks.finish(chunk)
    (on_device,) = read
    assert len(jax.tree.leaves(on_device)) == 1
    for name in ("drafted", "accepted", "committed", "tokens", "done"):
        field = getattr(record, name)
        assert isinstance(field, np.ndarray)
        np.testing.assert_array_equal(field, getattr(on_device, name))
    assert (record.committed == (record.tokens >= 0).sum(axis=2)).all()
    assert (record.accepted <= record.drafted).all()
    assert record.accepted.sum() > 10
    # A row that is done commits nothing, and stays so.
    assert (record.committed[1:][record.done[:-1]] == 0).all()
    assert (record.committed[0] > 0).all()
    assert record.done[-1].any()
