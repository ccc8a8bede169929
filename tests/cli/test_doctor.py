"""`jspec doctor`."""

import dataclasses
import io
import json
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import jax
import numpy as np
import pytest
from rich.console import Console

from jspec.cli import doctor, main
from jspec.dispatch import Backend, always
from jspec.extras import install_gpu
from jspec.ops import operations
from jspec.ops.attention.dense import ATTENTION
from jspec.ops.packing import PACK, pack_xla


def test_doctor_finds_what_decoding_needs(capsys, monkeypatch):
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: (ATTENTION,))
    assert main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert "attention, xla_blocked" in captured.out
    assert captured.err == f"{doctor.PATIENCE}\n"


def test_doctor_looks_at_one_operation_alone(capsys):
    assert main(["doctor", "--only", "pack", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    named = [finding["what"] for finding in report["findings"]]
    assert named == [doctor._label(PACK, name) for name in PACK.backends]
    works = sum(finding["works"] for finding in report["findings"])
    assert report["verdict"] == f"pack runs here, on cpu: {works} of {len(named)} backends run."
    assert main(["doctor", "--only", "pick"]) == 2
    error = capsys.readouterr().err
    assert "--only 'pick' is no operation; name one of attention, " in error
    assert error.count("\n") == 1


NAMED = ("pack", "page_scores", "verify_greedy", "verify_stochastic", "sample")


# The tests of each operation run its cases by every backend.
@pytest.mark.parametrize(
    "names", [NAMED, pytest.param(None, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_doctor_json(names, capsys, monkeypatch):
    result = tuple(x for x in operations() if names is None or x.name in names)
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: result)
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    result = {f["what"]: f for f in report["findings"]}
    assert result["bundled model"]["works"]
    # That a backend does not run here is no reason to do anything.
    assert {f["what"] for f in report["findings"] if f["advice"]} <= {"jax-triton", "GPU", "Python"}
    assert not [f["what"] for f in report["findings"] if "differs" in f["detail"]]

    assert result["pack, xla"]["works"]
    built = "cuda (C++)" if jax.default_backend() == "cpu" else "cuda"
    assert {f"{name}, {built}" for name in ("verify_greedy", "sample")} <= set(result)


def findings(capsys, code: int = 0) -> dict[str, dict]:
    assert main(["doctor", "--json"]) == code
    return {f["what"]: f for f in json.loads(capsys.readouterr().out)["findings"]}


def test_doctor_names_a_backend_that_refuses_or_is_wrong(capsys, monkeypatch):
    def double(kv, accepted):
        return kv[0] * 2, accepted, accepted[0]

    wrong = Backend("wrong", double, lambda *arguments: None)
    refuses = Backend("refuses", pack_xla, lambda *arguments: "needs a better machine")
    backends = {"xla": PACK.backends["xla"], "wrong": wrong, "refuses": refuses}
    toy = dataclasses.replace(PACK, backends=backends)
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: (toy,))
    result = findings(capsys)
    assert result["pack, wrong"]["detail"] == "all-accepted: differs from what it must give"
    assert result["pack, refuses"]["detail"] == "needs a better machine"
    assert result["pack, refuses"]["advice"] == ""


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU refuses none of these")
def test_a_kernel_for_gpus_says_that_a_cpu_is_none():
    """The reason of the last case is shown: not what a cache of 8 bits or odd sizes lack."""
    for operation in operations():
        if "triton" in operation.backends:
            case = [case for case in operation.cases() if case.small][-1]
            reason = operation.backend("triton").supports(*case.arguments, **case.static)
            assert str(reason).startswith("Triton needs an NVIDIA GPU"), operation.name


def test_a_backend_is_tried_on_the_cases_that_it_takes(capsys, monkeypatch):
    """Of attention there is one in float32 and one in bfloat16, which matrix units take."""

    def half(q, *_arguments, **_static):
        return None if q.dtype == "bfloat16" else f"q is {q.dtype}"

    def off(*arguments, **static):
        out, lse = ATTENTION.backend("xla").run(*arguments, **static)
        return out + 1, lse

    xla = ATTENTION.backend("xla")
    backends = {
        "xla": xla,
        "half": Backend("half", xla.run, half),
        "off": Backend("off", off, half),
    }
    toy = dataclasses.replace(ATTENTION, name="toy", backends=backends)
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: (toy,))
    result = findings(capsys)
    assert result["toy, xla"]["detail"] == "right"
    assert result["toy, half"]["works"]
    assert result["toy, half"]["detail"] == "right; refuses some cases: q is float32"
    assert result["toy, off"]["detail"] == "8-bits: differs from what it must give"


def test_doctor_compares_with_what_a_case_wants_and_to_three_digits(capsys, monkeypatch):
    """Of attention: what is off by a little is right, what is off by more is not."""

    def off(by: float) -> Backend:
        def run(*arguments, **static):
            out, lse = ATTENTION.backend("xla").run(*arguments, **static)
            return out + np.asarray(by, out.dtype), lse

        return Backend("xla", run, always)

    for by, code, observed in (
        (1e-3, 0, "right"),
        (0.1, 1, "three-tokens: differs from what it must"),
    ):
        toy = dataclasses.replace(ATTENTION, name="toy", backends={"near": off(by)})
        monkeypatch.setattr("jspec.cli.doctor.operations", lambda toy=toy: (toy,))
        # A backend that never refuses is one that decoding needs.
        assert findings(capsys, code)["toy, near"]["detail"].startswith(observed)


@pytest.mark.parametrize(
    ("gpu", "detail"),
    [
        (None, "cpu.json, for cpu: measured"),
        (
            ("NVIDIA H100 80GB HBM3", (9, 0)),
            "h100.json, for NVIDIA H100 80GB HBM3: measured",
        ),
        (
            ("NVIDIA H100 PCIe", (9, 0)),
            "h100.json, for NVIDIA H100 80GB HBM3: a guess, this is NVIDIA H100 PCIe",
        ),
    ],
    ids=["cpu", "measured", "another"],
)
def test_doctor_says_which_table_serves_and_whether_it_is_a_guess(gpu, detail, capsys, monkeypatch):
    monkeypatch.setattr("jspec.cli.doctor.gpu_in_use", lambda: gpu)
    monkeypatch.setattr("jspec.cli.doctor.operations", lambda: ())
    result = findings(capsys)["tuning"]
    assert result["detail"] == detail
    assert bool(result["advice"]) == detail.count("a guess")


@pytest.mark.parametrize(("installed", "advised"), [("0.3.1", True), ("0.4.1", False)])
def test_a_jax_triton_whose_kernels_are_not_captured_is_told(installed, advised, monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: installed)
    found = doctor._package("jax-triton")
    assert (found.works, found.detail) == (True, installed)
    assert ("'jax-triton>=0.4.1'" in found.advice) == advised


def test_what_a_gpu_needs_is_told_where_there_is_one(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "GPU_PYTHON", (3, 99))
    monkeypatch.setattr(doctor, "_has_driver", lambda: False)
    assert doctor._python().advice == ""
    assert doctor._package("jax-triton").advice == "nothing: GPUs alone need it"
    assert doctor._gpu().advice == "nothing: jspec decodes on the CPU"
    monkeypatch.setattr(doctor, "_has_driver", lambda: True)
    assert doctor._python().advice.startswith("for a GPU take 3.12 or newer")
    assert doctor._package("jax-triton").advice == install_gpu("cuda13")
    advice = doctor._gpu().advice
    assert install_gpu("cuda13") in advice
    assert install_gpu("cuda12") in advice
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    command = shlex.split(doctor._gpu().advice.partition(": ")[2])
    assert command[:2] == ["python", "-c"]
    run = [sys.executable, *command[1:]]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(run, capture_output=True, text=True, env=environment)
    assert ran.returncode == 1
    assert "RuntimeError: Unknown backend" in ran.stderr


def test_each_finding_is_shown_when_its_check_ends(capsys, monkeypatch):
    """And a check that fails ends itself alone."""
    recorded = []

    def check(name: str, works: bool, advice: str = ""):
        def look():
            recorded.append(capsys.readouterr())
            if name == "third":
                raise ImportError("no such\nmodule")
            return doctor.Finding(name, works, "seen [so]", advice)

        return name, look

    command = "pip install " + " ".join(f"'package-{n}<{n + 1}'" for n in range(9))
    checks = [check("first", True), check("second", False, command), check("third", True)]
    monkeypatch.setattr(doctor, "_checks", lambda: iter([*checks, check("bundled model", True)]))
    monkeypatch.setattr(doctor, "operations", lambda: ())
    assert main(["doctor"]) == 0
    rest = capsys.readouterr().out
    assert "".join(captured.err for captured in recorded) == f"{doctor.PATIENCE}\n"
    shown = [captured.out for captured in recorded]
    assert shown[0] == ""
    assert shown[1].split() == ["ok", "first", "seen", "[so]"]
    # What is to be done stands on a line of its own, however long, and can be copied.
    first, second = shown[2].splitlines()
    assert first.split() == ["--", "second", "seen", "[so]"]
    assert second == f"    to do: {command}"
    assert shown[3].split()[:5] == ["--", "third", "ImportError:", "no", "such\\nmodule"]
    assert rest.split()[:3] == ["ok", "bundled", "model"]
    assert "\njspec decodes here, on cpu: 0 of 0 backends run" in rest


def test_the_verdict_names_what_decoding_needs_and_has_not(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "operations", lambda: ())
    monkeypatch.setattr(doctor, "bundled_path", lambda: tmp_path)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert f"{tmp_path}/model.safetensors" in "".join(shown.split())
    assert "    to do: in a checkout: pip install --force-reinstall --no-deps ." in shown
    last = "jspec cannot decode here: bundled model must work. See what to do above."
    assert shown.splitlines()[-1] == last
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == last


def test_a_terminal_sees_what_is_looked_at(capsys, monkeypatch):
    """On stderr, where it is erased before a finding is shown on stdout."""
    screen = io.StringIO()
    kind = {"TERM": "xterm"}
    made = Console(file=screen, force_terminal=True, width=80, highlight=False, _environ=kind)
    monkeypatch.setattr(doctor, "console", lambda: made)
    finding = doctor.Finding("pack, xla", True, "right")
    for result in doctor._look(iter([("pack, xla", lambda: finding)])):
        assert result.seconds > 0
        assert re.search(r"probing pack, xla\.\.\. \S*0:00:00", screen.getvalue())
        assert screen.getvalue().endswith("\r\x1b[1A\x1b[2K")
    assert capsys.readouterr().out == ""


def test_on_a_gpu_doctor_says_how_many_copies_of_the_cache_there_are(monkeypatch):
    result = doctor._cache()  # a CPU has no kernel of ours for attention
    observed = "held twice by batches of two rows and more: attention runs by xla"
    assert result.detail.removesuffix("_blocked") == observed
    assert result.advice == install_gpu("cuda13")
    ours = dataclasses.replace(ATTENTION, backends={"triton": Backend("triton", print, always)})
    monkeypatch.setattr(type(ours), "order", lambda self, *args, **kwargs: ["triton"])
    monkeypatch.setattr(doctor, "ATTENTION", ours)
    assert doctor._cache().detail == "held once: attention runs by triton"
    assert "cache" not in dict(doctor._checks())
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert "cache" in dict(doctor._checks())


def test_every_operation_has_a_case_that_doctor_runs():
    for operation in operations():
        assert any(case.small for case in operation.cases()), operation.name
