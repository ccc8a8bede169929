"""Processes that decode together in the tests: how they are started, and what each of them does.

``python -m tests.helix.processes CHECK PORT PROCESSES INDEX`` prints what the check found as JSON.
"""

import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

import jspec
from jspec import helix, processes
from jspec.decode import generation, prefill
from jspec.decode.chunks import Chunks
from jspec.helix.sharded import decoder_sharding
from jspec.models import checkpoint
from jspec.models.safetensors_file import StoredTensor
from jspec.processes import all_or_none, check_same, from_all, from_first
from tests.decode.common import NGRAM, prompts
from tests.models.goldens import GOLDEN

SECONDS = 900  # far beyond what any of them takes: a hang fails the test
TEXTS = prompts((40, 1, 17), vocabulary=112)
SEEDED = jspec.SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, ignore_eos=True)
DRAFTS = {
    "loki": jspec.SelfDraft(jspec.policies.Loki(budget=8, sinks=1, recent=2, dense_layers=0)),
    "vegas": jspec.GuidedDraft(jspec.policies.Vegas(budget=8, least=0)),
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start(*arguments: str, devices: int = 1, **more: str) -> subprocess.Popen[str]:
    """A process with virtual devices of its own, and ``more`` in its environment."""
    count = "--xla_force_host_platform_device_count="
    flags = re.sub(rf"{count}\d+", f"{count}{devices}", os.environ.get("XLA_FLAGS", ""))
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": flags} | more,
    )


def ends_of(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each, none of which is left running."""
    try:
        streams = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *s) for process, s in zip(processes, streams, strict=True)]


def error_of(call: Any) -> str:
    try:
        call()
    except (ValueError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def tokens_of(model: Any, **settings: Any) -> tuple[tuple[int, ...], ...]:
    return jspec.generate(model, TEXTS, **({"params": SEEDED, "gamma": 3} | settings)).tokens


def drafted(model: Any, plain: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """Tokens with the drafter ``name``, what it takes prepared with ``plain``, on no mesh."""
    policy = jspec.StepConfig(3, DRAFTS[name]).cache_policy
    text = [token for prompt in TEXTS for token in prompt]
    arrays = jspec.policies.prepare_params(policy, plain, text)
    return tokens_of(model, draft=DRAFTS[name], policy_params=arrays)


def grown(model: Any) -> tuple[tuple[int, ...], ...]:
    """Tokens of a row that begins with room for 16 positions and grows to 43."""
    long = dataclasses.replace(SEEDED, max_new_tokens=40)
    with mock.patch.object(generation, "START", 16), mock.patch.object(prefill, "CAPACITY_STEP", 8):
        return jspec.generate(model, [[1, 2, 3]], long, draft=NGRAM, gamma=3).tokens


def together(index: int) -> dict[str, Any]:
    """What two processes of one device find, the same in both if all is well."""
    config = helix.HelixConfig(kvp=2, block=4)
    model = helix.load_model(GOLDEN / "qwen3", config)
    kernel = model.model.layers[0].mlp.down.kernel.get_value()
    fresh = dataclasses.replace(SEEDED, seed=None)
    ended = jspec.generate(
        model, TEXTS, fresh, draft=NGRAM, gamma=3, on_tokens=lambda row, new: index == 0
    )

    def fails_in_one():
        with all_or_none():
            if index == 1:
                raise OSError("the disk is full")

    read: set[str] = set()
    blocks = StoredTensor.blocks

    def counted(tensor: StoredTensor, **settings: Any):
        read.add(tensor.name)
        return blocks(tensor, **settings)

    with mock.patch.object(StoredTensor, "blocks", counted):
        experts = helix.load_model(GOLDEN / "deepseek_v3", helix.HelixConfig(kvp=2, ep=2))
    kernel_shard = experts.model.layers[1].mlp.experts.down.kernel.get_value().addressable_data(0)

    return {
        "experts": np.asarray(kernel_shard).tolist(),
        "read": sorted(name for name in read if ".experts." in name),
        "devices": (jax.device_count(), jax.local_device_count()),
        "shards": [shard.data.shape for shard in kernel.addressable_shards],
        "tokens": tokens_of(model, draft=NGRAM),
        "grown": grown(model),
        "scores": [row.tolist() for row in jspec.score_tokens(model, TEXTS)],
        "ended by process 0": (ended.tokens, ended.seeds),
        "all": from_all({"index": index, "text": "é" * 300 * index}),
        "first": from_first(index),
        "same": error_of(lambda: check_same({"x": "1", "y": str(index)})),
        "mesh": error_of(lambda: helix.HelixConfig(kvp=4).mesh),
        "small mesh": error_of(lambda: helix.HelixConfig(kvp=1).mesh),
        "prompts": error_of(
            lambda: tokens_of(model, draft=jspec.SuffixDraft() if index else NGRAM)
        ),
        "capacity": error_of(
            lambda: jspec.start_decoding(model, TEXTS, SEEDED, jspec.PLAIN, capacity=40)
        ),
        "fails in one": error_of(fails_in_one),
    }


def drafts(index: int) -> dict[str, Any]:
    """Tokens with each drafter on two devices a process."""
    config = helix.HelixConfig(kvp=2, tpa=2, block=4)
    plain = jspec.load_model(GOLDEN / "qwen3", sharding=decoder_sharding(config))
    model = helix.shard(plain, config)
    return {name: drafted(model, plain, name) for name in DRAFTS}


def served(model: Any) -> dict[str, Any]:
    """What an engine of two slots gives: arrivals, a shared prefix, a cancellation, a callback."""
    sizes: dict[str, Any] = {"slots": 2, "capacity": 64, "prefill_chunk": 16, "steps_per_chunk": 2}
    engine = jspec.Engine(model, draft=DRAFTS["vegas"], gamma=3, **sizes)
    engine.share_prefix(TEXTS[0][:20])
    seen: list[tuple[int, ...]] = []

    def on_tokens(new: tuple[int, ...]) -> int | None:
        seen.append(new)
        return 1 if len(seen) == 2 else None

    first = [engine.submit(text, SEEDED) for text in TEXTS]
    engine.step()
    cancelled = engine.submit(TEXTS[2], SEEDED)
    stopped = engine.submit(TEXTS[1], SEEDED, on_tokens=on_tokens)
    for _ in range(2):
        engine.step()
    cancelled.cancel()
    engine.run()
    return {
        "tokens": [request.tokens for request in first],
        "stopped": stopped.tokens,
        "cancelled": cancelled.tokens,
        "ends": [request.finished for request in (*first, stopped, cancelled)],
    }


def engines(index: int) -> dict[str, Any]:
    """An engine whose model has two devices in each process."""
    config = helix.HelixConfig(kvp=2, tpa=2, block=4)
    return served(helix.load_model(GOLDEN / "qwen3", config))


def unequal(index: int) -> dict[str, Any]:
    """Errors of two processes that differ in one thing each time."""
    config, one = helix.HelixConfig(kvp=2, block=4), GOLDEN / "qwen3"

    def load(path: Path = one, mesh: helix.HelixConfig = config, dtype: Any = None) -> Any:
        return helix.load_model(path, mesh, dtype=dtype)

    def changed(name: str, change: Callable[[bytes], bytes]) -> Path:
        """The model with another file ``name`` in process 1."""
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for file in one.iterdir():
            content = file.read_bytes()
            (folder / file.name).write_bytes(
                change(content) if index and file.name == name else content
            )
        return folder

    def flip(content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1])

    def other_weights() -> Any:
        model = jspec.load_model(one)
        model.norm.scale[...] = model.norm.scale[...] + index
        return helix.shard(model, config)

    def other_settings() -> Any:
        model = jspec.load_model(one)
        model.config = dataclasses.replace(model.config, max_context=100 + index)
        return helix.shard(model, config)

    def other_version() -> Any:
        with mock.patch.object(processes, "__version__", f"0.{index}"):
            return load()

    def fails_to_read() -> Any:
        def read(*arguments: Any, **settings: Any) -> Any:
            if index:
                raise OSError("the disk is full")
            return right(*arguments, **settings)

        right = checkpoint.load_model
        with mock.patch.object(checkpoint, "load_model", read):
            return load()

    with contextlib.ExitStack() as stack:
        calls: dict[str, Callable[[], Any]] = {
            "no difference": load,
            "config": lambda: load(changed("config.json", lambda content: content + b" ")),
            "bytes": lambda: load(changed("model.safetensors", flip)),
            "disk": fails_to_read,
            "missing": lambda: load(GOLDEN / "nowhere" if index else one),
            "mesh": lambda: load(mesh=dataclasses.replace(config, block=4 + index)),
            "more devices": lambda: load(mesh=helix.HelixConfig(kvp=2 + 2 * index)),
            "dtypes": lambda: load(dtype="bfloat16" if index else "float32"),
            "version": other_version,
            "weights": other_weights,
            "model settings": other_settings,
        }
        return {name: error_of(call) for name, call in calls.items()}


def stuck(index: int, victim: int, where: str) -> None:
    """Process ``victim`` sleeps, alive, after its first chunk of steps: before it takes part in
    the next one's collectives, or in its callback."""
    model = helix.load_model(GOLDEN / "qwen3", helix.HelixConfig(kvp=2, block=4))
    calls, right = [], Chunks.start

    def sleep() -> None:
        calls.append(None)
        if index == victim and len(calls) > 1:
            time.sleep(SECONDS)

    def start(chunks: Chunks, state: Any, left: Any) -> Any:
        if where == "collective":
            sleep()
        return right(chunks, state, left)

    def on_tokens(row: int, new: tuple[int, ...]) -> None:
        sleep()

    with mock.patch.object(Chunks, "start", start):
        settings = {"on_tokens": on_tokens} if where == "callback" else {}
        tokens_of(model, draft=NGRAM, steps_per_chunk=1, **settings)


CHECKS = {"together": together, "drafts": drafts, "engines": engines, "unequal": unequal}

if __name__ == "__main__":
    check, port, count, index = sys.argv[1], *map(int, sys.argv[2:])
    limits: dict[str, Any] = {"start_timeout": 60, "lost_timeout": 20}
    if check.startswith("stuck"):
        limits["step_timeout"] = 20
    if check == "joined-by-itself":
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
        helix.load_model(GOLDEN / "qwen3", helix.HelixConfig(kvp=2))
    else:
        helix.Hosts(f"127.0.0.1:{port}", count, index, **limits).join()
    if check.startswith("stuck"):
        _, victim, where = check.split("-")
        stuck(index, int(victim), where)
    else:
        # Gloo prints on stdout, too.
        print("\n" + json.dumps(CHECKS[check](index)))
