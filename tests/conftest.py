"""The ground every test stands on: eight virtual CPU devices, strict promotion, tiny models."""

# ruff: noqa: E402 - JAX reads its environment when it is imported

import copy
import dataclasses
import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Workers share what they compile, and the next run finds it.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# Compiling is most of what tests do on a CPU, and no optimisation changes a whole number. `.ci/run`
# runs the tests of floats and of copies a second time, with all of XLA's optimisations.
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
JAX_0_10 = version("jax").startswith("0.10.")
_FLAGS = os.environ.get("XLA_FLAGS", "")
# The workers are as many as the cores: one module a program compiles in less time than many.
_TEST_FLAGS = ["xla_force_host_platform_device_count=8", "xla_cpu_parallel_codegen_split_count=1"]
# The code of fusion emitters takes longer to compile. Each jaxlib knows one way to do without.
if JAX_0_10:
    _TEST_FLAGS.append("xla_cpu_use_fusion_emitters=false")
elif os.environ.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1":
    _TEST_FLAGS.append("xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters")
for _flag in _TEST_FLAGS:
    if _flag.partition("=")[0] not in _FLAGS:
        _FLAGS += f" --{_flag}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax._src.interpreters import mlir

import jspec
from jspec.config import ModelConfig
from jspec.decode import options
from jspec.decode.programs import PROGRAMS
from jspec.models import checkpoint
from jspec.models.bundled import bundled_path
from jspec.models.decoder import Decoder

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# On a GPU too, where float32 products are TF32 by default.
jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

MAPS = Path("/proc/self/maps")
USUAL_GAMMA = options.usual_gamma
TRACED_AGAIN = ("jspec", "bench", "examples", "tests")  # packages whose functions tests replace

TINY = ModelConfig.uniform(
    vocab_size=41,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_context=512,
)
# Decoding compiles in three quarters of the time; `TINY` is for what differs between layers.
ONE_LAYER = dataclasses.replace(TINY, layers=TINY.layers[:1])
# Of the tokens that the bundled tokenizer has.
OF_BYTES = ModelConfig.uniform(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_context=1024,
)


def make_decoder(
    config: ModelConfig = TINY, *, seed: int = 0, embedding: float = 1.0, head: float = 1.0
) -> Decoder:
    """A decoder with random weights, its embedding and its logits scaled.

    A large embedding drowns what the layers add: the text then follows from its last token, runs in
    circles, and is easy to draft.
    """
    model = Decoder(config, rngs=nnx.Rngs(seed))
    model.embedding[...] = model.embedding[...] * jnp.float32(embedding)
    assert model.head is not None
    model.head.kernel[...] = model.head.kernel[...] * jnp.float32(head)
    return model


def first_layers(count: int) -> Decoder:
    """The bundled model's first ``count`` layers of eight: they write text, and compile sooner.

    In float32 on a GPU too, where passes over several tokens round otherwise than those over one.
    """
    model, _ = jspec.load_bundled(dtype="float32")
    model.config = dataclasses.replace(model.config, layers=model.config.layers[:count])
    model.layers = nnx.List(list(model.layers)[:count])
    return model


def pytest_collection_finish():
    """Modules and tests stay to the end: the collector, which tracing keeps busy, need not look."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _clear_programs():
    """Clear what jspec and the tests compiled, but not the operations that they call eagerly.

    A test may have replaced what a function calls while it is traced. Programs also take memory
    maps, of which Linux gives a process 65,530.
    """
    yield
    PROGRAMS.clear()
    modules = [module for name, module in sys.modules.items() if name.startswith(TRACED_AGAIN)]
    for value in (value for module in modules for value in vars(module).values()):
        if hasattr(type(value), "clear_cache"):  # a jitted function
            value.clear_cache()
    if not MAPS.exists() or MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()  # what is left stays: looking at it again after each module took 8 % of the time


@pytest.fixture(scope="module", autouse=JAX_0_10)
def _lower_in_one_context():
    """Lower all programs of a module in one MLIR context. JAX 0.10 makes one for each, in a quarter
    of the time that a small program takes; later ones reuse theirs."""
    context = mlir.make_ir_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlir, "make_ir_context", lambda: context)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_usual_gamma():
    """Decode with one gamma where a test names none: a chosen one compiles several programs.

    `tests.decode.test_default_gamma` is about the choice.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "usual_gamma", lambda draft: (draft.traits.default_gamma, None))
        yield


@pytest.fixture(scope="session")
def tiny() -> Decoder:
    """One layer of random weights: its text wanders, and drafts are often rejected."""
    return make_decoder(ONE_LAYER, seed=3)


@pytest.fixture(scope="session")
def sharp() -> Decoder:
    """The same shape, but its text repeats itself, and most of its drafts are accepted."""
    return make_decoder(ONE_LAYER, seed=1, embedding=400.0, head=4.0)


@pytest.fixture(scope="session")
def other() -> Decoder:
    """A second model of the same shape that agrees with `tiny` and `sharp` by chance only."""
    return make_decoder(ONE_LAYER, seed=2)


@pytest.fixture(scope="session")
def short_bundled() -> Decoder:
    return first_layers(1)


@pytest.fixture
def short_command(monkeypatch, short_bundled):
    """`jspec generate` takes `short_bundled` where no model is named."""
    right = checkpoint.load_model

    def load_model(path, **settings):
        # The command gives its model another context, which the next test must not see.
        return copy.copy(short_bundled) if path == bundled_path() else right(path, **settings)

    monkeypatch.setattr("jspec.cli.generate.load_model", load_model)


@pytest.fixture
def small_bundled(monkeypatch):
    """A model of random weights for the bundled one, which takes longer to compile."""
    _, tokenizer = jspec.load_bundled()
    monkeypatch.setattr(jspec, "load_bundled", lambda: (make_decoder(OF_BYTES), tokenizer))
