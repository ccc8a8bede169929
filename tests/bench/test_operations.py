"""The suites of operations: every backend is checked, a wrong one is refused, cases are parsed."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention, caches, linear, point
from bench import suite as suites
from bench.__main__ import SUITES, main
from bench.cases import parse
from bench.program import Program
from bench.settings import Settings
from jspec.dispatch import Backend, always
from tests.parameters import default_run

MODULES = ("verify", "pack", "attention", "select", "hata", "linear")
CACHE = "B=2,S=96,heads=4/2,H=16,T=3"
CODES = "B=2,heads=4/2,T=2"
CASES = {
    "verify_greedy": "B=3,gamma=40,alpha=0.3",
    "verify_stochastic": "B=2,V=300,draft=logits",
    "acceptance_scan": "B=3,gamma=40,alpha=0.3",
    "verify_and_commit": "B=2,T=3,V=300",
    "sample": "B=2,V=300",
    "verify_tree": "B=3,gamma=6",
    "pack_path": "B=2,S=16,n=3,layers=2,heads=4/2,H=8",
    "pack": "B=2,gamma=8,alpha=0.6,D=16",
    "verify_and_pack": "B=2,gamma=8,alpha=0.6,D=16",
    "attention": f"{CACHE},lengths=ragged",
    "gathered_attention": f"{CACHE},n=20,indices=per-head",
    "rotate_append_attend": "B=2,S=96,heads=4/2,H=16,n=20",
    "scored_attention": CACHE,
    "mean_weights": CACHE,
    "select": "rows=3,n=200,k=9,scores=bfloat16",
    "hamming_scores": f"{CODES},S=64,n=9,R=64",
    "hash_select": f"{CODES},S=64,n=9,R=64",
    "hash_encode": f"{CODES},H=16,R=64",
    "rotate_append_encode": f"{CODES},H=16,R=64",
    "hash_attention": "B=2,heads=4/2,S=64,n=24,H=16,R=64",
    "collision_scores": f"{CODES},S=64",
    "dot_scores": f"{CODES},S=64,H=16,C=8",
    "linear": "model=tiny,part=gate_up,rows=3",
    "linear_chain": "model=tiny,rows=3",
    "page_scores": f"{CODES},S=64,H=16,page=4",
}


def benchmark(name: str) -> suites.OperationBenchmark:
    """The benchmark of an operation."""
    for module in MODULES:
        try:
            return SUITES[module].case(f"op={name}")[0]
        except ValueError:
            continue
    raise KeyError(name)


def test_every_operation_of_the_suites_has_a_small_case():
    names = set()
    for module in MODULES:
        with pytest.raises(ValueError, match="must be one of") as error:
            SUITES[module].case("op=?")
        names |= set(str(error.value).removeprefix("op=? must be one of ").split(", "))
    assert names - {"hata_layer", "hata_parts", "in_blocks"} == set(CASES)


# Outputs of integers, of floats and of both, one and several.
FIRST = ("verify_greedy", "sample", "pack", "attention", "select", "mean_weights")


@pytest.mark.parametrize("name", default_run(list(CASES), *FIRST))
def test_a_wrong_output_is_refused_and_the_reference_is_timed(name):
    """Each output in turn is changed by the smallest step that matters."""
    bench = benchmark(name)
    reference = bench.operation.backend("xla").run
    setup = bench.setup(bench.case(CASES[name]))
    run = jax.jit(setup.program(functools.partial(reference, **setup.static)).function)
    outputs, tree = jax.tree.flatten(jax.device_get(run(*setup.inputs)))
    wrong = [f"wrong{i}" for i in range(len(outputs))]

    def changed(index):
        leaves = [np.array(x) for x in outputs]
        x, first = leaves[index], (0,) * leaves[index].ndim
        if x.dtype == bool:
            x[first] = ~x[first]
        else:
            x[first] += 4 + np.abs(x).max() if jnp.issubdtype(x.dtype, jnp.floating) else 1
        return lambda *arguments, **static: jax.tree.unflatten(tree, map(jnp.asarray, leaves))

    backends = {"xla": Backend("xla", reference, always)}
    backends |= {name: Backend(name, changed(index), always) for index, name in enumerate(wrong)}
    backends["refuses"] = Backend("refuses", reference, lambda *arguments, **static: "needs sm_90")
    operation = dataclasses.replace(bench.operation, backends=backends, default_order=("xla",))
    rivals = {"rival": lambda name: Program(name, lambda: run(*setup.inputs), setup.check)}
    bench = dataclasses.replace(
        bench,
        operation=operation,
        setup=lambda case: dataclasses.replace(setup, rivals=rivals),
        rivals=("rival",),
    )
    settings = Settings(quick=True, only=(*backends, "rival"))
    rows = {row["name"]: row for row in bench.rows(bench.case(CASES[name]), settings)}
    assert rows["xla"]["checked"] is True
    assert rows["xla"]["wall_ns"]
    assert rows["xla"]["sizes"] == operation.sizes(*setup.arguments, **setup.static)
    assert rows["xla"]["compile_s"] > 0
    assert rows["rival"]["checked"] is True
    assert rows["refuses"]["checked"] is None
    assert rows["refuses"]["reason"] == "needs sm_90"
    for name in wrong:
        assert rows[name]["checked"] is False, name
        assert "wall_ns" not in rows[name]


def test_times_of_a_chain_are_of_one_of_its_layers(monkeypatch):
    measured = {}
    monkeypatch.setattr(point, "measure", lambda *args, **settings: measured.update(settings) or [])
    bench = benchmark("linear_chain")
    bench.rows(bench.case(CASES["linear_chain"]), Settings(quick=True, only=("xla",)))
    assert measured["layers"] == linear.LAYERS


def test_a_program_in_place_donates_the_cache():
    bench = benchmark("rotate_append_attend")
    setup = bench.setup(bench.case(CASES["rotate_append_attend"]))
    donated = [setup.arguments[i] for i in setup.program(lambda *arguments: arguments).donated]
    keys, values = setup.arguments[4:6]
    assert [id(x) for x in donated] == [id(keys), id(values)]


@pytest.mark.parametrize(
    ("suite", "text", "message"),
    [
        ("attention", "Q=3", "'Q=3' must be one of B, S, heads, H, T, cache, lengths"),
        ("attention", "B=0", "B=0 must be a whole number of 1 or more, such as 8 or 32K"),
        ("attention", "heads=32", "heads=32 must be query heads / KV heads, such as 32/8"),
        ("attention", "heads=32/5", "heads=32/5: 32 is no multiple of 5"),
        ("attention", "lengths=odd", "lengths=odd must be one of full, ragged"),
        ("attention", "S=8,T=3,lengths=ragged", "T=3 must be at most 2"),
        ("attention", "op=gathered_attention,S=1K,n=1K", "n=1024 and T=1 must fit into S=1024"),
        ("attention", "op=gathered_attention,lengths=full", "'lengths=full' must be one of"),
        ("attention", "op=pack", "op=pack must be one of attention, gathered_attention"),
        ("verify", "alpha=2", "alpha=2 must be a share from 0 to 1, such as 0.9"),
        ("select", "k=9,n=8", "k=9 must be at most n=8"),
        ("select", "scores=float64", "scores=float64 must be one of"),
        ("select", "op=hash_select,R=48", "R=48 must be one of 32, 64, 128, 256"),
        ("hata", "n=32K", "n=32768 must be below S=32768"),
        ("quality", "op=flips,B=8/0", "B=8/0 must be whole numbers of 1 or more, such as 32/8"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused_before_anything_runs(
    suite, text, message, capsys, monkeypatch
):
    monkeypatch.setattr("bench.__main__._run", lambda *arguments: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        main([suite, "--case", text])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_a_case_is_the_default_with_its_options():
    default = {"B": 8, "S": 32768, "alpha": 0.9, "heads": "32/8"}
    assert parse("B=4,S=128K,alpha=0.3", default) == default | {"B": 4, "S": 131072, "alpha": 0.3}
    assert parse("", default) == default


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_no_default_case_comes_twice(name, device, monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: device)
    bench = benchmark(name)
    for quick in (True, False):
        cases = [tuple(case.items()) for case in bench.grid(Settings(quick=quick))]
        assert cases
        assert len(set(cases)) == len(cases)


def test_the_bytes_of_a_case_are_those_that_it_reads():
    case = benchmark("attention").case(f"{CACHE},lengths=ragged")
    total = int(caches.lengths(case).sum())
    # Keys and values of two heads, queries and outputs of four; 16 numbers of two bytes.
    around = 2 * 16 * 2 * 4 * 2 * 3
    assert attention.attention_setup(case).bytes == 2 * 16 * 2 * 2 * total + around
    case = benchmark("gathered_attention").case(f"{CACHE},n=20,indices=per-head")
    expected = 2 * 16 * (2 * 2 * 2 * 23) + around + 4 * 2 * 2 * 20
    assert attention.gathered_setup(case).bytes == expected


def test_a_suite_runs_the_cases_of_each_operation_and_writes_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("bench.ceilings.SMALL", 2**16)
    path = tmp_path / "deep" / "select.json"
    texts = ("rows=3,n=200,k=9", f"op=hash_select,{CODES},S=64,n=9,R=64")
    options = [x for text in texts for x in ("--case", text)]
    assert main(["select", *options, "--backend", "xla", "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert [row["operation"] for row in result["rows"]] == ["select", "hash_select"]
    out = capsys.readouterr().out
    assert "no device clock" in out
    assert max(map(len, out.splitlines())) <= 100
    assert point.DEVICE.reason is not None
