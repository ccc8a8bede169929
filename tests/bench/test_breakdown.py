"""The suite `vegas-breakdown`: parts of an iteration, their floors, their check and their table."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import breakdown, point
from bench.__main__ import main
from bench.decode import catalogue, draft_check, drafting, floors, iterations, parts, phases, shapes
from bench.decode.iterations import Drafting, Shape
from bench.settings import DecodeSettings, Settings
from jspec.decode.state import Models
from jspec.models.decoder import Decoder
from jspec.ops.quantized import MXFP4, Quantized
from tests.bench.test_decode import SPECS, TINY
from tests.bench.test_report import MACHINE

ONE = dataclasses.replace(TINY, layers=SPECS[:1])
LIMITS = shapes.Ceilings(1e9, None)  # a byte a nanosecond
STEP = "jit(decode_chunk)/while/body/closed_call"
MADE = {
    "fusion_1": f"{STEP}/draft/while/body/closed_call/linear/mul",
    "fusion_2": f"{STEP}/verification/scored_attention/exp",
    "fusion_3": f"{STEP}/verification/collection/sum",
    "fusion_4": f"{STEP}/verify_and_commit/add",
    "fusion_5": f"{STEP}/draft/compaction/gather",
    "fusion_6": "reduce_sum",
}


def test_a_kernel_belongs_to_the_phase_that_runs():
    ran = [
        ("nvjet_tst_64x8", 1),  # before any that is known: the first phase
        ("fusion_1", 2),
        ("gathered_kernel", 4),
        ("fusion_5", 8),
        ("fusion_2", 16),
        ("nvjet_tst_64x8", 32),
        ("fusion_3", 64),
        ("row_kernel", 128),
        ("weights_kernel", 256),
        ("fusion_6", 512),
        ("commit_kernel", 1024),
        ("fusion_4", 2048),
    ]
    found = phases.by_part(ran, MADE)
    assert found["draft passes"] == {"attention": 4, "products": 1, "rest": 2}
    assert found["compaction"]["rest"] == 8
    assert found["verification"] == {"attention": 16, "products": 32, "rest": 512}
    assert sum(found["collection"].values()) == 64 + 256
    assert found["selection"]["rest"] == 128
    assert found["bookkeeping"]["rest"] == 1024 + 2048


# The most rounding of the reference that is judged, over what there is; how far from float32 the
# other is, over the same; and whether it is right.
TRIALS = [(1.2, 1.3, True), (1.2, 1.8, False), (0.8, 1.3, False)]


def made(text: str, gamma: int, batch: int = 2, context: int = 100) -> iterations.Iteration:
    model = shapes.random_model(ONE)
    settings = Settings(decode=DecodeSettings(steps=1))
    wanted = [Drafting("own", text, gamma)]
    (found,) = iterations.iterations(model, Shape("tiny", batch, context), wanted, settings, LIMITS)
    return found


@pytest.mark.parametrize(
    ("text", "scopes"),
    [
        ("vegas:budget=0.1,least=0", {"draft", "verification", "collection", "selection"}),
        ("streaming:window=0.1", {"draft", "verification", "compaction"}),
    ],
)
def test_a_compiled_iteration_names_its_parts(text, scopes):
    program = made(text, 2).lowerings()["chunk"]().as_text(debug_info=True)
    for scope in ("draft", "verification", "collection", "selection", "compaction"):
        assert (f"/{scope}/" in program or f"{scope}/" in program) == (scope in scopes), scope


def test_floors_are_bytes_of_what_each_part_reads():
    shape = jax.tree.map(lambda x: x, Decoder(ONE, dtype=jnp.bfloat16, rngs=None))
    weights = 2 * sum(x.size for x in jax.tree.leaves(shape)) - 2 * 128 * 32
    row = 2 * 2 * 16 * 2  # bytes of a key and its value

    def of(text: str, gamma: int = 4):
        drafter = Drafting("own", text, gamma)
        model = shapes.random_model(ONE)
        models = drafter.config.draft.prepare(Models(model))
        found = floors.of_iteration(models, 2, 1000, drafter.config, LIMITS)
        return {part: round(ns) for part, ns in found.items()}

    plain = of("none", 0)
    assert plain == {"verification": weights + 2 * 1000 * row, "bookkeeping": 4 * 2 * 128}
    vegas = of("vegas:budget=0.125,least=0")
    assert vegas["draft passes"] == 4 * (weights + 2 * 126 * row)
    assert vegas["verification"] == plain["verification"]
    assert vegas["collection"] == vegas["selection"] == 4 * 2 * 2 * 1000
    assert vegas["bookkeeping"] == 5 * 4 * 2 * 128
    # Codes of 16 bytes a key and KV head, at the third draft token alone.
    refreshed = of("vegas:budget=0.125,least=0,refresh=2")
    assert refreshed["selection"] == vegas["selection"] + 2 * 1000 * 2 * 16
    assert refreshed["draft passes"] == vegas["draft passes"]
    streaming = of("streaming:window=0.125")
    assert streaming["compaction"] == 2 * 2 * 126 * row
    assert "selection" not in streaming
    # Two vectors a page of 16 are half a key for eight positions.
    quest = of("quest:budget=0.125,dense_layers=0")
    assert quest["selection"] == 4 * 2 * 1000 * row / 16
    chain = of("suffix > vegas:budget=0.125,least=0,quantized=int8; inner=3, rounds=2")
    less = vegas["draft passes"] / 4 - chain["draft passes"] / 2
    kernels = weights - 2 * (2 * 32 + 32)  # all but the norms
    columns = (64 + 32 + 32) + 32 + 2 * 64 + 32 + 128
    assert less == kernels / 2 - 4 * columns
    narrow = of("vegas:budget=0.125,least=0,quantized=mxfp4")
    less = vegas["draft passes"] - narrow["draft passes"]
    assert less == 4 * kernels * (1 - 4.25 / 16)
    assert of("ngram").keys() == plain.keys()


def test_drafts_share_a_copy_of_their_kind():
    texts = ["suffix > vegas:quantized=int8", "vegas:quantized=int8", "vegas:quantized=mxfp4"]
    wanted = [Drafting(text, text, 3) for text in [*texts, "vegas"]]
    settings = Settings(decode=DecodeSettings(steps=1))
    model, at = shapes.random_model(ONE), Shape("tiny", 2, 100)
    found = iterations.iterations(model, at, wanted, settings, LIMITS)
    chain, int8, mxfp4, own = (iteration._models.draft for iteration in found)
    assert chain is int8
    assert own is None
    kinds = [type(copy.layers[0].mlp.down.kernel.get_value()) for copy in (int8, mxfp4)]
    assert kinds == [Quantized, MXFP4]


def test_one_wrong_position_is_an_error_and_so_is_a_wrong_row():
    wanted = jax.random.normal(jax.random.key(0), (4, 10, 50))
    assert draft_check._error(wanted, wanted) == 0
    for wrong in (np.s_[2, 7], np.s_[:, 3], np.s_[1]):
        assert draft_check._error(wanted.at[wrong].set(0), wanted) >= 0.1
    found, known = wanted.at[1].set(0), jnp.ones((4, 10), bool).at[1].set(False)
    assert draft_check._error(found, wanted, known) == 0
    assert not draft_check._error(wanted * jnp.nan, wanted) <= 1


def rows() -> list[dict]:
    """A step of 10 ms, its verification alone 11 and an iteration of Vegas 40."""
    nothing = {part: dict.fromkeys(parts.PARTS, 0) for part in phases.PARTS}
    every = {
        "plain": (10, {"verification": {"attention": 5, "products": 4, "rest": 0}}),
        "verification": (11, {"verification": {"attention": 6, "products": 4, "rest": 0}}),
        "vegas": (
            40,
            {
                "draft passes": {"attention": 5, "products": 20, "rest": 1},
                "verification": {"attention": 7, "products": 4, "rest": 0},
                "collection": {"attention": 0, "products": 0, "rest": 0.5},
                "selection": {"attention": 0, "products": 0, "rest": 0.5},
            },
        ),
    }
    found = []
    for name, (ms, kinds) in every.items():
        case = {"model": "qwen3-8b", "layers": 36, "B": 4, "S": 122880}
        case |= {"gamma": 0 if name == "plain" else 9, "draft": name}
        own = {"operation": "iteration", "case": case, "name": name, "checked": "2 layers"}
        own["parts_ns"] = {
            part: {kind: 1e6 * x for kind, x in found.items()}
            for part, found in (nothing | kinds).items()
        }
        own |= {"step_ns": [ms * 10**6] * 5, "idle": 0.1}
        own["floors_ns"] = {"verification": 8e6}
        if name == "vegas":
            own["floors_ns"] |= {"draft passes": 13e6, "collection": 0.5e6}
        found.append(own)
    return found


RESULT = {
    "suite": "vegas-breakdown",
    "machine": MACHINE,
    "rows": rows(),
    "read_ceiling_bytes_per_s": 4e12,
}


def test_collection_is_what_attention_takes_beyond_the_pass_alone():
    every = rows()
    found = breakdown.parts_of(every[2], every)
    assert found["collection"] == pytest.approx(1.5e6)
    assert found["verification"] == pytest.approx(10e6)
    assert breakdown.overhead(every[2], found) == pytest.approx(2 / 38)
    assert breakdown.parts_of(every[2], every[2:]) == {}
    assert breakdown.overhead(every[0], breakdown.parts_of(every[0], every)) is None


def test_the_table_fits_and_names_random_weights(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result = json.loads(json.dumps(RESULT))
    for own in result["rows"]:
        own["case"] |= {"model": "gpt-oss-20b-attention", "B": 128}
        own["step_ns"] = [123456789] * 5
    breakdown.show(result)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "random weights" in out
    lines = [line.split() for line in out.splitlines() if line.startswith("vegas")]
    assert lines == [["vegas", "26.00", "(2.0x)", "10.00", "(1.2x)", "1.50", "(3.0x)", "0.500"]]


def test_the_report_says_where_the_time_goes(tmp_path):
    pytest.importorskip("matplotlib")
    from bench import report

    folder = tmp_path / "results" / "some"
    folder.mkdir(parents=True)
    (folder / "vegas-breakdown.json").write_text(json.dumps(RESULT))
    (tmp_path / "docs").mkdir()
    report.write(tmp_path / "results", tmp_path / "docs")
    text = (tmp_path / "docs" / "RESULTS.md").read_text()
    assert "| vegas | 9 | 40.00 | 1.86 | " in text
    assert "| 5.3% |" in text
    assert (tmp_path / "docs" / "some-vegas-breakdown.png").exists()


def test_what_cannot_be_a_case_is_said():
    assert drafting.case("B=8,gamma=5")["S"] == 122880
    for text in ("model=llama", "B=0", "T=2"):
        with pytest.raises(ValueError, match="must be"):
            drafting.case(text)


@pytest.mark.parametrize(("most", "times", "right"), TRIALS)
def test_rounding_says_what_is_wrong_beyond_the_tolerance(most, times, right, monkeypatch):
    iteration = made("none", 2)
    check, blueprint = iteration._check, iteration._blueprint
    filled = blueprint.filled(ONE.vocab_size)
    state = dataclasses.replace(blueprint.rewound(filled), draft=iteration._jitted_drafter_state())
    wanted, exact = [], []
    in_float32 = check._in_float32

    def reference(*arguments):
        config = dataclasses.replace(check._config, backends=draft_check.REFERENCE)
        wanted.append(draft_check._iteration(*arguments, config))
        return wanted[-1]

    def widened(*arguments):
        exact.append(in_float32(*arguments))
        return exact[-1]

    assert check.wrong(state, {"own": reference, "reference": reference}) == (None, 0)
    monkeypatch.setattr(check, "_in_float32", widened)
    monkeypatch.setattr(draft_check, "TOLERANCE", -1)
    check.wrong(state, {"own": reference, "reference": reference})
    target, off = exact[0].target, wanted[0].target - exact[0].target
    rounding = draft_check._error(wanted[0].target, target, overall=True)
    assert 1e-3 < rounding < 0.05  # of bfloat16

    def other(*arguments):
        return dataclasses.replace(wanted[0], target=target + times * off)

    monkeypatch.setattr(draft_check, "MAX_ROUNDING", most * rounding)
    monkeypatch.setattr(draft_check, "TOLERANCE", 0.1 * rounding)
    reason, error = check.wrong(state, {"own": other, "reference": reference})
    largest = draft_check._error(wanted[0].target, target)
    assert error == pytest.approx((times - 1) * largest, rel=0.05)
    assert (reason is None) == right
    assert right or "of float32" in reason


@pytest.mark.slow
def test_a_wrong_draft_is_found_and_a_right_one_is_timed(tmp_path, monkeypatch):
    monkeypatch.setitem(catalogue.MODELS, "qwen3-8b", ONE)
    monkeypatch.setattr(drafting, "read_ceiling", lambda: 1e10)

    class Device:
        reason = None

        def kernels(self, call):
            call()
            return [("attention_kernel", 1000), ("loop_add_fusion", 400)]

    monkeypatch.setattr(point, "DEVICE", Device())
    path = tmp_path / "out.json"
    asked = ["vegas-breakdown", "--case", "B=2,S=300,gamma=2", "--json", str(path)]
    names = [x for name in ("vegas", "streaming", "plain") for x in ("--backend", name)]
    assert main([*asked, *names]) == 0
    found = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert {row["checked"] for row in found.values()} == {"1 layer"}
    assert all(len(row["step_ns"]) == 3 and row["kernels"] == 2 for row in found.values())
    right = draft_check.run_target

    def late(models, state, drafted, config):
        if config.backends:  # the reference
            state = dataclasses.replace(
                state, cache=state.cache.with_lengths(state.cache.lengths - 9)
            )
        return right(models, state, drafted, config)

    monkeypatch.setattr(draft_check, "run_target", late)
    jax.clear_caches()
    assert main([*asked, "--backend", "vegas"]) == 1
    (row,) = json.loads(path.read_text())["rows"]
    assert row["checked"] is False
    assert "from the reference's" in row["reason"]
    jax.clear_caches()
