"""Where exact decoding is refused, and with which reason. What it computes: tests/triton."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jspec
from jspec import helix
from jspec.cache import LinearLayout, RingLayout
from jspec.cache.layout import layouts_of
from jspec.config import LayerSpec
from jspec.decode import checks, options
from jspec.decode.checks import check_exact
from jspec.decode.prefill import start_decoding
from jspec.decode.settings import EXACT_BACKENDS, StepConfig
from jspec.dispatch import BackendError, Backends
from jspec.parts import Experts
from jspec.policies import Dense, HataOff, Quest
from tests.decode.common import options_of
from tests.decode.test_refusals import Handmade, Shape

EXACTLY = StepConfig(0, jspec.NoDraft(), exact="bits")
PLAINLY = StepConfig(0, jspec.NoDraft())
LARGE_HEADS = LayerSpec(kv_heads=2, key_size=16, value_size=320)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU refuses nothing here")
@pytest.mark.parametrize(
    "run",
    [
        lambda model: jspec.generate(model, [[1, 2]], draft=None, exact="bits"),
        lambda model: jspec.Engine(model, slots=1, capacity=64, exact="bits"),
        lambda model: jspec.score_tokens(model, [[1, 2]], exact="bits"),
        lambda model: start_decoding(model, [[1, 2]], config=EXACTLY),
        lambda model: jspec.LLM(
            model, tokenizer=jspec.load_bundled()[1], draft=None, exact="bits"
        ).generate("x"),
    ],
    ids=["generate", "engine", "score", "start_decoding", "llm"],
)
def test_without_a_gpu_it_is_refused_when_it_is_asked_for(run, tiny):
    with pytest.raises(BackendError, match=r'exact="bits" cannot serve .*: Triton needs an NVIDIA'):
        run(tiny)


@pytest.fixture
def with_a_gpu(monkeypatch):
    """As if there were one that runs Triton."""
    monkeypatch.setattr(checks, "refuses_triton", lambda: None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experts": Experts(4, 2, 8)}, "tiles of a mixture of experts follow its routing"),
        ({"centered_norms": True}, "norms scale by 1 \\+ scale"),
        ({"post_norms": True}, "norms after attention and MLP"),
        ({"residual_scale": 0.5}, "XLA scales what its layers add"),
        ({"qk_norm": True, "joint_qk_norm": True}, "the norm of all its heads together"),
        ({"activation": "gelu_tanh"}, "computes its activation gelu_tanh"),
        ({"sinks": True}, "the sigmoid of its sinks"),
        ({"logit_softcap": 30.0}, "the soft cap of its logits"),
        ({"layers": (LARGE_HEADS, LARGE_HEADS)}, "heads of 320 channels are over 256"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_model_that_xla_has_a_part_in_is_refused(changes, reason, tiny, with_a_gpu):
    model = copy.copy(tiny)
    model.config = dataclasses.replace(tiny.config, **changes)
    with pytest.raises(BackendError, match=reason):
        check_exact(model, Dense(), "bits")
    check_exact(tiny, Dense(), "bits")


def test_latent_attention_is_refused(tiny, with_a_gpu):
    config = copy.copy(tiny.config)
    object.__setattr__(config, "latent", object())  # one that fits takes other layers
    model = copy.copy(tiny)
    model.config = config
    with pytest.raises(BackendError, match="products of latent attention"):
        check_exact(model, Dense(), "bits")


def test_other_models_meshes_and_memories_are_refused(tiny, with_a_gpu):
    with pytest.raises(BackendError, match=r"Handmade is no jspec\.Decoder"):
        check_exact(Handmade(Shape()), Dense(), "bits")
    with pytest.raises(BackendError, match=r"HataOff\(.* keeps keys in the host's memory"):
        check_exact(tiny, HataOff(dense_layers=0), "bits")
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    copies = jax.device_put(tiny, NamedSharding(mesh, PartitionSpec()))
    with pytest.raises(BackendError, match="XLA sums over the devices of its mesh in an order of"):
        check_exact(copies, Dense(), "bits")
    whole = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn), tiny)
    with pytest.raises(BackendError, match="float8_e4m3fn are none of bfloat16"):
        check_exact(whole, Dense(), "bits")


def test_a_model_without_weights_is_judged_by_their_shapes(tiny, with_a_gpu):
    check_exact(jspec.Decoder(tiny.config, dtype=jnp.bfloat16, rngs=None), Dense(), "bits")
    with pytest.raises(BackendError, match="float8_e4m3fn are none of bfloat16"):
        check_exact(jspec.Decoder(tiny.config, dtype=jnp.float8_e4m3fn, rngs=None), Dense(), "bits")


def test_settings_that_do_not_go_with_it_are_named():
    for exact in (True, False, "yes"):
        with pytest.raises(
            ValueError, match=f'exact={exact!r} must be "tokens" .*, "bits" .* or None'
        ):
            StepConfig(exact=exact)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'target=Quest\(.* exact="bits" needs target=Dense\(\)'):
        StepConfig(0, jspec.NoDraft(), target=Quest(), exact="bits")
    named = Backends(attention="xla", linear="xla", linear_chain="xla", sample="xla")
    chosen = "chooses the backends of attention, linear, linear_chain; leave them"
    with pytest.raises(ValueError, match=chosen):
        StepConfig(backends=named, exact="bits")
    config = StepConfig(backends=Backends(sample="xla"), exact="bits")
    assert config.of_verification == Backends({**EXACT_BACKENDS["bits"], "sample": "xla"})
    assert config.of_prefill == config.of_verification
    assert StepConfig(backends=named).of_verification == named


def test_a_window_keeps_its_keys_in_the_order_of_positions():
    spec = LayerSpec(kv_heads=1, key_size=8, value_size=8, window=20)
    assert layouts_of([spec], 64, 3) == (RingLayout(24),)
    assert layouts_of([spec], 64, 3, rings=False) == (LinearLayout(64),)


@pytest.mark.parametrize(
    "run",
    [
        jspec.speculative_step,
        lambda model, state, config: jspec.decode_chunk(model, state, config, 2),
        lambda model, state, config: jspec.fill_slot(model, state, 0, [1, 2], config=config),
        jspec.convert_state,
        lambda model, state, config: jspec.generate(
            model, [[1, 2]], draft=None, exact=config.exact, prefilled=state
        ),
    ],
    ids=["step", "chunk", "fill_slot", "convert_state", "generate"],
)
def test_a_state_of_an_ordinary_prefill_takes_no_exact_steps(run, tiny, with_a_gpu):
    state = start_decoding(tiny, [[1, 2]], config=PLAINLY)
    with pytest.raises(ValueError, match="exact=None has no steps with exact='bits'; give start"):
        run(tiny, state, EXACTLY)
    run(tiny, state, PLAINLY)


def test_an_exact_state_takes_ordinary_steps_once_converted(tiny):
    state = dataclasses.replace(start_decoding(tiny, [[1, 2]], config=PLAINLY), exact="bits")
    with pytest.raises(
        ValueError, match=r"exact='bits' has no steps .*through jspec\.convert_state"
    ):
        jspec.speculative_step(tiny, state, PLAINLY)
    converted = jspec.convert_state(tiny, state, PLAINLY)
    assert converted.exact is None
    assert not jspec.speculative_step(tiny, converted, PLAINLY).exact


def test_a_default_level_serves_what_it_can(tiny, with_a_gpu, monkeypatch):
    """Today there is none."""

    def level(model=tiny, **settings):
        return options_of(model, **settings).config.exact

    assert level() is None
    monkeypatch.setattr(options, "DEFAULT_EXACT", "tokens")
    assert (level(), level(exact=None), level(exact="bits")) == ("tokens", None, "bits")
    assert level(draft=jspec.NgramDraft(branches=2)) is None
    assert level(target=Quest()) is None
    assert level(backends=Backends(attention="xla")) is None
    assert level(backends=Backends(sample="xla")) == "tokens"
    assert level(helix.shard(tiny, helix.HelixConfig(kvp=2))) is None
    engine = jspec.Engine(tiny, slots=1, capacity=128, cache_blocks=1, draft=None)
    assert engine._options.config.exact is None


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU refuses nothing here")
def test_the_command_says_so(capsys, short_command):
    from jspec.cli import main

    assert main(["generate", "--prompt", "x", "--exact", "bits"]) == 2
    assert (
        'exact="bits" cannot serve this request: Triton needs an NVIDIA' in capsys.readouterr().err
    )
