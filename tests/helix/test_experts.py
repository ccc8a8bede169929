"""A mixture of experts on every grid of TPF x EP, against one device."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jspec.helix import HelixConfig
from jspec.helix.sharded import decoder_spec
from jspec.models import experts
from jspec.models.experts import MixtureOfExperts
from jspec.ops.grouped import grouped_linear
from jspec.ops.norm import RMS
from jspec.parts import Experts
from tests.parameters import default_run

pytestmark = pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
WIDTH = 16
NORM = RMS(jnp.ones(WIDTH), 1e-6)
FIRST = [(8, 1, 4), (2, 4, 2), (3, 2, 3)]  # kvp is split, tpa is, and neither
MESHES = [(kvp, tpa) for kvp in (1, 2, 4, 8) for tpa in (1, 2, 4, 8) if kvp * tpa <= 8]
EVERY = [
    (kvp, tpa, ep)
    for (kvp, tpa), ep in itertools.product([*MESHES, (3, 2), (6, 1)], (1, 2, 3, 4, 6, 8))
    if kvp * tpa % ep == 0
]


def mixture(shared_size: int | None, favoured: int | None) -> MixtureOfExperts:
    """24 experts of 24 channels; with ``favoured``, every token takes that one and its like."""
    settings = Experts(24, 3, 24, shared_size, score="sigmoid", corrected=True, normalized=True)
    made = MixtureOfExperts(WIDTH, settings, dtype=jnp.float32, rngs=nnx.Rngs(0))
    near = np.arange(24) - (0 if favoured is None else favoured)
    correction = 0 * near if favoured is None else np.where((near >= 0) & (near < 3), 9.0, 0.0)
    made.router.correction = nnx.Param(jax.device_put(correction.astype(np.float32)))
    return made


def on_mesh(made: MixtureOfExperts, helix: HelixConfig, x):
    made.axes, made.experts.axes = helix.axes, helix.ep_axes
    graph, state = nnx.split(made)

    def spec(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return decoder_spec(helix, f"layers.0.mlp.{name.removesuffix('.value')}", leaf.shape)

    specs = jax.tree.map_with_path(spec, state)
    run = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x, NORM),
        mesh=helix.mesh,
        in_specs=(specs, P()),
        out_specs=P(),
    )
    return jax.jit(run).lower(state, x).compile(), state


def poisoned(x, kernel, starts, *rest, scatter_indices=None, **settings):
    """`grouped_linear` with NaN in the rows after the last group, which are not specified."""
    out = grouped_linear(x, kernel, starts, *rest, scatter_indices=scatter_indices, **settings)
    is_after = jnp.arange(len(out)) >= starts[-1]
    if scatter_indices is not None:
        is_after = jnp.zeros_like(is_after).at[scatter_indices].set(is_after)
    return jnp.where(is_after[:, None], jnp.nan, out)


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    monkeypatch.setattr(experts, "grouped_linear", poisoned)


def check(kvp: int, tpa: int, ep: int, shared_size: int | None, favoured: int | None) -> None:
    helix = HelixConfig(kvp=kvp, tpa=tpa, ep=ep)
    assert helix.mesh.size == kvp * tpa
    x = jax.device_put(np.random.default_rng(0).standard_normal((2, 9, WIDTH), np.float32))
    right = jax.jit(lambda mixture, x: mixture(x, NORM))(mixture(shared_size, favoured), x)
    program, state = on_mesh(mixture(shared_size, favoured), helix, x)
    np.testing.assert_allclose(program(state, x), right, atol=1e-5)
    if kvp * tpa > 1:
        assert str(program.as_text()).count(" all-reduce(") == 1


@pytest.mark.parametrize(("kvp", "tpa", "ep"), default_run(FIRST, "2-4-2", "3-2-3"), ids=str)
def test_a_mixture_on_a_grid_gives_what_one_device_gives(kvp, tpa, ep):
    check(kvp, tpa, ep, shared_size=48, favoured=4)


@pytest.mark.slow
@pytest.mark.parametrize("favoured", [None, 22], ids=["spread", "one-group"])
@pytest.mark.parametrize("shared_size", [None, 48], ids=["routed", "shared"])
@pytest.mark.parametrize(("kvp", "tpa", "ep"), EVERY, ids=str)
def test_a_mixture_on_every_grid(kvp, tpa, ep, shared_size, favoured):
    check(kvp, tpa, ep, shared_size, favoured)


@pytest.mark.parametrize(
    ("settings", "ep_axes", "tpf_axes"),
    [
        ({"kvp": 4, "tpa": 2}, (), ("tpa", "kvp")),
        ({"kvp": 4, "tpa": 2, "ep": 8}, ("tpa", "kvp"), ()),
        ({"kvp": 4, "tpa": 2, "ep": 2}, ("tpa",), ("kvp",)),
        ({"kvp": 4, "tpa": 2, "ep": 4}, ("tpa", "kvp_ep"), ("kvp_tpf",)),
        ({"kvp": 2, "tpa": 4, "ep": 2}, ("tpa_ep",), ("tpa_tpf", "kvp")),
        ({"kvp": 3, "tpa": 2, "ep": 3}, ("kvp",), ("tpa",)),
        ({"kvp": 2, "tpa": 4, "ep": 2, "strategy": "medha"}, ("tpa_ep",), ("tpa_tpf",)),
    ],
    ids=str,
)
def test_axes_of_the_groups_and_within_them(settings, ep_axes, tpf_axes):
    helix = HelixConfig(**settings)
    sizes = dict(zip(helix.mesh.axis_names, helix.mesh.devices.shape, strict=True))
    assert (helix.ep_axes, helix.tpf_axes) == (ep_axes, tpf_axes)
    assert [np.prod([sizes[axis] for axis in axes], dtype=int) for axes in (ep_axes, tpf_axes)] == [
        helix.ep,
        helix.tpf,
    ]
    assert [device.id for device in helix.mesh.devices.flat] == [d.id for d in jax.devices()][
        : helix.devices
    ]


def test_sizes_that_the_grid_does_not_divide_are_refused():
    helix = HelixConfig(kvp=4, ep=2)
    with pytest.raises(ValueError, match="n_routed_experts=5 does not divide into ep=2 devices"):
        decoder_spec(helix, "layers.0.mlp.experts.gate_up.kernel", (5, 16, 2, 12))
    with pytest.raises(ValueError, match="moe_intermediate_size=13 does not divide into tpf=2 dev"):
        decoder_spec(helix, "layers.0.mlp.experts.down.kernel", (6, 13, 16))
