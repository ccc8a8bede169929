"""Compiled programs on disk: found by the next run, in a folder that is the user's own."""

import json
import os
import subprocess
import sys
import time

import pytest

from jspec.cli import compile_cache

SCRIPT = """
import sys
import jax
from jspec.cli.compile_cache import keep_programs
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
)
print(keep_programs())
jax.jit(lambda x: x @ x)(jax.numpy.ones((3, 3)))
print(len(hits))
"""


def cached_programs(folder, **environment) -> tuple[str, int]:
    """Where a process keeps its programs, and how many it found there."""
    names = ("JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")
    usual = {name: value for name, value in os.environ.items() if name not in names}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=usual | {"JSPEC_CACHE": str(folder)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr == ""
    where, hits = ran.stdout.split()
    return where, int(hits)


def test_the_next_run_finds_the_programs(tmp_path):
    first, second = cached_programs(tmp_path), cached_programs(tmp_path)
    assert first[0] == second[0]
    assert first[0].startswith(str(tmp_path / "programs"))
    assert first[1] == 0
    assert second[1] > 0
    assert os.stat(first[0]).st_mode & 0o777 == 0o700


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """JAX's settings as a user's are at first; returns those that `keep_programs` makes."""
    import jax

    made = {}
    usual = {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": True}
    config = type("Config", (), {**usual, "update": lambda self, k, v: made.update({k: v})})()
    monkeypatch.setattr(jax, "config", config)
    monkeypatch.setenv("JSPEC_CACHE", str(tmp_path))
    return config, made


def test_only_the_user_reads_the_folder(settings, tmp_path):
    config, made = settings
    folder = compile_cache.keep_programs()
    assert made["jax_compilation_cache_dir"] == str(folder)
    made.clear()
    for name, value in (("dir", "/elsewhere"), ("dir", None)):
        config.jax_compilation_cache_dir = value if name == "dir" else None
        assert (compile_cache.keep_programs() is None) == (value is not None)
    made.clear()
    os.chmod(folder, 0o770)
    assert compile_cache.keep_programs() is None
    os.chmod(folder, 0o700)
    config.jax_enable_compilation_cache = False
    assert compile_cache.keep_programs() is None
    assert not made


def test_a_user_without_a_place_for_it_keeps_nothing(settings, monkeypatch, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("JSPEC_CACHE", str(file))
    assert compile_cache.keep_programs() is None

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(compile_cache, "cache_folder", homeless)
    assert compile_cache.keep_programs() is None
    assert not settings[1]


def test_another_machine_has_another_folder(monkeypatch):
    name_of_machine = compile_cache._machine()
    assert compile_cache._machine() == name_of_machine
    monkeypatch.setattr(compile_cache.platform, "machine", lambda: "another")
    assert compile_cache._machine() != name_of_machine


def test_the_oldest_programs_go_first(tmp_path):
    now = time.time()
    for age, name in enumerate("abcd"):
        path = tmp_path / name
        path.write_bytes(b"x" * 10)
        os.utime(path, (now - age, now - age))
    compile_cache._prune(tmp_path, 25)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.slow
def test_the_second_run_of_the_command_compiles_next_to_nothing(tmp_path):
    def run(*more: str) -> dict:
        names = ("JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_DIR")
        usual = {name: value for name, value in os.environ.items() if name not in names}
        command = [sys.executable, "-m", "jspec", "generate", "--prompt", "import os\\n" * 40]
        ran = subprocess.run(
            [*command, "--max-new-tokens", "16", "--json", *more],
            env=usual | {"JSPEC_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        heard.append(ran.stderr)
        return json.loads(ran.stdout)

    heard: list[str] = []
    cold, without, warm = run(), run("--no-compile-cache"), run()
    assert cold["tokens"] == without["tokens"] == warm["tokens"]
    assert warm["stats"]["compile_s"] < 0.5 * without["stats"]["compile_s"]
    # The first run may have to compile the C++ kernels, and says so.
    assert heard[1:] == ["", ""]
