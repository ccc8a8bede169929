"""Whole steps on a KVP x TPA mesh: the tokens of one device, and nothing large is gathered."""

import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jspec
from jspec import helix, policies
from jspec.config import ModelConfig
from jspec.decode.draft import Drafter
from jspec.helix.mesh import STRATEGIES
from jspec.helix.sharded import decoder_spec
from jspec.models.decoder import Decoder
from jspec.policies.prepare import prepare_params
from jspec.policies.scores import SLOTS_PER_PICK
from tests.decode.common import NGRAM, STREAMING, prompts
from tests.models.goldens import GOLDEN
from tests.parameters import default_run

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
CONFIG = ModelConfig.uniform(
    vocab_size=2048,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=8,
    num_kv_heads=2,
    head_size=16,
    qk_norm=True,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
)
SPARSE: dict[str, Any] = {"budget": 8, "sinks": 1, "recent": 2, "dense_layers": 0}
DRAFTERS: dict[str, Drafter] = {
    "plain": jspec.NoDraft(),
    "ngram": NGRAM,
    "suffix": jspec.SuffixDraft(),
    "streaming": STREAMING,
    "exact": jspec.SelfDraft(jspec.policies.ExactTopK(**SPARSE)),
    "hata": jspec.SelfDraft(jspec.policies.Hata(bits=64, **SPARSE)),
    "vegas": jspec.GuidedDraft(jspec.policies.Vegas(budget=8, least=0)),
    "refreshed": jspec.GuidedDraft(jspec.policies.Vegas(budget=8, least=0, refresh=1)),
    "ahead": jspec.GuidedDraft(jspec.policies.Vegas(budget=8, least=0, score="softmax", ahead=3)),
    "sparsespec": jspec.GuidedDraft(jspec.policies.SparseSpec(budget=8, least=0)),
}
ON_EVERY_MESH = tuple(DRAFTERS)
DRAFTERS |= {
    "accepted": jspec.GuidedDraft(jspec.policies.Vegas(budget=8, least=0, collect="accepted")),
    "last": jspec.GuidedDraft(
        jspec.policies.Vegas(budget=8, least=0, collect="last", score="weight")
    ),
}
DRAFTERS |= {
    f"{first}-{second}": jspec.Chain(drafter, DRAFTERS[second], inner=2, rounds=2)
    for first, second, drafter in (
        ("ngram", "vegas", NGRAM),
        ("suffix", "hata", jspec.SuffixDraft(min_match=1)),
        ("streaming", "exact", STREAMING),
    )
}
NONE = jspec.Backends()
WINDOW = jspec.SelfDraft(policies.Streaming(positions="window"))
LENGTHS = (40, 1, 17, 6)  # blocks of 4 end before, in and after a group of 4
GREEDY, SAMPLED, FILTERED = {}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.9}
MIXED, DRAWN = (GREEDY, SAMPLED), (SAMPLED, FILTERED)  # that rows take in turn
MESHES = ((1, 2), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1))  # all that 2 key-value heads go with
TEXTS = prompts(LENGTHS, vocabulary=40)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, rngs=nnx.Rngs(0))


def decoded(
    model, draft: Drafter, *modes: dict, gamma: int = 3, backends: Mapping[str, str] = NONE
) -> tuple[list[list[int]], str]:
    """Tokens of the rows, which take ``modes`` in turn, and the program that a chunk is."""
    rows = enumerate(itertools.islice(itertools.cycle(modes), len(TEXTS)))
    params = [jspec.SamplingParams(max_new_tokens=16, seed=i, **mode) for i, mode in rows]
    config = jspec.StepConfig(0 if isinstance(draft, jspec.NoDraft) else gamma, draft, backends)
    arrays = prepare_params(config.cache_policy, model)
    models = jspec.Models(model, policy=arrays)
    state = jspec.start_decoding(models, TEXTS, params, config, capacity=256)
    program = jspec.decode_chunk.lower(models, state, config, 4).compile()
    where = jax.tree.map(lambda x: x.sharding, state)
    while not bool(state.done.all()):
        state, _ = program(models, state)
        # Arrays elsewhere than before would compile the chunk a second time.
        stay = jax.tree.map(lambda x, old: x.sharding.is_equivalent_to(old, x.ndim), state, where)
        assert all(jax.tree.leaves(stay))
    return [row[row >= 0].tolist() for row in np.asarray(state.tokens)], str(program.as_text())


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    """Greedy tokens of one device, which no drafter changes."""
    return decoded(model, DRAFTERS["plain"], GREEDY)[0]


@pytest.fixture(scope="module")
def on_one(model) -> Callable[[str, tuple[dict, ...]], list[list[int]]]:
    """Tokens of one device with a drafter, on which those that are sampled depend."""
    cached: dict[tuple[str, bool], list[list[int]]] = {}

    def of(name: str, modes: tuple[dict, ...]) -> list[list[int]]:
        key = name, modes is MIXED
        if key not in cached:
            cached[key] = decoded(model, DRAFTERS[name], *modes)[0]
        return cached[key]

    return of


def gathered(program: str, operation: str = "all-gather") -> list[int]:
    """How many numbers each all-gather, or other operation, of a compiled program gives."""
    results = re.findall(rf"= ([^=]*?) {operation}(?:-start)?\(", program)
    shapes = [shape for result in results for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]


# Collectives by which devices select together, in a layer of a step: the all-gather of the best of
# each device. Vegas also adds up scores over heads; ``ahead`` also sums exponentials and moves the
# last scores of blocks.
SELECTING = {"streaming": 0, "exact": 1, "hata": 1, "vegas": 2, "ahead": 4}
SELECTING |= {"sparsespec": 1, "accepted": 2, "last": 2}


def selecting(program: str) -> list[str]:
    """The collectives of a compiled program by which devices select positions."""
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    lines = re.findall(rf"= \S+ (?:{kinds})(?:-start)?\(.*", program)
    return [line for line in lines if "/selection/" in line]


def check(model, name: str, kvp: int, tpa: int, right: list[list[int]], *modes: dict) -> None:
    sharded = helix.shard(model, helix.HelixConfig(kvp=kvp, tpa=tpa, block=4))
    tokens, program = decoded(sharded, DRAFTERS[name], *modes)
    assert tokens == right
    # A device has 2048 / N of the vocabulary for each of 16 positions, and more of the cache.
    assert "all-reduce" in program
    limit = 2048 // (kvp * tpa) - 1
    if SAMPLED in modes:  # numbers of the first and the last tile of each position and device
        limit = max(limit, 2 * 16 * kvp * tpa)
    name = name.split("-")[-1]  # of a chain, the drafter that selects
    if name in SELECTING or name == "refreshed":
        # XLA joins those of a GPU; a refresh has as many more.
        if kvp > 1 and jax.default_backend() == "cpu" and name in SELECTING:
            assert len(selecting(program)) == SELECTING[name], selecting(program)
        candidates = len(TEXTS) * CONFIG.layers[0].kv_heads // tpa * SPARSE["budget"]
        # Their scores and positions, or all scores where these are few.
        limit = max(limit, SLOTS_PER_PICK * kvp * candidates)
        # Weights are relative to the log-sum-exp of each head and token.
        limit = max(limit, kvp * len(TEXTS) * 4 * CONFIG.num_heads // tpa)
    assert all(size <= limit for size in gathered(program)), gathered(program)


@pytest.mark.parametrize(
    ("name", "kvp", "tpa"),
    default_run([("ngram", 4, 1), ("ahead", 4, 2), ("vegas", 2, 2)]),
    ids=str,
)
def test_greedy_tokens_are_those_of_one_device(name, kvp, tpa, model, alone):
    check(model, name, kvp, tpa, alone, GREEDY)


def test_drafts_are_those_of_one_device(model):
    """They are accepted as often: each device reads its own part of what verification picked."""
    sharded = helix.shard(model, helix.HelixConfig(kvp=2, block=4))
    params = jspec.SamplingParams(max_new_tokens=16)
    settings = {"draft": DRAFTERS["vegas"], "gamma": 3}
    alone, on_mesh = (jspec.generate(x, TEXTS, params, **settings) for x in (model, sharded))
    assert on_mesh.steps == alone.steps
    assert sum(alone.steps) < sum(map(len, alone.tokens))


@pytest.mark.slow
@pytest.mark.parametrize(("kvp", "tpa"), MESHES, ids=str)
@pytest.mark.parametrize("name", ON_EVERY_MESH)
def test_greedy_tokens_on_more_meshes(name, kvp, tpa, model, alone):
    check(model, name, kvp, tpa, alone, GREEDY)


# Each drafter and each mesh. A draft of HATA is drawn from logits, and verified by them.
FIRST = (("ngram", 1, 2), ("hata", 2, 2), ("ngram-vegas", 2, 2))
MORE = (
    *(("plain", 2, 1), ("suffix", 8, 1), ("streaming", 4, 2), ("exact", 4, 1), ("vegas", 2, 1)),
    *(("sparsespec", 8, 1), ("accepted", 2, 2), ("last", 4, 1)),
    *(("refreshed", 4, 1), ("ahead", 8, 1), ("suffix-hata", 4, 1), ("streaming-exact", 4, 2)),
)


@pytest.mark.parametrize(
    ("name", "kvp", "tpa"),
    [
        *default_run(FIRST, "ngram-1-2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE),
    ],
    ids=str,
)
def test_greedy_and_sampled_rows_have_the_tokens_of_one_device(
    name, kvp, tpa, model, alone, on_one
):
    right = on_one(name, MIXED)
    assert right[::2] == alone[::2]
    assert right[1::2] != alone[1::2]
    if name in ("ngram", "suffix"):  # one-hot drafts
        assert right == on_one("plain", MIXED)
    check(model, name, kvp, tpa, right, *MIXED)


@pytest.mark.slow
@pytest.mark.parametrize(("kvp", "tpa"), MESHES, ids=str)
@pytest.mark.parametrize("name", ON_EVERY_MESH)
def test_sampled_tokens_are_those_of_one_device(name, kvp, tpa, model, on_one):
    """Every other row draws from what a filter leaves."""
    check(model, name, kvp, tpa, on_one(name, DRAWN), *DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_what_helix_is_compared_with_has_the_same_tokens(strategy, model, alone):
    config = helix.HelixConfig(kvp=2, tpa=2, block=4, strategy=strategy)
    assert decoded(helix.shard(model, config), NGRAM, GREEDY)[0] == alone


def one_sided_calls(program: str) -> int:
    """The one-sided messages of a program, each of which follows from the one before it.

    So no device runs them in another order, or two at once, whatever XLA may overlap.
    """
    count = 0
    for computation in program.split("\n}\n"):
        follows: dict[str, set[str]] = {}  # the messages that each value follows from
        last = None
        for name, text in re.findall(r"^ +(?:ROOT )?%(\S+) = (.*)", computation, re.MULTILINE):
            reads = re.findall(r"%([\w.-]+)", text.partition("metadata=")[0])
            follows[name] = set().union(*(follows.get(x, set()) for x in reads))
            if re.search('custom_call_target="jspec_(exchange|all_)', text):
                assert last is None or last in follows[name], (last, name)
                follows[name].add(name)
                last, count = name, count + 1
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "calls"),
    [
        ({"kvp": 4, "tpa": 2}, 3),  # of a layer: attention, and a sum after each of its halves
        ({"kvp": 2, "tpa": 2, "strategy": "tp"}, 2),
        ({"tpa": 2}, 2),
    ],
    ids=str,
)
def test_one_sided_messages_have_the_same_tokens(mesh, calls, model, alone):
    config = helix.HelixConfig(block=4, exchange="cuda", **mesh)
    if reason := config.refuses_all_to_all():
        pytest.skip(reason)
    tokens, program = decoded(helix.shard(model, config), NGRAM, GREEDY)
    assert tokens == alone
    assert one_sided_calls(program) == calls


@pytest.mark.parametrize(
    "mesh", default_run([{"kvp": 2}, {"kvp": 2, "tpa": 2}, {"tpa": 2}], "{'kvp': 2}"), ids=str
)
def test_the_sums_of_a_layer_are_part_of_its_chain(mesh):
    """With the bits of separate calls, of which none is left."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "out_bias": False}
    config = ModelConfig.uniform(
        **sizes, vocab_size=2048, num_heads=8, num_kv_heads=2, head_size=16, qk_norm=True
    )
    model = Decoder(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    on_mesh = helix.HelixConfig(block=4, exchange="cuda", **mesh)
    if reason := on_mesh.refuses_all_to_all():
        pytest.skip(reason)
    results = []
    for named in ({}, {"linear_chain": "one_by_one"}):
        backends = jspec.Backends.prefer("cuda", named)
        sharded = helix.shard(model, on_mesh)
        results.append(decoded(sharded, DRAFTERS["plain"], GREEDY, backends=backends))
    (tokens, program), (apart_tokens, apart) = results
    assert tokens == apart_tokens
    calls = [x.count('custom_call_target="jspec_all_reduce"') for x in (program, apart)]
    assert calls == [0, 4]
    assert program.count('custom_call_target="jspec_linear_chain"') == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vegas", "exact"])
def test_a_cache_of_8_bits_has_the_tokens_of_one_device(name, model):
    params = [jspec.SamplingParams(max_new_tokens=16, seed=i, **MIXED[i % 2]) for i in range(4)]
    sharded = helix.shard(model, helix.HelixConfig(kvp=2, tpa=2, block=4))
    eight, alone, wide = (
        jspec.generate(m, TEXTS, params, draft=DRAFTERS[name], gamma=3, cache_dtype=dtype).tokens
        for m, dtype in ((sharded, "float8_e4m3fn"), (model, "float8_e4m3fn"), (model, None))
    )
    assert eight == alone
    assert eight != wide


@pytest.mark.slow
def test_a_request_goes_into_a_slot_of_a_running_batch(model):
    """Each device takes its part of the row, and what the drafter picked of it."""
    params, tokens = jspec.SamplingParams(max_new_tokens=12), []
    config = jspec.StepConfig(3, DRAFTERS["vegas"])
    for either in (model, helix.shard(model, helix.HelixConfig(kvp=2, tpa=2, block=4))):
        state = jspec.start_decoding(either, TEXTS, params, config, capacity=256)
        state = jspec.speculative_step(either, state, config)
        state = jspec.fill_slot(either, state, 2, TEXTS[0], params, config)
        while not bool(state.done.all()):
            state = jspec.speculative_step(either, state, config)
        tokens.append(np.asarray(state.tokens))
    np.testing.assert_array_equal(*tokens)


def test_a_checkpoint_goes_straight_to_its_shards():
    """By the sizes of what each device holds, which are those of DESIGN's split."""
    config = helix.HelixConfig(kvp=2, tpa=2)
    model = helix.load_model(GOLDEN / "qwen3", config)
    params = dict(jax.tree_util.tree_leaves_with_path(model.model))
    shares = {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            x.shape,
            {shard.data.shape for shard in x.addressable_shards},
            len(x.sharding.device_set),
        )
        for path, x in params.items()
    }
    shard_shapes = {name: shape for name, (_, (shape,), devices) in shares.items() if devices == 4}
    assert shard_shapes.keys() == shares.keys()
    layer = "layers.0."
    assert shard_shapes["embedding.value"] == (112 // 4, 32)
    assert shard_shapes[f"{layer}attention.qkv.kernel.value"] == (32, 2 // 2, 64)
    assert shard_shapes[f"{layer}attention.qkv.bias.value"] == (2 // 2, 64)
    assert shard_shapes[f"{layer}attention.out.kernel.value"] == (64 // 4, 32)
    assert shard_shapes[f"{layer}mlp.gate_up.kernel.value"] == (32, 2, 40 // 4)
    assert shard_shapes[f"{layer}mlp.down.kernel.value"] == (40 // 4, 32)
    assert shard_shapes["norm.scale.value"] == (32,)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (jspec.StepConfig(2, jspec.ModelDraft()), r"ModelDraft\(\) does not run on the mesh of"),
        (
            jspec.StepConfig(2, jspec.GuidedDraft(quantized="int8")),
            "SelfDraft or GuidedDraft without a quantized copy, or a Chain of two of them",
        ),
        (
            jspec.StepConfig(2, jspec.Chain(jspec.ModelDraft(), STREAMING)),
            r"Chain\(first=ModelDraft\(\), .* does not run on the mesh of",
        ),
        (
            jspec.StepConfig(2, jspec.Chain(WINDOW, DRAFTERS["exact"])),
            r"Chain\(first=SelfDraft\(policy=Streaming\(.* does not run on the mesh of",
        ),
        (jspec.StepConfig(2, jspec.SelfDraft(quantized="int8")), "take NoDraft, NgramDraft, Suf"),
        (
            jspec.StepConfig(2, jspec.SelfDraft(policies.Quest())),
            r"Quest\(.* does not run on",
        ),
        (
            jspec.StepConfig(2, jspec.GuidedDraft(policies.SpecExtend())),
            r"take Dense, .* or SparseSpec",
        ),
        (
            jspec.StepConfig(2, jspec.SelfDraft(policies.MagicPIG())),
            r"MagicPIG\(.* does not run on",
        ),
        (
            jspec.StepConfig(2, jspec.SelfDraft(policies.HataOff())),
            r"HataOff\(.* does not run on",
        ),
    ],
    ids=[
        "model",
        "quantized-guided",
        "chain-of-models",
        "chain-window",
        "quantized",
        "pages",
        "weights",
        "tables",
        "host",
    ],
)
def test_what_needs_a_whole_row_is_refused(config, message, model):
    sharded = helix.shard(model, helix.HelixConfig(kvp=2))
    arrays = prepare_params(config.cache_policy, model, [1, 2, 3])
    with pytest.raises(ValueError, match=message):
        jspec.start_decoding(jspec.Models(sharded, model, arrays), [[1, 2]], config=config)


def test_sizes_that_do_not_divide_are_refused(model):
    with pytest.raises(ValueError, match="intermediate_size=48 does not divide into kvp=5"):
        decoder_spec(helix.HelixConfig(kvp=5), "layers.0.mlp.gate_up.kernel", (32, 2, 48))
    with pytest.raises(ValueError, match="8 query heads, which do not divide into kvp=3"):
        helix.shard(model, helix.HelixConfig(kvp=3))
    with pytest.raises(ValueError, match="tpa=4 is more than the 2 key-value heads"):
        helix.shard(model, helix.HelixConfig(tpa=4))


def test_a_request_beyond_the_capacity_is_refused(model):
    sharded = helix.shard(model, helix.HelixConfig(kvp=2, block=4))
    params = jspec.SamplingParams(max_new_tokens=60)
    with pytest.raises(ValueError, match=r"needs 63 slots .* but capacity=40"):
        jspec.start_decoding(sharded, [[1, 2, 3]], params, jspec.PLAIN, capacity=40)


@pytest.mark.exhaustive
def test_a_vocabulary_that_does_not_divide_is_whole_on_every_device(tiny):
    """41 tokens on two devices."""
    sharded = helix.shard(tiny, helix.HelixConfig(kvp=2, block=4))
    assert sharded.vocabulary_axes == ()
    params = jspec.SamplingParams(max_new_tokens=9)
    texts = prompts((7, 2), vocabulary=41)
    both = [jspec.generate(m, texts, params, draft=None, gamma=0) for m in (tiny, sharded)]
    assert both[0].tokens == both[1].tokens
    assert jnp.asarray(both[0].tokens).shape == (2, 9)
