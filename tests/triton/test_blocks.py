"""An engine with its cache in blocks, by the Triton kernels: interpreted, and lowered for CUDA."""

import dataclasses

import jax
import jax.numpy as jnp

import jspec
from jspec.cache import PagedLayout
from jspec.config import SamplingParams
from jspec.decode.draft import GuidedDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk
from jspec.dispatch import Backends
from jspec.policies import Vegas
from jspec.policies.policy import create_cache
from jspec.triton import append, attention, gathered
from tests.conftest import ONE_LAYER, make_decoder
from tests.decode.common import prompts
from tests.triton.lowering import lower

VEGAS = GuidedDraft(Vegas(budget=8, least=0))
NAMES = ("attention", "scored_attention", "gathered_attention", "rotate_and_append")
TRITON = dict.fromkeys(NAMES, "triton")


def allow(monkeypatch) -> None:
    """Triton's backends run where there is no GPU."""
    for module in (attention, append):
        monkeypatch.setattr(module, "refuses_triton", lambda *keys: None)


def test_a_request_gets_what_it_gets_by_xla_in_the_interpreter(interpreted, monkeypatch):
    """Over the end of a block, and in the blocks of an earlier request."""

    def call(kernel, *arrays, out, **settings):
        def run(*arrays):
            return tuple(interpreted(kernel, *arrays, out=out, **settings))

        return jax.pure_callback(run, tuple(out), *arrays)

    allow(monkeypatch)
    for module in (attention, append, gathered):
        monkeypatch.setattr(module, "triton_call", call)
    model, texts = make_decoder(ONE_LAYER, seed=1, embedding=400.0, head=4.0), prompts((125, 9, 4))
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    sizes = {"slots": 2, "capacity": 140, "cache_blocks": 3, "prefill_chunk": 128}
    engine = jspec.Engine(model, **sizes, draft=VEGAS, gamma=2, steps_per_chunk=2, backends=TRITON)
    got = [engine.submit(text, params) for text in texts]
    engine.run()
    expected = jspec.generate(model, texts, params, draft=None).tokens
    assert tuple(request.tokens for request in got) == expected


def test_a_step_is_as_many_launches_as_over_rows_in_one_piece(monkeypatch):
    """And takes Triton for attention, also over a selection, and for the append."""
    allow(monkeypatch)
    model = make_decoder(ONE_LAYER)
    others = dict.fromkeys(("select", "verify_greedy", "verify_and_commit"), "xla")
    models, config = Models(model), StepConfig(2, VEGAS, Backends(TRITON | others))
    one = start_decoding(models, [[1]] * 2, SamplingParams(max_new_tokens=1), config, capacity=512)
    layouts = [PagedLayout(512, 7)]
    cache = create_cache(config.cache_policy, model.config.layers, layouts, 2, jnp.float32)
    paged = dataclasses.replace(one, cache=cache.with_lengths(one.cache.lengths))

    def launches(state) -> int:
        text = lower(lambda state: decode_chunk(models, state, config, 1), state)
        return text.count("@triton_kernel_call_ffi")

    assert launches(paged) == launches(one) > 4
