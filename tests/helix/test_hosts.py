"""Several processes decode as one device does; what goes wrong in one ends all, with its reason."""

import json
import os
import shutil
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jspec
from jspec import processes
from jspec.decode import chunks
from jspec.decode.programs import Programs
from jspec.helix import Hosts
from jspec.policies.named import made
from jspec.processes import all_or_none, check_devices, from_all, from_first, in_time
from tests.decode.common import STREAMING
from tests.helix.processes import (
    DRAFTS,
    NGRAM,
    SEEDED,
    TEXTS,
    drafted,
    ends_of,
    free_port,
    grown,
    served,
    start,
    tokens_of,
)
from tests.models.goldens import GOLDEN

LOST = 10  # seconds
SOON = 120  # seconds, most of which two processes take to start on a busy machine
CHANGED = "a copy of the model with another last byte"


def results_of(check: str, devices: int) -> list[dict]:
    port = str(free_port())
    started = [
        start("tests.helix.processes", check, port, "2", str(index), devices=devices)
        for index in range(2)
    ]
    ends = ends_of(started)
    assert [code for code, _, _ in ends] == [0, 0], "\n".join(error for *_, error in ends)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ends]


@pytest.mark.slow
def test_two_processes_decode_as_one_device_does():
    first, second = results_of("together", devices=1)
    fails = (first.pop("fails in one"), second.pop("fails in one"))
    assert fails == ("ElsewhereError: process 1: the disk is full", "OSError: the disk is full")
    # Of eight experts each reads its own, and of every other weight what it needs.
    whole = jspec.load_model(GOLDEN / "deepseek_v3")
    mixture: Any = whole.layers[1].mlp
    kernel = np.asarray(mixture.experts.down.kernel.get_value())
    for index, result in enumerate((first, second)):
        experts = {int(name.split(".experts.")[1].split(".")[0]) for name in result.pop("read")}
        assert experts == set(range(4 * index, 4 * index + 4))
        np.testing.assert_array_equal(result.pop("experts"), kernel[4 * index : 4 * index + 4])
    assert first == second
    assert first["devices"] == [2, 1]
    assert first["shards"] == [[40 // 2, 32]]
    model = jspec.load_model(GOLDEN / "qwen3")
    assert first["tokens"] == [list(row) for row in tokens_of(model, draft=NGRAM)]
    assert first["grown"] == [list(row) for row in grown(model)]
    for scores, alone in zip(first["scores"], jspec.score_tokens(model, TEXTS), strict=True):
        np.testing.assert_allclose(scores, alone, rtol=0, atol=1e-5)
    assert all(0 < len(row) < 12 for row in first["ended by process 0"][0])
    assert first["all"] == [{"index": 0, "text": ""}, {"index": 1, "text": "é" * 300}]
    assert first["first"] == 0
    assert "process 1 has other y than process 0; give every process" in first["same"]
    assert "needs 4 devices and 2 processes have 2 (cpu); lower kvp" in first["mesh"]
    assert "takes 1 devices and 2 processes have 2, all of which" in first["small mesh"]
    assert "process 1 has other settings than process 0" in first["prompts"]
    assert "needs 52 slots" in first["capacity"]


@pytest.mark.slow
def test_two_processes_with_two_devices_each_draft_as_one_device_does():
    first, second = results_of("drafts", devices=2)
    assert first == second
    model = jspec.load_model(GOLDEN / "qwen3")
    for name in DRAFTS:
        assert first[name] == [list(row) for row in drafted(model, model, name)], name


@pytest.mark.slow
def test_two_processes_serve_as_one_device_does():
    """An engine with a shared prefix, a cancelled request and one that its callback ends."""
    first, second = results_of("engines", devices=2)
    assert first == second
    alone = json.loads(json.dumps(served(jspec.load_model(GOLDEN / "qwen3"))))
    assert first == alone
    assert first["ends"] == ["length"] * 3 + ["stop", "cancelled"]
    assert 1 < len(first["stopped"]) < 12


@pytest.mark.slow
def test_processes_that_differ_are_all_told_what_differs():
    begin = time.monotonic()
    first, second = results_of("unequal", devices=1)
    assert time.monotonic() - begin < SOON
    for name, raised, message in (
        ("disk", "OSError", "the disk is full"),
        ("missing", "CheckpointError", "nowhere is no directory"),
        ("more devices", "ValueError", "kvp=4 times tpa=1 needs 4 devices"),
    ):
        assert first[name].startswith("ElsewhereError: process 1: ")
        assert second.pop(name).startswith(f"{raised}: ")
        assert message in first.pop(name)
    assert first == second
    assert first.pop("no difference") == "no error"
    named = {"config": "model files", "bytes": "model files", "mesh": "mesh settings"}
    named["version"] = "versions of jspec and JAX"
    for name, error in first.items():
        told = f"ValueError: process 1 has other {named.get(name, name)} than process 0; give every"
        assert error.startswith(told), name


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unequal", "joined-by-itself"])
def test_processes_with_different_numbers_of_devices_are_all_told(how):
    """Where `Hosts` joins them, and where `jax.distributed` did."""
    port, begin = str(free_port()), time.monotonic()
    both = [
        start("tests.helix.processes", how, port, "2", str(index), devices=1 + index)
        for index in range(2)
    ]
    for code, _, error in ends_of(both):
        assert code == 1
        assert "ValueError: processes have different numbers of devices: process 0 has 1, " in error
        assert "process 1 has 2; give each as many" in error
    assert time.monotonic() - begin < SOON


def test_different_numbers_of_devices_are_refused(monkeypatch):
    devices = [types.SimpleNamespace(process_index=index) for index in (0, 1, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match="process 0 has 1, process 1 has 2; give each as many"):
        check_devices()
    monkeypatch.setattr(jax, "devices", lambda: devices[:2])
    check_devices()


def test_a_measured_gamma_is_that_of_process_0(monkeypatch, tiny):
    asked = []

    def of_first(gamma: int) -> int:
        asked.append(gamma)
        return 2

    monkeypatch.setattr(chunks, "is_shared", lambda model: True)
    monkeypatch.setattr(chunks, "agreed", of_first)
    result = jspec.generate(tiny, [[1, 2, 3]], SEEDED, draft=STREAMING, gamma="auto")
    assert asked
    assert [gamma for gamma, _ in result.stats.steps_at_gamma] == [2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model with a tokenizer, as the command takes it."""
    from jspec.models.bundled import bundled_path
    from tests.conftest import OF_BYTES, make_decoder

    path = tmp_path_factory.mktemp("models") / "model"
    jspec.save_model(make_decoder(OF_BYTES), path)
    (path / "tokenizer.json").write_bytes((bundled_path() / "tokenizer.json").read_bytes())
    return path


def command(index: int, port: int, *arguments, processes: int = 2, wait: int = 120):
    hosts = f"coordinator=127.0.0.1:{port},processes={processes},index={index}"
    return start(
        *("jspec", "generate", "--helix", "kvp=2", "--no-compile-cache", "--ignore-eos"),
        *("--hosts", f"{hosts},start_timeout={wait},lost_timeout={LOST}"),
        *("--prompt", "def add(a, b):", *map(str, arguments)),
    )


@pytest.mark.slow
def test_the_command_prints_in_process_0_alone(folder, tmp_path):
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "def add(a, b):", "temperature": 0.9}\n')
    port, out = free_port(), tmp_path / "out.jsonl"
    arguments = ["--model", folder, "--max-new-tokens", 12, "--json"]
    ends = ends_of([command(index, port, *arguments) for index in range(2)])
    assert [(code, error) for code, _, error in ends] == [(0, ""), (0, "")]
    assert ends[1][1] == ""
    alone = ends_of([start("jspec", "generate", "--prompt", "def add(a, b):", "--ignore-eos",
                           *map(str, arguments))])  # fmt: skip
    assert json.loads(ends[0][1])["tokens"] == json.loads(alone[0][1])["tokens"]
    port = free_port()
    each = [
        start(
            *("jspec", "generate", "--helix", "kvp=2", "--requests", str(requests)),
            *("--output", str(out), "--max-new-tokens", "12", "--model", str(folder)),
            *("--hosts", f"coordinator=127.0.0.1:{port},processes=2,index={index}"),
        )
        for index in range(2)
    ]
    assert [code for code, *_ in ends_of(each)] == [0, 0]
    assert len(json.loads(out.read_text())["tokens"]) == 12


@pytest.mark.slow
def test_open_mpi_says_who_is_who(folder):
    """JAX takes the port from the number of the job."""
    job = os.getpid() % 4096 * 4096
    both = [
        start(
            *("jspec", "generate", "--helix", "kvp=2", "--hosts", "auto,lost_timeout=10"),
            *("--prompt", "x", "--model", str(folder), "--max-new-tokens", "3", "--json"),
            OMPI_MCA_orte_hnp_uri=f"{job}.0;tcp://127.0.0.1:1",
            OMPI_COMM_WORLD_SIZE="2",
            OMPI_COMM_WORLD_RANK=str(index),
            OMPI_COMM_WORLD_LOCAL_RANK=str(index),
        )
        for index in range(2)
    ]
    first, second = ends_of(both)
    assert (first[0], second[0], second[1]) == (0, 0, "")
    assert json.loads(first[1])["environment"]["devices"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_one", "of_other", "message"),
    [
        ((), ("--seed", "5"), "process 1 has other requests than process 0"),
        ((), ("--model", CHANGED), "process 1 has other model files than process 0"),
        ((), ("--helix", "kvp=2,block=8"), "process 1 has other settings than process 0"),
        ((), ("--draft", "none"), "process 1 has other settings than process 0"),
        ((), ("--model", "nowhere"), "nowhere is no directory"),
        ((), ("--max-new-tokens", "0"), "max_new_tokens=0"),
        (("--max-new-tokens", "2000"),) * 2 + ("exceeds the context of 1024",),
    ],
    ids=["requests", "files", "mesh", "settings", "missing", "refused", "context"],
)
def test_what_differs_or_fails_is_said_by_all(of_one, of_other, message, folder, tmp_path):
    if CHANGED in of_other:
        changed = shutil.copytree(folder, tmp_path / "model")
        files = [file for file in changed.rglob("*") if file.is_file()]
        largest = max(files, key=lambda file: file.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[-1] ^= 1
        largest.write_bytes(content)
        of_other = ("--model", str(changed))
    port, begin = free_port(), time.monotonic()
    both = [
        command(i, port, "--model", folder, *options)
        for i, options in enumerate((of_one, of_other))
    ]
    for code, out, error in ends_of(both):
        assert (code, out) == (2, "")
        assert message in error
        assert len(error.splitlines()) == 1
    assert time.monotonic() - begin < SOON


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_processes_that_never_come_are_not_waited_for(index, folder):
    begin = time.monotonic()
    ((code, out, error),) = ends_of([command(index, free_port(), "--model", folder, wait=5)])
    assert (code, out) == (2, "")
    assert "not all of 2 processes have met within start_timeout=5 seconds at 127.0.0.1" in error
    assert time.monotonic() - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how"),
    [
        (1, signal.SIGKILL),
        (0, signal.SIGKILL),
        (1, signal.SIGTERM),
        (1, signal.SIGINT),
        (1, signal.SIGSTOP),
    ],
    ids=["killed", "first-killed", "ended", "interrupted", "stopped"],
)
def test_a_process_that_is_lost_ends_the_other(victim, how, folder):
    if signal.getsignal(how) == signal.SIG_IGN:
        pytest.skip("a shell's background job ignores Ctrl-C, and so does what it starts")
    port = free_port()
    both = [command(index, port, "--model", folder, "--max-new-tokens", 1000) for index in range(2)]
    stdout = both[0].stdout
    assert stdout is not None
    assert stdout.read(20)  # some chunks are done, and their programs compiled
    begin = time.monotonic()
    both[victim].send_signal(how)
    other = both[1 - victim]
    try:
        other.wait(timeout=60)
    finally:
        both[victim].kill()
        (code, _, error), lost = ends_of([other, both[victim]])
    assert time.monotonic() - begin < LOST + 20
    assert code != 0, lost
    assert "one may have ended" in error or "another task died" in error


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"processes": 0}, "processes=0 must be a positive int32"),
        ({"processes": 2, "index": 2}, "index=2 must be .* from 0 on, below processes=2"),
        ({"index": -1}, "index=-1 must be"),
        ({"coordinator": "somewhere"}, "coordinator='somewhere' must be an address and a port"),
        ({"coordinator": ":80"}, "coordinator=':80' must be"),
        ({"step_timeout": 0}, "step_timeout=0 must be a positive int32"),
        ({"coordinator": "host:99999"}, "coordinator='host:99999' must be"),
        ({"start_timeout": 0}, "start_timeout=0"),
        ({"lost_timeout": 1.5}, "lost_timeout=1.5"),
    ],
    ids=str,
)
def test_hosts_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Hosts(**settings)


class Endless:
    """For a jitted function: a program that runs until ``over`` is set."""

    def __init__(self, over: threading.Event) -> None:
        self.over = over

    def lower(self) -> "Endless":
        return self

    def compile(self) -> Callable[[], bool]:
        return lambda: self.over.wait(10)


def test_a_program_that_takes_longer_than_a_step_may_ends_the_process(monkeypatch, capfd):
    ends, over = [], threading.Event()

    def end(code: int) -> None:
        ends.append(code)
        over.set()

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(processes, "_step_timeout", 0.2)
    programs = Programs()
    assert programs(Endless(over))
    assert ends == [1]
    error = capfd.readouterr().err
    assert error.startswith("jspec: error: a step has not finished within step_timeout=0.2 seconds")
    assert error.count("\n") == 1
    assert programs(jax.jit(lambda x: x + 1), 1) == 2
    with in_time():
        pass
    timers = [x for x in threading.enumerate() if isinstance(x, threading.Timer)]
    for timer in timers:
        timer.join(5)  # those of blocks that have ended go at once
    assert ends == [1]


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "where"), [(1, "collective"), (0, "callback")])
def test_a_process_that_is_alive_and_stuck_ends_the_other(victim, where):
    """It goes on giving signs of life; the other would wait for it without an end."""
    port, begin = str(free_port()), time.monotonic()
    both = [
        start("tests.helix.processes", f"stuck-{victim}-{where}", port, "2", str(index))
        for index in range(2)
    ]
    ends = ends_of(both)
    assert time.monotonic() - begin < 240
    (code, _, error), (lost, *_) = ends[1 - victim], ends[victim]
    assert code == 1, error
    assert "has not finished within step_timeout=20 seconds" in error
    assert lost != 0


def test_hosts_from_text():
    text = "coordinator=[::1]:80,processes=3,index=0,lost_timeout=9,step_timeout=7"
    assert made(Hosts, "--hosts", text, text) == Hosts("[::1]:80", 3, 0, 300, 9, 7)
    with pytest.raises(ValueError, match=r"--hosts .*: processes='two' must be a number"):
        made(Hosts, "--hosts", "x", "processes=two")


def test_a_process_alone_gets_what_it_sends():
    assert from_all({"x": 1}) == [{"x": 1}]
    assert from_first("x") == "x"
    with pytest.raises(KeyError), all_or_none():
        raise KeyError("x")
