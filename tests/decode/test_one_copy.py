"""No program of decoding holds a second copy of the cache: temporary memory is under 3 % of it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jspec.cache.layout import PagedLayout, layouts_of
from jspec.config import ModelConfig, SamplingParams
from jspec.decode.draft import Chain, Drafter, GuidedDraft, NgramDraft, NoDraft, SuffixDraft
from jspec.decode.prefill import start_decoding
from jspec.decode.prefill_pass import prefill_chunk
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import decode_chunk, speculative_step
from jspec.dispatch import BackendError, Backends
from jspec.models.decoder import Decoder
from jspec.ops.attention.dense import ATTENTION
from jspec.policies import Vegas
from jspec.policies.policy import create_cache
from jspec.policies.prepare import prepare_params

SHARE = 0.03
PLAIN = NoDraft()
CPU = jax.default_backend() == "cpu"
# A cache that is large against all activations; nothing runs, so that it takes no memory. Kernels
# of a GPU keep partial outputs, which all layers share.
SLOTS, LAYERS = 65536, 1 if CPU else 8
GAMMA = 9
CONFIG = ModelConfig.uniform(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=2,
    head_size=128,
    max_context=SLOTS,
)
# On a CPU, XLA turns a whole cache of bfloat16 to float32 for a loop.
DTYPE = jnp.float32 if CPU else jnp.bfloat16
COPIES = {
    "xla": "XLA copies a layer's keys and values at a time: to mask them, and to transpose them",
}
if not CPU:
    COPIES["xla_blocked"] = "XLA transposes the whole cache for its batched products on a GPU"


@pytest.fixture(scope="module")
def model() -> Decoder:
    return made(LAYERS)


def made(layers: int) -> Decoder:
    config = dataclasses.replace(CONFIG, layers=CONFIG.layers[:1] * layers)
    shapes = Decoder(config, dtype=DTYPE, rngs=None)
    return jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), shapes)


def lowered(
    program: str,
    model: Decoder,
    batch: int,
    backends: Backends,
    draft: Drafter = PLAIN,
    blocks: int | None = None,
) -> jax.stages.Lowered:
    """One of the three programs for a state of ``batch`` rows of `SLOTS` slots.

    ``blocks``: of the cache; None: each row has its slots in one piece.
    """
    config, specs = StepConfig(GAMMA, draft, backends), model.config.layers
    models = Models(model, policy=prepare_params(config.cache_policy, model))
    small = start_decoding(models, [[1]] * batch, SamplingParams(max_new_tokens=1), config)
    layouts = layouts_of(specs, SLOTS, GAMMA)
    if blocks is not None:
        layouts = (PagedLayout(SLOTS, blocks),) * len(specs)

    def whole(state):
        cache = create_cache(config.cache_policy, specs, layouts, batch, DTYPE)
        tokens = jnp.zeros((batch, SLOTS), jnp.int32)
        draft_state = draft.init(models, batch, SLOTS, GAMMA)
        return dataclasses.replace(state, cache=cache, tokens=tokens, draft=draft_state)

    state = jax.eval_shape(whole, small)
    if program == "chunk":
        return decode_chunk.lower(models, state, config=config, steps=4)
    if program == "step":
        return speculative_step.lower(models, state, config=config)
    args = (models, state.cache, None, state.tokens, jax.ShapeDtypeStruct((), jnp.int32))
    return prefill_chunk.lower(*args, config=config, size=64)


@pytest.mark.parametrize("program", ["chunk", "step", "prefill"])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("backend", [*ATTENTION.backends, "default"])
def test_no_program_holds_a_second_cache(model, backend, batch, program):
    if backend in COPIES:
        pytest.skip(COPIES[backend])
    named = {} if backend == "default" else {"attention": backend}
    try:
        ready = lowered(program, model, batch, Backends(named))
    except BackendError as error:
        pytest.skip(str(error))
    memory = ready.compile().memory_analysis()
    assert memory is not None
    cache = batch * SLOTS * LAYERS * 2 * 2 * 128 * jnp.dtype(DTYPE).itemsize
    # What is given back lies where it was taken from.
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < SHARE * cache


@pytest.mark.parametrize("draft", [PLAIN, SuffixDraft()], ids=["plain", "suffix"])
def test_blocks_are_written_in_place(model, draft):
    """Of as many positions as two of the four rows."""
    memory = lowered("chunk", model, 4, Backends(), draft, 2 * SLOTS // 128).compile()
    memory = memory.memory_analysis()
    assert memory is not None
    cache = 2 * SLOTS * LAYERS * 2 * 2 * 128 * jnp.dtype(DTYPE).itemsize
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < SHARE * cache


def test_trees_are_packed_in_place(model):
    memory = lowered("chunk", model, 4, Backends(), NgramDraft(branches=8)).compile()
    memory = memory.memory_analysis()
    assert memory is not None
    cache = 4 * SLOTS * LAYERS * 2 * 2 * 128 * jnp.dtype(DTYPE).itemsize
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < SHARE * cache


@pytest.mark.parametrize(
    "draft",
    [
        GuidedDraft(),
        pytest.param(GuidedDraft(Vegas(refresh=4)), marks=pytest.mark.slow),
        pytest.param(Chain(SuffixDraft(), GuidedDraft()), marks=pytest.mark.slow),
    ],
    ids=["vegas", "refreshed", "chain"],
)
def test_guided_drafts_hold_no_second_cache(draft):
    """On a CPU, XLA's scored attention turns the keys and values of one layer at a time."""
    layers, batch = (2, 1) if CPU else (LAYERS, 4)
    ready = lowered("chunk", made(layers), batch, Backends(), draft)
    memory = ready.compile().memory_analysis()
    assert memory is not None
    cache = batch * SLOTS * layers * 2 * 2 * 128 * jnp.dtype(DTYPE).itemsize
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < (1.2 / layers if CPU else SHARE) * cache
