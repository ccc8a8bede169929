"""Which backend runs, in what order they are asked, and what a refusal says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.dispatch import (
    Backend,
    BackendError,
    Backends,
    Case,
    Choice,
    Operation,
    always,
    record_choices,
    use_backends,
)
from jspec.ops import operations
from jspec.tuned import Rule, Serving, Table


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch):
    """A toy's order is that of a machine without a table, unless a test says otherwise."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


def backend(name: str, reason: str | None = None) -> Backend:
    return Backend(name, lambda x, **settings: (name, x, settings), lambda x, **settings: reason)


def operation(*backends: Backend, order: str | None = None) -> Operation:
    names = order.split() if order is not None else [b.name for b in backends]
    table = {b.name: b for b in backends}
    return Operation("toy", table, lambda *args, **kw: {}, list, default_order=names)


def test_the_first_that_does_not_refuse_runs():
    assert operation(backend("a"), backend("b"))(7)[0] == "a"
    assert operation(backend("a", "too old"), backend("b"), backend("c"))(7)[0] == "b"


def test_the_order_is_not_that_of_the_backends():
    assert operation(backend("a"), backend("b"), order="b a")(7)[0] == "b"


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_the_table_orders_by_the_sizes_of_the_arguments(platform, monkeypatch):
    rules = (Rule({"size": 7}, ["b", "a"]), Rule({}, ["a", "b"]))
    table = Table("toy", "NVIDIA Toy", (9, 0), True, {"toy": rules}, {})
    gpu = ("NVIDIA Toy", (9, 0)) if platform == "gpu" else None
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    for module in ("jspec.dispatch", "jspec.tuned"):
        monkeypatch.setattr(f"{module}.gpu_in_use", lambda: gpu)
    monkeypatch.setattr("jspec.tuned.serving", lambda name: {gpu: Serving(table, None)}[name])
    toy = Operation(
        "toy",
        {"a": backend("a"), "b": backend("b")},
        lambda x, scale: {"size": x * scale},
        list,
        default_order=("c",),
    )
    assert [toy(x, scale=2)[0] for x in (3, 4)] == ["b", "a"]
    unmeasured = Operation("other", toy.backends, toy.sizes, list, default_order=("b",))
    assert unmeasured(3, scale=2)[0] == "b"


def test_a_backend_gets_the_arguments_without_the_choice():
    toy = operation(backend("a"))
    assert toy(7, scale=2, implementation="a") == ("a", 7, {"scale": 2})
    assert toy.choose("a", 7).name == "a"


def test_the_reason_may_depend_on_the_arguments():
    small = Backend("small", lambda x: "small", lambda x: f"x={x} is over 5" if x > 5 else None)
    toy = operation(small, Backend("any", lambda x: "any", always))
    assert (toy(5), toy(6)) == ("small", "any")


def test_a_named_backend_never_falls_back():
    toy = operation(backend("a", "needs sm_90"), backend("b"))
    with pytest.raises(BackendError) as error:
        toy(7, implementation="a")
    assert str(error.value) == "toy cannot run as asked; a: needs sm_90"


def test_a_named_backend_need_not_be_preferred():
    assert operation(backend("a"), backend("b"), order="a")(7, implementation="b")[0] == "b"


def test_when_all_refuse_each_reason_is_told():
    toy = operation(backend("a", "needs sm_90"), backend("b", "H=96 is not a power of two"))
    with pytest.raises(BackendError) as error:
        toy(7)
    assert str(error.value) == (
        "toy cannot run as asked; a: needs sm_90; b: H=96 is not a power of two"
    )


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(BackendError) as error:
        operation(backend("a"), backend("b"))(7, implementation="c")
    assert str(error.value) == (
        "toy has no implementation 'c'; choose one of a, b, or None for the best"
    )


def test_a_refusal_is_a_value_error():
    assert issubclass(BackendError, ValueError)


def test_the_arguments_of_a_case_are_on_the_device():
    case = Case("toy", lambda: (np.arange(3, dtype=np.int32), None, (np.zeros(2, np.float32),)))
    x, nothing, (y,) = case.arguments
    assert isinstance(x, jax.Array)
    assert (x.dtype, y.dtype, nothing) == (jnp.int32, jnp.float32, None)


def test_backends_are_a_frozen_map_that_a_jit_may_take_as_static():
    one = Backends(pack="triton", verify_greedy="cuda")
    assert one == Backends({"verify_greedy": "cuda", "pack": "triton"})
    assert hash(one) == hash(Backends({"verify_greedy": "cuda"}, pack="triton"))
    assert dict(one) == {"pack": "triton", "verify_greedy": "cuda"}
    assert (len(one), one.get("sample"), len(Backends())) == (2, None, 0)
    assert one != Backends(pack="cuda", verify_greedy="cuda")
    with pytest.raises(KeyError, match="sample"):
        one["sample"]
    with pytest.raises(AttributeError, match="cannot assign"):
        one._named = ()
    counted = jax.jit(lambda x, backends: x + len(backends), static_argnames="backends")
    assert counted(1, backends=one) == 3


def test_a_later_name_replaces_an_earlier_one():
    assert Backends({"pack": "triton"}, pack="cuda")["pack"] == "cuda"


def test_backends_are_checked_against_the_operations_that_there_are():
    Backends({x.name: next(iter(x.backends)) for x in operations()}).check(operations())
    Backends().check(operations())
    message = r"calls no operation 'packs' \(did you mean pack\?\); it calls .*, pack,"
    with pytest.raises(BackendError, match=message):
        Backends(packs="cuda").check(operations())
    with pytest.raises(BackendError, match=r"calls no operation 'xyz'; it calls .*, pack,"):
        Backends(xyz="cuda").check(operations())
    with pytest.raises(BackendError, match="pack has no implementation 'cuba'; choose one of xla,"):
        Backends(pack="cuba").check(operations())


def test_a_preferred_backend_runs_where_it_can():
    toy = operation(backend("a"), backend("b"), backend("c", "too old"), order="a")
    for preferred, runs, reason in (
        ("b", "b", None),
        ("c", "a", "too old"),
        ("d", "a", "it has no backend d"),
    ):
        with use_backends(Backends.prefer(preferred)), record_choices() as choices:
            assert [toy(7)[0], toy(8)[0]] == [runs, runs]
        assert choices == [Choice("toy", runs, reason)]
    with record_choices() as choices:
        toy(7)
    assert choices == []


def test_named_backends_go_before_a_preferred_one():
    toy = operation(backend("a"), backend("b"), backend("c", "too old"))
    backends = Backends.prefer("b", {"toy": "a"})
    with use_backends(backends):
        assert toy(7)[0] == "a"
        assert toy(7, implementation="b")[0] == "b"
    named = use_backends(Backends.prefer("b") | {"toy": "c"})
    with named, pytest.raises(BackendError, match="c: too old"):
        toy(7)
    with use_backends(Backends.prefer("b") | {}):
        assert toy(7)[0] == "b"


def test_an_operation_without_the_preferred_backend_runs_as_several():
    parts = Backend("parts", lambda x: "parts", always, composite=True)
    with_b = Operation("toy", {"a": backend("a"), "b": backend("b"), "parts": parts}, dict, list)
    without = Operation("toy", {"a": backend("a"), "parts": parts}, dict, list, ("a",))
    with use_backends(Backends.prefer("b")):
        assert (with_b(7)[0], without(7)) == ("b", "parts")


def test_backends_differ_by_what_they_prefer():
    one = Backends.prefer("triton", {"pack": "cuda"})
    assert one == Backends(one) == Backends.prefer("triton") | {"pack": "cuda"}
    assert hash(one) == hash(Backends(one))
    assert one != Backends(pack="cuda")
    assert (dict(one), one.preferred) == ({"pack": "cuda"}, "triton")
    one.check(operations())
    with pytest.raises(BackendError, match="no operation has a backend 'cuba' to prefer; they"):
        Backends.prefer("cuba").check(operations())


def test_the_operations_have_different_names():
    names = [operation.name for operation in operations()]
    assert len(set(names)) == len(names)
    assert {"attention", "verify_greedy", "sample"} <= set(names)


def test_the_last_resorts_are_those_that_take_all_arguments():
    toy = operation(backend("a"), Backend("b", print, always), Backend("c", print, always))
    assert toy.never_refusing == ("b", "c")
