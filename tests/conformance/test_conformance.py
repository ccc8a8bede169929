"""The conformance tool: right verifiers hold every law, and each fault shows its class."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jspec
from jspec.config import SamplingParams
from jspec.conformance import rules
from jspec.conformance.command import judge, main, parser
from jspec.conformance.laws import ALARM, FAULTS, LAWS, Finding, check, diagnosis, law_of
from jspec.conformance.statistics import binomial_test, chi2_tail, g_test, poisson_tail
from jspec.ops import vocabulary as vocabulary_module
from tests.conformance import verifiers
from tests.ops.laws import filtered_law
from tests.parameters import default_run

CHEAP = tuple(name for name in LAWS if name != "tail")
WRONG = {
    "shared": "accepted tokens",
    "residual": "one draft token",
    "top_p": "top-p",
    "bfloat16": "rounding",
    "block_residual": "block",
    "eager": "acceptance",  # 2 % too often
    "reused": "steps",
}


def in_process(arguments: list[str]) -> int:
    """The exit code of the command, whose laws run in this process."""
    return judge(parser().parse_args(arguments))


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_right_verifier_holds_every_law(name):
    """Written in NumPy with a generator of its own."""
    findings = list(check(getattr(verifiers, name), CHEAP, rows=10_000))
    assert diagnosis(findings) is None
    assert min(finding.p_value for finding in findings) > 1e-4


@pytest.mark.parametrize(
    ("name", "law"),
    default_run({name: (name, law) for name, law in WRONG.items()}, "shared", "residual", "top_p"),
)
def test_a_fault_shows_its_class(name, law):
    """At p < 1e-9, of 20,000 requests a law; what comes before in the order holds."""
    findings = list(check(getattr(verifiers, name), CHEAP, rows=20_000))
    assert diagnosis(findings) == FAULTS[law]
    assert next(x.p_value for x in findings if x.law == law) < ALARM


def test_a_fault_of_acceptance_shows_where_that_law_alone_is_asked_for(capsys):
    name = "tests.conformance.verifiers:shared"
    settings = ["--verifier", name, "--rows", "20000", "--laws", "accepted tokens"]
    assert in_process(settings) == 1
    out = capsys.readouterr().out
    assert FAULTS["accepted tokens"].split(":")[0] in " ".join(out.split())
    assert "Every law holds" not in out


def test_to_accept_less_is_said_and_is_no_fault(capsys):
    """By the target's own draws: a lossless verifier whose draft counts by chance alone."""
    settings = ["--verifier", "tests.conformance.verifiers:careless", "--rows", "20000"]
    assert in_process([*settings, "--laws", "one draft token", "accepted tokens"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "FAILS" not in out
    assert "accepts less" in out
    assert "Every law holds" in out


@pytest.mark.parametrize("function", ["token_rule", "block_rule"])
def test_the_rules_of_jspec_hold(function, monkeypatch):
    monkeypatch.setattr(vocabulary_module, "TILE", 4)
    laws = ("one draft token", "block")
    findings = list(check(getattr(rules, function), laws, rows=10_000))
    assert min(finding.p_value for finding in findings) > 1e-4


@pytest.mark.slow
def test_numbers_of_23_bits_show_in_the_tail():
    [finding] = check(verifiers.few_bits, ("tail",))
    assert finding.p_value < ALARM
    assert diagnosis([finding]) == FAULTS["tail"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHEAP)
@pytest.mark.parametrize("function", ["token_rule", "block_rule"])
def test_a_thousand_seeds_raise_no_alarm(function, name, monkeypatch):
    """Of 500 requests each, 100 seeds in a call."""
    monkeypatch.setattr(vocabulary_module, "TILE", 4)
    law, p_values = LAWS[name], []
    for seed in range(10):
        result, of_outcomes = law.outcomes(law.problem, getattr(rules, function), 50_000, seed)
        for part in np.split(result, 100):
            p_values.append(g_test(np.bincount(part, minlength=of_outcomes.size), of_outcomes))
    assert len(p_values) == 1000
    assert min(p_values) > 1e-7


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_the_laws_are_those_of_the_suite(temperature, top_p):
    logits = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=top_p if temperature else 1.0)
    expected = [filtered_law(row, params) for row in logits]
    np.testing.assert_allclose(law_of(logits, temperature, params.top_p), expected, atol=2e-5)


def test_the_g_test_is_that_of_scipy():
    from scipy.stats import power_divergence

    law = np.array([0.5, 0.3, 0.2, 0.0])
    counts = np.array([530, 280, 190, 0])
    expected = power_divergence(counts[:3], 1000 * law[:3], lambda_="log-likelihood").pvalue
    assert g_test(counts, law) == pytest.approx(expected)
    assert g_test(np.array([530, 280, 190, 1]), law) == 0


def test_tails_are_those_of_scipy():
    from scipy.stats import binomtest, chi2, poisson

    for freedom in (1, 2, 3, 15, 80, 243):
        for x in (0.1, freedom, freedom + 40, 500):
            assert chi2_tail(x, freedom) == pytest.approx(chi2.sf(x, freedom), rel=1e-9)
    for count in (0, 1, 5, 40):
        for mean in (0, 0.01, 9.9):
            expected = poisson.sf(count - 1, mean)
            assert poisson_tail(count, mean) == pytest.approx(expected, rel=1e-9, abs=1e-300)
    for count in (0, 40, 60, 400, 8192):
        expected = binomtest(count, 8192, 0.0061).pvalue
        assert binomial_test(count, 8192, 0.0061) == pytest.approx(expected, rel=1e-6, abs=1e-250)


def test_a_verifier_may_have_numpy_s_usual_stream():
    """`default_rng(0)` of its own, which the suite's draws must not repeat."""
    findings = list(check(verifiers.OwnStream(0), CHEAP, rows=10_000))
    assert diagnosis(findings) is None


def test_the_suite_needs_numpy_alone(tmp_path):
    """Besides what `import jspec` itself loads."""
    source = Path(verifiers.__file__).read_text().replace("import jax.numpy as jnp\n", "")
    (tmp_path / "mine.py").write_text(source)
    script = (
        "import sys, importlib.abc, jspec, numpy\n"
        "class Refuse(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        root = name.partition('.')[0]\n"
        "        if root not in {*sys.stdlib_module_names, 'jspec', 'numpy', 'mine'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from jspec.conformance.command import judge, parser\n"
        "laws = ['greedy', 'one draft token', 'block']\n"
        "settings = ['--verifier', 'mine:token', '--rows', '2000', '--laws', *laws]\n"
        "sys.exit(judge(parser().parse_args(settings)))\n"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(jspec.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_to_accept_little_is_no_fault():
    little = Finding("accepted tokens", 0.0, 1000, 0.1)
    assert diagnosis([Finding("one draft token", 0.5, 1000, 0.1), little]) is None
    # Unless nothing says that the tokens have the right law.
    assert diagnosis([little]) == FAULTS["accepted tokens"]


# --- the command -------------------------------------------------------------------------------


def run(capsys, *more: str):
    laws = ["--laws", "greedy", "one draft token", "top-p", "--rows", "5000"]
    code = in_process(["--verifier", f"tests.conformance.verifiers:{more[0]}", *laws, *more[1:]])
    return code, capsys.readouterr()


def test_the_table_names_the_fault(capsys):
    code, out = run(capsys, "top_p")
    assert code == 1
    assert "FAILS" in out.out
    assert FAULTS["top-p"][:30] in out.out
    assert max(map(len, out.out.splitlines())) <= 100


def test_json_is_one_line(capsys):
    code, out = run(capsys, "token", "--json")
    report = json.loads(out.out)
    assert code == 0
    assert report["fault"] is None
    assert [law["holds"] for law in report["laws"]] == [True] * 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "must be module:function"),
        ("no.such.module:f", "No module named"),
        ("math:nothing", "math has no function 'nothing'"),
        ("tests.conformance.verifiers:draw", "unexpected keyword argument"),
        ("tests.conformance.verifiers:no_block", r"1 to 3 ids below 5, then -1"),
        ("tests.conformance.verifiers:floats", "not integers"),
    ],
)
def test_what_is_no_verifier_is_refused(name, message, capsys):
    assert in_process(["--verifier", name, "--rows", "1000"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", "the verifier raises ZeroDivisionError: division by zero"),
        ("leaves", "the verifier exits, with status 0"),
    ],
)
def test_a_verifier_that_ends_is_no_verdict(name, message, capsys):
    assert in_process(["--verifier", f"tests.conformance.verifiers:{name}", "--rows", "1000"]) == 3
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_module_that_exits_is_no_verdict(tmp_path, monkeypatch, capsys):
    (tmp_path / "leaves_at_once.py").write_text("raise SystemExit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert in_process(["--verifier", "leaves_at_once:verify"]) == 3
    assert "leaves_at_once ends with SystemExit: 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ends_with_0", "the verifier ends the process, with status 0"),
        ("ends_with_7", "the verifier ends the process, with status 7"),
        ("crashes", "the verifier ends the process, by SIGSEGV"),
    ],
)
def test_a_verifier_that_ends_the_process_is_no_verdict(name, message, capfd):
    settings = ["--verifier", f"tests.conformance.ending:{name}", "--rows", "1000"]
    assert main([*settings, "--laws", "greedy", "one draft token"]) == 3
    out, err = capfd.readouterr()
    assert err == f"jspec.conformance: {message}\n"
    assert out.count("holds") == (name == "ends_with_7")  # in the second law
    assert "Every law holds" not in out


@pytest.mark.parametrize(("name", "code"), [("token", 0), ("raises", 3)])
def test_the_command_has_the_exit_code_of_its_laws(name, code, capfd):
    settings = ["--verifier", f"tests.conformance.ending:{name}", "--rows", "1000"]
    assert main([*settings, "--laws", "greedy"]) == code
    assert ("Every law holds" in capfd.readouterr().out) == (code == 0)
