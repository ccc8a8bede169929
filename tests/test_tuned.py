"""Tables of orders and block sizes: how a rule is found, which table serves, what is refused."""

import copy
import dataclasses
import json

import pytest

from jspec import tuned
from jspec.tuned import Serving, Table, TableError, load, nearest, serving

TOY = {
    "gpu": "NVIDIA Toy",
    "compute_capability": "9.0",
    "measured": True,
    "orders": {
        "toy": [
            {"up_to": {"batch": 8, "gamma": 4}, "take": ["a", "b"]},
            {"up_to": {"batch": 64}, "take": ["b", "a"]},
            {"take": ["c"]},
        ]
    },
    "blocks": {
        "toy": {"a": [{"up_to": {"batch": 8}, "take": {"warps": 1}}, {"take": {"warps": 4}}]}
    },
}


def written(tmp_path, table) -> Table:
    path = tmp_path / "toy.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return load(path)


@pytest.mark.parametrize(
    ("batch", "gamma", "order", "warps"),
    [
        (8, 4, ("a", "b"), 1),
        (9, 4, ("b", "a"), 4),
        (8, 5, ("b", "a"), 1),
        (64, 99, ("b", "a"), 4),
        (65, 1, ("c",), 4),
    ],
)
def test_the_first_rule_whose_bounds_hold_applies(tmp_path, batch, gamma, order, warps):
    table, sizes = written(tmp_path, TOY), {"batch": batch, "gamma": gamma}
    assert table.order("toy", sizes) == order
    assert table.block("toy", "a", sizes) == {"warps": warps}


def test_a_table_that_lacks_what_is_asked_says_so(tmp_path):
    table = written(tmp_path, TOY)
    assert table.order("other", {}) is None
    with pytest.raises(TableError, match=r"toy\.json has no block sizes for toy, b"):
        table.block("toy", "b", {})
    with pytest.raises(TableError, match=r"bounds 'gamma' of toy, whose sizes are batch, width"):
        table.order("toy", {"batch": 1, "width": 2})


def changed(*path, to) -> dict:
    """`TOY` with what lies at ``path`` put in its place; nothing there means left out."""
    table = copy.deepcopy(TOY)
    inner = table
    for key in path[:-1]:
        inner = inner[key]
    if to is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "cannot be read"),
        ([], "must be an object with the fields gpu, compute_capability"),
        (changed("measured", to=None), "must be an object with the fields"),
        (changed("speed", to=1), "must be an object with the fields"),
        (changed("gpu", to=1), "gpu must be a string"),
        (changed("measured", to=1), "measured a bool"),
        (changed("compute_capability", to="nine"), "such as \"9.0\", not 'nine'"),
        (changed("compute_capability", to=""), "such as \"9.0\", not ''"),
        (changed("compute_capability", to=9), 'such as "9.0", not 9'),
        (changed("orders", to=[]), "orders: must be an object"),
        (changed("blocks", "toy", to=[]), "blocks of toy: must be an object"),
        (changed("orders", "toy", to=[]), "orders of toy: there must be a list of rules"),
        (changed("orders", "toy", 0, to=["a"]), "rule 1 of 3: must be an object"),
        (
            changed("orders", "toy", 0, "take", to=None),
            "rule 1 of 3: the fields are up_to and take",
        ),
        (changed("orders", "toy", 0, "upto", to={}), "the fields are up_to and take"),
        (changed("orders", "toy", 0, "up_to", "batch", to="8"), "whole numbers by size"),
        (changed("orders", "toy", 0, "up_to", to={}), "rule 1 of 3: the last rule, and no other"),
        (changed("orders", "toy", 2, "up_to", to={"batch": 9}), "rule 3 of 3: the last rule"),
        (changed("orders", "toy", 1, "take", to=[]), r"rule 2 of 3: it cannot take \[\]"),
        (changed("orders", "toy", 1, "take", to=["a", "a"]), "it cannot take"),
        (changed("orders", "toy", 1, "take", to="a"), "it cannot take 'a'"),
        (changed("blocks", "toy", "a", 0, "take", to={"warps": 1.5}), "blocks of toy, a, rule 1"),
    ],
)
def test_a_malformed_table_says_what_is_wrong(tmp_path, table, message):
    with pytest.raises(TableError, match=message) as error:
        written(tmp_path, table)
    assert "toy.json" in str(error.value)


def table(name: str, gpu: str, capability: tuple[int, int], measured: bool = True) -> Table:
    return Table(name, gpu, capability, measured, {}, {})


AMONG = [
    table("a100", "NVIDIA A100-SXM4-80GB", (8, 0)),
    table("b200", "NVIDIA B200", (10, 0)),
    table("h100", "NVIDIA H100 80GB HBM3", (9, 0), measured=False),
    table("h200", "NVIDIA H200", (9, 0)),
]


@pytest.mark.parametrize(
    ("kind", "capability", "name"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H100 PCIe", (9, 0), "h100"),
        ("NVIDIA GH200 480GB", (9, 0), "h200"),
        ("NVIDIA L40S", (8, 9), "a100"),
        ("NVIDIA GB300", (10, 3), "b200"),
        ("NVIDIA RTX PRO 6000", (12, 0), "b200"),
    ],
)
def test_the_nearest_table_serves(kind, capability, name):
    """By device kind, by a word of it, then by compute capability, where measured ones go first."""
    assert nearest(kind, capability, AMONG).name == name
    assert nearest(kind, capability, AMONG[::-1]).name == name


def test_an_unknown_gpu_is_a_guess_and_so_is_a_table_that_was_not_measured(monkeypatch):
    cpu = Table("cpu", "cpu", None, True, {}, {})
    monkeypatch.setattr(tuned, "tables", lambda: {x.name: x for x in [cpu, *AMONG]})
    serving.cache_clear()
    try:
        assert serving(("NVIDIA H200", (9, 0))).guess is None
        assert serving(("NVIDIA L40S", (8, 9))).guess == "this is NVIDIA L40S"
        unmeasured = serving(("NVIDIA H100 80GB HBM3", (9, 0))).guess
        assert unmeasured == "its orders were not measured on this GPU"
        assert serving(None) == Serving(cpu, None)
        serving.cache_clear()
        guessed = dataclasses.replace(cpu, measured=False)
        monkeypatch.setattr(tuned, "tables", lambda: {"cpu": guessed})
        assert serving(None).guess == "its orders were not measured on this CPU"
    finally:
        serving.cache_clear()
