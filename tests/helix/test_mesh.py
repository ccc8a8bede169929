"""Sizes of a mesh that fit together, and what is said of those that do not."""

import jax
import pytest

from jspec import tuned
from jspec.config import LayerSpec
from jspec.helix import HelixConfig, mesh

EIGHT = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


def spec(kv_heads: int) -> LayerSpec:
    return LayerSpec(kv_heads=kv_heads, key_size=8, value_size=8)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kvp": 0}, "kvp=0 must be a whole number, at least 1"),
        ({"tpa": 2.0}, "tpa=2.0 must be a whole number"),
        ({"block": 0}, "block=0"),
        ({"kvp": 2, "tpf": 4}, "tpf=4 times ep=1 must be 2, the devices that share the feed-forw"),
        ({"kvp": 3, "tpa": 2, "tpf": 4, "ep": 2}, "tpf=4 times ep=2 must be 6, the devices"),
        ({"kvp": 4, "ep": 3}, "tpf=1 times ep=3 must be 4, .*; leave tpf out, and choose an ep"),
        ({"kvp": 2, "ep": 2, "strategy": "medha"}, "tpf=1 times ep=2 must be 1, the devices"),
        ({"strategy": "ring"}, "strategy='ring' must be one of helix, gather, medha, tp"),
        ({"kvp": 2, "overlap": 0}, "overlap=0 must be a whole number, at least 1"),
        ({"tpa": 2, "overlap": 2}, "overlap=2 cuts the exchange .* but kvp=1 and strategy='helix'"),
        ({"kvp": 2, "overlap": 2, "strategy": "medha"}, "overlap=2 cuts .*; leave overlap out"),
        ({"up_projection": "never"}, "up_projection='never' must be one of auto, before, after"),
        ({"kvp": 2, "exchange": "nccl"}, "exchange='nccl' must be one of xla, pallas, cuda"),
        ({"tpa": 2, "exchange": "pallas"}, "exchange='pallas' is of .* but kvp=1, tpa=2 and strat"),
        ({"exchange": "cuda"}, "exchange='cuda' is of .* 2 devices or more, but kvp=1, tpa=1"),
        (
            {"kvp": 2, "tpa": 2, "strategy": "medha", "exchange": "cuda"},
            "exchange='cuda' is of strategy='helix' or 'tp' .*; leave exchange out",
        ),
        (
            {"kvp": 2, "exchange": "pallas", "overlap": 2},
            "overlap=2 overlaps messages with attention, but exchange='pallas' waits for each",
        ),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        HelixConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "heads", "message"),
    [
        ({"kvp": 2, "tpa": 4}, (8, 2), r"tpa=4 is more than the 2 .* as with kvp=4, tpa=2"),
        ({"tpa": 2}, (6, 3), "tpa=2 must divide the 3 key-value heads of layer 5"),
        ({"kvp": 4}, (6, 2), "6 query heads, which do not divide into kvp=4 times tpa=1 devices"),
        ({"kvp": 2, "strategy": "tp"}, (8, 2), "2 key-value heads to share; pass tpa=2 first"),
    ],
    ids=str,
)
def test_heads_that_do_not_divide_are_refused(settings, heads, message):
    with pytest.raises(ValueError, match=message):
        HelixConfig(**settings).check_layer(5, heads[0], spec(heads[1]))


def test_a_mesh_that_the_machine_has_no_devices_for():
    many = jax.device_count() + 1
    said = f"needs {many} devices .* has {many - 1} .*; lower kvp"
    if jax.default_backend() == "cpu":
        said += f".*device_count={many} .*--devices {many}"
    with pytest.raises(ValueError, match=said):
        _ = HelixConfig(kvp=many).mesh


@EIGHT
def test_devices_with_the_same_heads_stand_side_by_side():
    """Rank tpa * KVP + kvp: the order in which the output projection's rows are cut."""
    config = HelixConfig(kvp=4, tpa=2)
    assert (config.devices, config.tpf, config.mesh.axis_names) == (8, 8, ("tpa", "kvp"))
    ids = [[device.id for device in group] for group in config.mesh.devices]
    first = [device.id for device in jax.devices()]
    assert ids == [first[:4], first[4:8]]
    rows = config.sharding(config.axes).devices_indices_map((16,))
    assert [rows[device][0].start or 0 for device in config.mesh.devices.flat] == list(
        range(0, 16, 2)
    )


def test_an_exchange_that_cannot_run_is_refused(monkeypatch):
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    monkeypatch.setattr(mesh, "refuses_all_to_all", lambda by, devices: f"{by} {len(devices)}")
    with pytest.raises(ValueError, match="exchange='pallas' cannot run here: pallas 2; leave exch"):
        _ = HelixConfig(kvp=2, exchange="pallas").mesh


def test_chunks_are_those_that_were_measured_unless_named(monkeypatch):
    rules = ({"chunks": 1}, {"chunks": 4})
    monkeypatch.setattr(tuned, "block", lambda *args: rules[args[2]["rows"] > 8])
    monkeypatch.setattr(tuned, "blocks", lambda *args: rules)
    measured = HelixConfig(kvp=2)
    assert [measured.chunks(rows) for rows in (1, 8, 9)] == [1, 1, 4]
    assert measured.compiler_options
    at_once = HelixConfig(kvp=2, exchange="cuda")
    for one in (HelixConfig(tpa=2), HelixConfig(kvp=2, strategy="medha"), at_once):
        assert (one.chunks(9), one.compiler_options) == (1, {})
    named = HelixConfig(kvp=2, overlap=2)
    assert [named.chunks(rows) for rows in (1, 3)] == [1, 2]
    assert named.compiler_options
    assert not HelixConfig(kvp=2, overlap=1).compiler_options


def test_every_table_says_how_many_chunks():
    for table in tuned.tables().values():
        if table.blocks:
            assert table.block("exchange", "helix", {"rows": 64})["chunks"] >= 1
