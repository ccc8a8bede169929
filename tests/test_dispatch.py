"""Which backend runs, in what order they are asked, and what a refusal says."""

import pytest

from jspec.dispatch import Backend, BackendError, Operation, always


def backend(name: str, reason: str | None = None) -> Backend:
    return Backend(name, lambda x, **settings: (name, x, settings), lambda x, **settings: reason)


def operation(*backends: Backend, order: str | None = None) -> Operation:
    names = order.split() if order is not None else [b.name for b in backends]
    return Operation("toy", {b.name: b for b in backends}, lambda platform, *args, **kw: names)


def test_the_first_that_does_not_refuse_runs():
    assert operation(backend("a"), backend("b"))(7)[0] == "a"
    assert operation(backend("a", "too old"), backend("b"), backend("c"))(7)[0] == "b"


def test_the_preference_orders_not_the_table():
    assert operation(backend("a"), backend("b"), order="b a")(7)[0] == "b"


def test_the_preference_sees_the_platform_and_the_arguments():
    seen = []

    def preference(*args, **kwargs):
        seen.append((args, kwargs))
        return ["a"]

    Operation("toy", {"a": backend("a")}, preference)(7, scale=2)
    assert seen == [(("cpu", 7), {"scale": 2})]


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
