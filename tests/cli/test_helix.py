"""`jspec generate --helix` in process, on 8 virtual devices."""

import json
import subprocess
import sys

import jax
import pytest

EIGHT = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@EIGHT
def test_a_mesh_gives_the_tokens_of_one_device(run, source):
    arguments = ["--prompt-file", source, "--draft", "none", "--max-new-tokens", "4", "--json"]
    mesh = "kvp=2,overlap=2,up_projection=after"
    code, out, err = run(*arguments, "--helix", mesh, "--devices", "8")
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == json.loads(run(*arguments)[1])["tokens"]
    assert json.loads(out)["environment"]["devices"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--helix", "kvp=2,tqa=1"], "--helix 'kvp=2,tqa=1' has no setting 'tqa=1'; it has kvp="),
        (["--helix", "kvp=two"], "kvp='two' must be a whole number"),
        (["--helix", "overlap=2"], "overlap=2 cuts the exchange"),
        (["--helix", "up_projection=now"], "up_projection='now' must be one of auto, before"),
        (["--helix", "kvp=2,exchange=pallas"], "exchange='pallas' cannot run here: "),
        (["--helix", "kvp=99"], "kvp=99 times tpa=1 needs 99 devices and this machine has"),
        (["--helix", "kvp=4"], "6 query heads, which do not divide into kvp=4"),
        (["--helix", "kvp=2", "--devices", "0"], "--devices 0 must be at least 1"),
        (
            ["--helix", "kvp=2", "--devices", "3"],
            "--devices 3: JAX already runs on 8 devices of cpu",
        ),
        (["--helix", "kvp=2", "--draft", "quest"], "Quest("),
        (["--hosts", "auto"], "--hosts needs --helix"),
        (["--helix", "kvp=2", "--hosts", "port=1"], "has no setting 'port=1'; it has coordinator="),
        (["--helix", "kvp=2", "--hosts", "coordinator=x"], "coordinator='x' must be an address"),
    ],
    ids=str,
)
@EIGHT
def test_what_does_not_fit_is_one_line(arguments, message, run, source):
    code, out, err = run("--prompt-file", source, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_virtual_devices_in_another_process():
    script = (
        "from jspec.cli.devices import take_devices\n"
        "take_devices(3, None)\nimport jax\nassert jax.device_count() == 3"
    )
    clean = {"PATH": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, env=clean)
