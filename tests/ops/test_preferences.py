"""The committed tables and the operations fit together: names, sizes, and a last resort."""

import functools
import itertools

import jax
import numpy as np
import pytest

from jspec import tuned
from jspec.ops import operations
from jspec.ops.exact import EXACT_ATTENTION, EXACT_LINEAR
from jspec.tuned import Rule

OPERATIONS = {operation.name: operation for operation in operations()}
TABLED = OPERATIONS | {x.name: x for x in (EXACT_LINEAR, EXACT_ATTENTION)}
over_tables = pytest.mark.parametrize("table", tuned.tables().values(), ids=tuned.tables())
over_operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


def small(operation):
    return next(case for case in operation.cases() if case.small)


@functools.cache
def sizes(name: str) -> dict[str, int]:
    operation = TABLED[name]
    case = small(operation)
    return operation.sizes(*case.arguments, **case.static)


def kinds(operation) -> tuple[set[str], set[str]]:
    """The names of its backends and of its sizes."""
    return set(operation.backends), set(sizes(operation.name))


@over_tables
def test_every_order_is_of_an_operation(table):
    assert set(table.orders) <= set(TABLED)


@over_tables
@pytest.mark.parametrize("operation", TABLED.values(), ids=TABLED)
def test_every_order_names_backends_by_sizes_that_there_are(operation, table):
    for rule in table.orders.get(operation.name, ()):
        assert set(rule.take) <= set(operation.backends)
        assert set(rule.up_to) <= set(sizes(operation.name))


@over_operations
def test_the_last_choice_never_refuses(operation):
    orders = [table.orders.get(operation.name, ()) for table in tuned.tables().values()]
    rules = [*itertools.chain(*orders), Rule({}, operation.default_order)]
    last = {rule.take[-1] for rule in rules}
    for case in operation.cases():
        arguments = case.arguments
        for backend in map(operation.backend, last):
            assert backend.supports(*arguments, **case.static) is None, (case.name, backend)


@over_tables
def test_blocks_are_of_backends_that_there_are(table):
    for name, of in table.blocks.items():
        # Of the exchange of a mesh, which is no operation, the number of chunks.
        backends, known = ({"helix"}, {"rows"}) if name == "exchange" else kinds(TABLED[name])
        assert set(of) <= backends
        for rules in of.values():
            assert all(set(rule.up_to) <= known for rule in rules)


def test_every_table_has_the_same_blocks():
    """What a kernel asks of one table it asks of all, and of every rule."""

    def fields(table):
        return {
            (name, backend): {frozenset(rule.take) for rule in rules}
            for name, of in table.blocks.items()
            for backend, rules in of.items()
        }

    gpus = [table for table in tuned.tables().values() if table.compute_capability is not None]
    assert [x.name for x in tuned.tables().values() if not x.blocks] == [tuned.CPU]
    first, *others = map(fields, gpus)
    assert all(len(each) == 1 for each in first.values())
    assert others == [first] * len(others)


@over_operations
def test_on_other_devices_a_reference_runs(operation, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    case = small(operation)
    chosen = operation.choose(None, *case.arguments, **case.static).name
    assert chosen in operation.never_refusing


@over_operations
def test_on_a_cpu_without_a_compiler_a_reference_runs(operation, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    monkeypatch.setattr("jspec.cuda_ffi.library.refusal", lambda subject: "no compiler")
    case = small(operation)
    chosen = operation.choose(None, *case.arguments, **case.static).name
    assert chosen in operation.never_refusing


@over_operations
def test_every_case_has_another_name_and_the_same_arguments_each_time(operation):
    cases = operation.cases()
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        first, second = jax.tree.leaves(case.build()), jax.tree.leaves(case.build())
        pairs = zip(first, second, strict=True)
        assert all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs), case.name
