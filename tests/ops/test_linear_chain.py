"""Products in a row: their definition, one call for all of them, and what calls for it."""

import itertools
import json
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jspec import tuned
from jspec.config import Experts, ModelConfig
from jspec.cuda_ffi import library
from jspec.cuda_ffi.linear import linear_cuda
from jspec.dispatch import BackendError, use_backends
from jspec.helix import HelixConfig
from jspec.models.decoder import Decoder
from jspec.models.modules import JoinedLinear
from jspec.ops.linear_chain import LINEAR_CHAIN, ChainOp, Sum, linear_chain
from jspec.ops.norm import RMS
from jspec.ops.quantized import quantized
from tests.models.test_decoder import causal
from tests.ops.backends import every_case
from tests.ops.test_linear import silu

RNG = np.random.default_rng(1)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def cuda_or_skip(*arguments, **settings):
    """Skip where the library of the kernels is missing."""
    if reason := LINEAR_CHAIN.backend("cuda").supports(*arguments, **settings):
        pytest.skip(reason)


def test_each_link_reads_the_one_before():
    x, first, gate, last = normal(2, 4), normal(4, 6), normal(6, 2, 3), normal(3, 6)
    scale, bias = normal(6), normal(2, 3)
    ops = [
        ChainOp(first, add=normal(2, 6)),
        ChainOp(gate, bias, norm=RMS(scale, 0.1), gated=True),
        ChainOp(last, add=0),
    ]
    y = np.float64(x) @ np.float64(first) + np.float64(ops[0].add)
    mean = np.mean(y * y, axis=-1, keepdims=True)
    normed = y / np.sqrt(mean + 0.1) * np.float64(scale)
    both = np.einsum("bi,ija->bja", normed, np.float64(gate)) + np.float64(bias)
    activated = silu(both[:, 0]) * both[:, 1]
    want = [y, activated, activated @ np.float64(last) + y]
    for got, y in zip(linear_chain(x, ops), want, strict=True):
        np.testing.assert_allclose(got, y, rtol=1e-4, atol=1e-5)


@every_case(LINEAR_CHAIN)
def test_one_call_gives_the_bits_of_its_products(case):
    """But of many rows on a GPU, which the matmul ahead scales for a norm: it adds up their squares
    in another order."""
    x, ops = case.arguments
    rounding = 2**-7 if case.name == "rows" and jax.default_backend() == "gpu" else 0
    cuda_or_skip(x, ops, **case.static)
    got = jax.jit(lambda *arrays: LINEAR_CHAIN(*arrays, implementation="cuda", **case.static))(
        x, ops
    )
    outputs = []
    for (kernel, bias, norm, add), other, gated in zip(ops, *case.static.values(), strict=True):
        add = add if other is None else got[other]
        settings = {"gated": gated, "transposed": False, "dtype": x.dtype}
        outputs.append(
            jax.jit(lambda *a, s=settings: linear_cuda(*a, **s))(x, kernel, bias, norm, add)
        )
        result = np.float32(got[len(outputs) - 1])
        np.testing.assert_allclose(result, outputs[-1], rtol=rounding, atol=rounding / 4)
        x = got[len(outputs) - 1]


def test_one_call_has_the_gradients_of_the_products():
    (case, *_) = LINEAR_CHAIN.cases()
    x, ops = case.arguments
    cuda_or_skip(x, ops, **case.static)

    def loss(name):
        def of(x, ops):
            outputs = LINEAR_CHAIN(x, ops, implementation=name, **case.static)
            return sum(jnp.sum(jnp.sin(y.astype(jnp.float32))) for y in outputs)

        return jax.jit(jax.grad(of, argnums=(0, 1), allow_int=True))(x, ops)

    for got, want in zip(*(jax.tree.leaves(loss(n)) for n in ("cuda", "one_by_one")), strict=True):
        off = np.linalg.norm(np.float32(got) - np.float32(want))
        assert off < 0.03 * np.linalg.norm(np.float32(want))  # of bfloat16


@pytest.mark.parametrize("add", [0, 1, -1])
def test_a_link_adds_one_before_it(add):
    with pytest.raises(ValueError, match=rf"ops\[0\].add={add} must be the number of an op"):
        linear_chain(normal(1, 4), [ChainOp(normal(4, 4), add=add), ChainOp(normal(4, 4))])


@pytest.mark.parametrize("rest", [{"bias": normal(4)}, {"gated": True}], ids=["bias", "gated"])
def test_what_comes_after_a_sum_is_no_part_of_its_op(rest):
    op = ChainOp(normal(4, 2, 4), sum=Sum("kvp", "cuda"), **rest)
    with pytest.raises(ValueError, match=r"ops\[0\] has a sum; leave gated and bias out"):
        linear_chain(normal(1, 4), [op])


SIZES_OF_SUMS = {"rows": 3, "heads": 64, "width": 96, "middle": 160}  # of a device


def a_layer(ranks: int) -> tuple[jax.Array, ...]:
    """Each device's outputs of attention and weights of a layer after it, and what all have."""
    rows, heads, width, middle = SIZES_OF_SUMS.values()
    rng = np.random.default_rng(ranks)

    def made(*shape):
        scale = shape[1] ** -0.5 if len(shape) > 2 else 1
        return jnp.asarray(scale * rng.standard_normal(shape, np.float32), jnp.bfloat16)

    out, residual, scale = made(ranks, heads, width), made(rows, width), made(width)
    up, down = made(ranks, width, 2, middle), made(ranks, middle, width)
    return made(ranks, rows, heads), out, up, down, residual, scale


def summed(ranks: int, run, layer):
    """``run(x, ops)`` on each of ``ranks`` devices: what they have of the residual stream."""
    helix = HelixConfig(kvp=ranks, exchange="cuda")
    if jax.device_count() < ranks:
        pytest.skip(f"needs {ranks} devices")
    if reason := helix.refuses_all_to_all():
        pytest.skip(reason)

    def body(x, out, up, down, residual, scale):
        total = Sum(helix.axes, "cuda")
        ops = [
            ChainOp(out[0], add=residual, sum=total),
            ChainOp(up[0], norm=RMS(scale, 1e-6), gated=True),
            ChainOp(down[0], add=0, sum=total),
        ]
        first, _, last = run(x[0], ops)
        return first[None], last[None]

    specs = (P(helix.axes),) * 4 + (P(),) * 2
    over = jax.shard_map(
        body, mesh=helix.mesh, in_specs=specs, out_specs=P(helix.axes), check_vma=False
    )
    return [np.asarray(x, np.float64) for x in jax.jit(over)(*layer)]


def in_double_precision(layer) -> list[np.ndarray]:
    """The sums of a layer by their definition."""
    x, out, up, down, residual, scale = (np.float64(np.asarray(a, np.float32)) for a in layer)
    first = np.einsum("pri,pio->ro", x, out) + residual
    normed = first / np.sqrt(np.mean(first**2, axis=-1, keepdims=True) + 1e-6) * scale
    both = np.einsum("ri,pija->prja", normed, up)
    return [first, first + np.einsum("pri,pio->ro", silu(both[:, :, 0]) * both[:, :, 1], down)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_devices_sum_what_each_has_of_a_matmul(ranks):
    """In the order of ranks: all devices have the same bits, which are those of separate calls."""
    layer = a_layer(ranks)

    def by(name):
        def run(x, ops):
            with use_backends({"linear": "cuda"}):
                return linear_chain(x, ops, implementation=name)

        return summed(ranks, run, layer)

    results = {name: by(name) for name in ("cuda", "one_by_one", "xla")}
    for got, apart, xla, right in zip(*results.values(), in_double_precision(layer), strict=True):
        np.testing.assert_array_equal(got, np.repeat(got[:1], ranks, axis=0))
        np.testing.assert_array_equal(got, apart)
        np.testing.assert_allclose(got[0], right, rtol=3e-2, atol=5e-2)
        np.testing.assert_allclose(xla[0], right, rtol=3e-2, atol=5e-2)


@pytest.mark.parametrize(
    ("ranks", "biased", "outputs", "dtype"),
    [(1, 0, 8, "float32"), (9, 0, 8, "float32"), (2, 1, 8, "float32"), (2, 0, 8, "bfloat16")],
    ids=str,
)
def test_sums_that_cannot_be_are_refused(ranks, biased, outputs, dtype):
    """By the handler, before it waits for anything."""
    case = LINEAR_CHAIN.cases()[0]
    cuda_or_skip(*case.arguments, **case.static)
    x, kernel = jnp.ones((1, 32), jnp.bfloat16), jnp.ones((32, outputs), jnp.bfloat16)
    each = {"biased": biased, "normed": 0, "scaled": 0, "added": -2, "gated": 0, "summed": 1}
    shapes = [jax.ShapeDtypeStruct((1, outputs), d) for d in ("bfloat16", dtype)]

    def run(x, kernel):
        return library.call(
            "linear_chain",
            shapes,
            *(x, kernel, x, kernel[0], x, x),
            vmap_method="sequential",
            **{name: np.full(1, value, np.int32) for name, value in each.items()},
            bits=np.int32(16),
            exact=np.bool_(False),
            ranks=np.int64(ranks),
            patience=np.int64(0),
            eps=np.zeros(1, np.float32),
        )

    message = rf"device 0 of {ranks} ranks cannot sum \w+\[1, {outputs}\] with biased={biased}"
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(run)(x, kernel))


def test_there_are_links():
    with pytest.raises(ValueError, match="ops must have at least one matmul"):
        linear_chain(normal(1, 4), [])


@pytest.mark.parametrize(
    ("rows", "inputs", "kinds", "asked", "reason"),
    [
        (129, 64, [""], {}, r"ops\[0\]: it takes 1 to 128 rows, and there are 129"),
        (1, 48, [""], {}, r"ops\[0\]: 48 inputs are no multiple of 32"),
        (1, 64, ["int8", "fp8"], {}, r"ops\[1\]: its weights are float8_e4m3fn"),
        (1, 64, ["mxfp4", ""], {}, "its weights are of 4 and 16 bits"),
        (1, 64, [""], {"linear": "xla"}, "linear='xla' is asked for"),
    ],
    ids=["rows", "group", "fp8", "kinds", "preferred"],
)
def test_one_call_refuses_with_a_reason(rows, inputs, kinds, asked, reason):
    x, kernel = (jnp.zeros(s, jnp.bfloat16) for s in ((rows, inputs), (inputs, inputs)))
    ops = [ChainOp(quantized(kernel, kind) if kind else kernel) for kind in kinds]
    with use_backends(asked), pytest.raises(BackendError, match=reason):
        linear_chain(x, ops, implementation="cuda")


@pytest.mark.parametrize(
    ("sums", "rows", "reason"),
    [
        ([Sum("kvp", "xla")], 1, r"ops\[0\]: it is summed by xla"),
        ([None, Sum("kvp", "cuda")], 96, r"ops\[1\]: a message of 1572864 bytes is too large"),
        ([Sum("kvp", "cuda"), Sum("tpa", "cuda")], 1, "sums are over 2 groups of devices"),
    ],
    ids=["by-xla", "large", "groups"],
)
def test_sums_that_one_call_does_not_take_are_refused(sums, rows, reason):
    kernel = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    def run(x, kernel):
        ops = [ChainOp(kernel, sum=total) for total in sums]
        return linear_chain(x, ops, implementation="cuda")

    with pytest.raises(BackendError, match=reason):
        jax.eval_shape(run, jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), kernel)


@pytest.mark.parametrize(
    "wrong",
    [
        [ChainOp(normal(4, 8), add=normal(8, 2))],
        [ChainOp(normal(4, 2, 8), normal(16))],
        [ChainOp(normal(4, 2, 4, 8), gated=True)],
        [ChainOp(normal(4, 16), gated=True)],
        [ChainOp(normal(3, 8))],
        [ChainOp(normal(4, 4)), ChainOp(normal(4, 8), add=0)],
    ],
    ids=["add", "bias", "halves", "gate", "inputs", "added-op"],
)
def test_shapes_that_do_not_fit_are_refused_by_every_backend(wrong):
    for name in LINEAR_CHAIN.backends:
        with pytest.raises(ValueError, match=r"must be \[\.\.\., in\], \[in, \*out\]"):
            linear_chain(normal(2, 4), wrong, implementation=name)


GPU_TABLES = {name: x for name, x in tuned.tables().items() if x.compute_capability is not None}
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def fastest(card: str) -> list[tuple[dict[str, int], str]]:
    """The sizes of chains in results of the bench, and the fastest backend but for exact ones."""
    times: dict[str, dict[str, float]] = {}
    for path in sorted((RESULTS / card).glob("linear*.json")):
        for row in json.loads(path.read_text())["rows"]:
            if row["operation"] == "linear_chain" and row["checked"]:
                of_case = times.setdefault(json.dumps(row["sizes"]), {})
                if not row["name"].startswith("exact"):
                    samples = row.get("span_ns") or row["device_ns"]
                    of_case[row["name"]] = statistics.median(samples)
    return [(json.loads(x), min(of_case, key=of_case.get)) for x, of_case in times.items()]


@pytest.mark.parametrize("name", GPU_TABLES)
def test_one_call_comes_first_only_where_it_does_for_each_product_or_was_measured(name):
    """Products of a chain have its rows and bits, and up to as many inputs and outputs. In a chain
    launches overlap, so that it may win where one of its products alone does not."""
    table, names = GPU_TABLES[name], ("rows", "inputs", "outputs", "bits")
    rules = [*table.orders["linear"], *table.orders["linear_chain"]]
    bounds = [{rule.up_to[size] for rule in rules if size in rule.up_to} for size in names]
    grid = [sorted({1, *limits, *(bound + 1 for bound in limits)}) for limits in bounds]
    measured = fastest(name)

    def rule(operation, sizes):
        at = dict(zip(names, sizes, strict=True))
        return next(
            x for x in table.orders[operation] if all(at[size] <= x.up_to[size] for size in x.up_to)
        )

    def was_fastest(chosen):
        """Whether CUDA was, of all chains that were measured where the rule applies."""
        sizes_of = [([sizes[x] for x in names], first) for sizes, first in measured]
        reached = [first for sizes, first in sizes_of if rule("linear_chain", sizes) is chosen]
        return bool(reached) and set(reached) == {"cuda"}

    for rows, inputs, outputs, bits in itertools.product(*grid):
        chosen = rule("linear_chain", (rows, inputs, outputs, bits))
        if chosen.take[0] != "cuda" or was_fastest(chosen):
            continue
        for read, written in itertools.product(grid[1], grid[2]):
            if read <= inputs and written <= outputs:
                single = rule("linear", (rows, read, written, bits))
                assert single.take[0] == "cuda", (rows, read, written, bits)


def test_sizes_are_the_largest_of_all_products():
    case = next(case for case in LINEAR_CHAIN.cases() if case.name == "mxfp4")
    sizes = LINEAR_CHAIN.sizes(*case.build(), **case.static)
    assert sizes == {"rows": 2, "inputs": 1056, "outputs": 2 * 1056, "bits": 4}


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_context": 16}
SIZES |= {"num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_size": 32}


def chains_of(monkeypatch, **settings) -> list[int]:
    """How many ops each chain has that a decoder of three layers calls for."""
    counts = []

    def counted(x, ops):
        counts.append(len(ops))
        return linear_chain(x, ops)

    monkeypatch.setattr("jspec.models.decoder.linear_chain", counted)

    def run(tokens):
        model = Decoder(ModelConfig.uniform(**SIZES | settings), rngs=nnx.Rngs(0))
        return model(tokens, jnp.arange(2, dtype=jnp.int32)[None], causal, [])[0]

    jax.eval_shape(run, np.zeros((1, 2), np.int32))
    return counts


def test_a_decoder_calls_for_a_chain_in_each_layer(monkeypatch):
    """Its last op is the projections of the next layer, which are then not computed again."""
    joined = []
    original = JoinedLinear.joined
    monkeypatch.setattr(JoinedLinear, "joined", lambda *args: joined.append(0) or original(*args))
    assert chains_of(monkeypatch) == [4, 4, 3]
    assert len(joined) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"post_norms": True},
        {"post_norms": True, "pre_norms": False},
        {"residual_scale": 0.5},
        {"activation": "gelu_tanh"},
    ],
    ids=["post-norms", "no-pre-norms", "residual-scale", "activation"],
)
def test_what_is_more_than_products_is_no_chain(settings, monkeypatch):
    assert chains_of(monkeypatch, **settings) == []


def test_a_layer_of_experts_takes_the_projections_of_the_dense_layer_before(monkeypatch):
    experts = Experts(routed=4, chosen=2, size=16, dense_layers=(0, 2))
    assert chains_of(monkeypatch, experts=experts) == [4, 3]


def test_a_decoder_in_chains_is_the_decoder_product_by_product():
    """Also between layers: the projections of the next one are part of a layer's chain."""
    model = Decoder(ModelConfig.uniform(**SIZES), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tokens, positions = jnp.arange(6).reshape(2, 3), jnp.tile(jnp.arange(3), (2, 1))

    def hidden(chain):
        with use_backends({"linear": "cuda", "linear_chain": chain}):
            return jax.jit(lambda model: model(tokens, positions, causal, []))(model)

    case = LINEAR_CHAIN.cases()[0]
    cuda_or_skip(*case.arguments, **case.static)
    for got, want in zip(
        *(jax.tree.leaves(hidden(n)) for n in ("cuda", "one_by_one")), strict=True
    ):
        np.testing.assert_array_equal(got, want)
