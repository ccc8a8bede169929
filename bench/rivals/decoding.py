"""Rivals of whole greedy decoding: transformers, and torch with FlashAttention-3 in a CUDA graph.

Both decode with copies of the weights of the jspec `Decoder` that they are compared with, in its
dtype. What they need of the GPU is free again when they return.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from bench.program import Absent, failure
from bench.rivals import torch_step, torch_weights
from bench.rivals.common import module
from jspec.decode.state import DecodeState
from jspec.models.decoder import Decoder

NAMES = ("transformers", "torch_graph")
TRITON_CACHE = "TRITON_CACHE_DIR"
PREFILL_TOKENS = 16384  # padded tokens of a prefill pass, which is of one row at least
ALIGNMENT = 64  # a static cache has a multiple of so many slots: no kernel then pads its mask
WARM_UP = 8  # tokens: compiling, and CUDA graphs, which torch.compile records in a third call


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a rival decoded, and how long it took.

    Attributes:
        tokens: ``new_tokens`` ids of each row.
        decode_s: seconds of decoding all of them, median of ``decode_s_samples``.
        decode_s_samples: seconds of each repeat.
        prefill_s: seconds of the prefill, None where jspec's was used.
        note: how it decodes, such as ``"static cache, compiled, sdpa"``.
    """

    tokens: list[list[int]]
    decode_s: float
    decode_s_samples: list[float]
    prefill_s: float | None
    note: str


def decode_transformers(
    model: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int, repeats: int = 3
) -> Decoded | Absent:
    """Decode greedily with transformers' ``generate`` over a static cache.

    Rows are padded on the left. On a GPU ``generate`` compiles the decode step (torch.compile with
    CUDA graphs), which is not in the times. The prefill fills the static cache by passes over few
    rows, so that no mask grows with batch times context squared; ``decode_s`` begins after it, at
    the first new token, and is scaled from ``new_tokens - 1`` steps to ``new_tokens``.

    Args:
        model: of family llama or qwen2.
        prompts: token ids of each row, at least one.
        new_tokens: of each row, at least 2; no token ends a row.
        repeats: times that it decodes, after a warm-up.

    Returns:
        What it decoded, or why it did not.
    """
    if new_tokens < 2:
        raise ValueError(f"new_tokens={new_tokens} must be at least 2")
    slots = max(map(len, prompts)) + new_tokens
    size = _size(model, len(prompts), slots)

    def decode() -> Decoded | Absent:
        torch, _ = module("torch"), module("transformers")
        if reason := torch_weights.refusal(model):
            return Absent("transformers", reason)
        with torch.no_grad():
            batch = _Batch(torch_weights.transformers_model(model), prompts, new_tokens)
            prefill_s = batch.prefill()
            ways = {"not compiled": lambda: batch.decode(repeats, compiled=False)}
            if torch_weights.device() == "cuda":
                ways = {"compiled": lambda: batch.decode(repeats, compiled=True), **ways}
            note, (tokens, samples) = first_that_runs(ways)
        note = f"static cache, {note}, sdpa; prefill by groups of rows"
        return Decoded(tokens, statistics.median(samples), samples, prefill_s, note)

    return _run("transformers", decode, size)


def decode_torch_graph(
    model: Decoder, state: DecodeState, new_tokens: int, repeats: int = 3
) -> Decoded | Absent:
    """Decode greedily by replaying one CUDA graph of a step in torch, cuBLAS and FlashAttention-3.

    Args:
        model: of family llama or qwen2.
        state: what `jspec.start_decoding` gave, with room for ``new_tokens``. Its cache is copied;
            it stays as it is.
        new_tokens: of each row; no token ends a row.
        repeats: times that it decodes, after a warm-up.

    Returns:
        What it decoded, or why it did not.
    """

    def decode() -> Decoded | Absent:
        torch = module("torch")
        if not torch.cuda.is_available():
            return Absent("torch_graph", "CUDA graphs need a GPU")
        module("fa3_fwd_interface")
        return step_decoded(model, state, new_tokens, repeats)

    return _run("torch_graph", decode, _size(model, *state.cache.keys(0).shape[:2]))


def step_decoded(
    model: Decoder, state: DecodeState, new_tokens: int, repeats: int
) -> Decoded | Absent:
    """`decode_torch_graph`; on a CPU the same step eagerly, for tests."""
    if reason := torch_weights.refusal(model) or torch_step.refusal(state, new_tokens):
        return Absent("torch_graph", reason)
    torch = module("torch")

    def decode(fused: bool) -> tuple[list[list[int]], list[float], str]:
        step = torch_step.Step(model, state, new_tokens, fused=fused)
        run, way = (step, "eager") if step.token.device.type == "cpu" else torch_step.fastest(step)
        samples = [torch_step.seconds(step, run, new_tokens) for _ in range(repeats + 1)][1:]
        return step.tokens.T.tolist(), samples, way

    ways: dict[str, Callable[[], Any]] = {"not fused": lambda: decode(fused=False)}
    if torch.cuda.is_available():
        ways = {"fused by torch.compile": lambda: decode(fused=True), **ways}
    with torch.no_grad():
        note, (tokens, samples, way) = first_that_runs(ways)
    note = f"one CUDA graph a step, {way}, pointwise operations {note}"
    return Decoded(tokens, statistics.median(samples), samples, None, note)


class _Batch:
    """Prompts padded on the left, and the static cache of all tokens but the last of each."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        torch, library = module("torch"), module("transformers")
        self.model, self.prompts, self.new_tokens = model, prompts, new_tokens
        self.width = max(map(len, prompts))
        slots = -(-(self.width + new_tokens) // ALIGNMENT) * ALIGNMENT
        config = model.config
        self.cache = library.StaticCache(config, max_cache_len=slots)
        sizes = (len(prompts), config.num_key_value_heads, config.head_dim)
        # Marks its arrays as fixed in place, without which torch.compile uses no CUDA graphs.
        self.cache.early_initialization(
            *sizes, dtype=model.dtype, device=torch.device(model.device)
        )

    def prefill(self) -> float:
        """Fill the cache; seconds, after a first pass that is not in them."""
        groups = list(self._groups())
        for group in groups[:1]:
            self._fill(group)
        _synchronize()
        begin = time.perf_counter()
        for group in groups:
            self._fill(group)
        _synchronize()
        return time.perf_counter() - begin

    def _groups(self) -> Iterator[list[int]]:
        """Rows of each prefill pass, those of similar length together."""
        rows = sorted(range(len(self.prompts)), key=lambda row: -len(self.prompts[row]))
        while rows and len(self.prompts[rows[0]]) > 1:
            count = max(1, PREFILL_TOKENS // len(self.prompts[rows[0]]))
            yield rows[:count]
            rows = rows[count:]

    def _fill(self, rows: list[int]) -> None:
        """Compute keys and values of all tokens but the last of each of ``rows``."""
        prompts = [self.prompts[row][:-1] for row in rows]
        ids, mask = self._padded(prompts)
        settings = {"attention_mask": None if bool(mask.all()) else mask}
        settings["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        filled = self.model.model(ids, **settings, use_cache=True).past_key_values
        end, width = self.width - 1, ids.shape[1]
        for layer, source in zip(self.cache.layers, filled.layers, strict=True):
            for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                target, columns = slice(end - len(prompt), end), slice(width - len(prompt), width)
                layer.keys[row, :, target] = source.keys[index, :, columns]
                layer.values[row, :, target] = source.values[index, :, columns]

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
        """Ids and mask of ``prompts``, int64 ``[B, T]``, on the model's device."""
        torch = module("torch")
        width = max(map(len, prompts))
        ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return tuple(torch.tensor(x, device=self.model.device) for x in (ids, mask))

    def decode(self, repeats: int, *, compiled: bool) -> tuple[list[list[int]], list[float]]:
        """The new tokens of each row, and seconds of each repeat."""
        self._generate(min(WARM_UP, self.new_tokens), compiled=compiled)
        tokens, samples = [], []
        for _ in range(repeats):
            tokens, seconds = self._generate(self.new_tokens, compiled=compiled)
            samples.append(seconds)
        return tokens, samples

    def _generate(self, new_tokens: int, *, compiled: bool) -> tuple[list[list[int]], float]:
        """``generate`` from the filled cache; its tokens, and seconds of as many steps."""
        library = module("transformers")
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.width - 1)  # what lies after it is masked
        ids, mask = self._padded(self.prompts)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        settings |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings |= {"disable_compile": not compiled}
        first = _FirstToken()
        output = self.model.generate(
            ids,
            attention_mask=mask,
            past_key_values=self.cache,
            generation_config=library.GenerationConfig(**settings),
            stopping_criteria=[first],
        )
        _synchronize()
        seconds = (time.perf_counter() - first.time) * new_tokens / (new_tokens - 1)
        return output[:, self.width :].tolist(), seconds


class _FirstToken:
    """A stopping criterion that ends no row and notes the time of the first token."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self, ids: Any, scores: Any, **unused: Any) -> Any:
        torch = module("torch")
        if not self.time:
            _synchronize()
            self.time = time.perf_counter()
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def first_that_runs(ways: Mapping[str, Callable[[], Any]]) -> tuple[str, Any]:
    """The first of ``ways`` that raises nothing: its name with the errors before, its result.

    Raises:
        Exception: that of the last way; one for want of memory at once.
    """
    errors = ""
    for name, call in ways.items():
        try:
            return f"{name}{errors}", call()
        except Exception as error:
            if name == list(ways)[-1] or _is_out_of_memory(error):
                raise
            errors = f" ({failure(name, error).reason})"
        _free()
    raise ValueError("there is no way to run")


def _run(name: str, decode: Callable[[], Decoded | Absent], size: str) -> Decoded | Absent:
    """What ``decode`` returns, or the reason for its error; frees torch's memory."""
    try:
        with triton_cache():
            return decode()
    except ModuleNotFoundError as error:
        return Absent(name, f"{error.name} is not installed")
    except Exception as error:
        if _is_out_of_memory(error):
            return Absent(name, f"out of memory with {size}")
        return failure(name, error)
    finally:
        _free()


@contextlib.contextmanager
def triton_cache() -> Iterator[None]:
    """A folder for Triton's cache, which torch.compile needs and jax_triton has set to none."""
    before = os.environ.get(TRITON_CACHE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[TRITON_CACHE] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[TRITON_CACHE]
            else:
                os.environ[TRITON_CACHE] = before


def _size(model: Decoder, rows: int, slots: int) -> str:
    """The size of a case for a message."""
    specs, itemsize = model.config.layers, model.dtype.itemsize
    channels = sum(spec.kv_heads * (spec.key_size + spec.value_size) for spec in specs)
    gigabytes = rows * slots * channels * itemsize / 1e9
    return f"{rows} rows of {slots} slots, a cache of {gigabytes:.1f} GB"


def _is_out_of_memory(error: Exception) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower()


def _free() -> None:
    """Give back what torch keeps of the GPU's memory, CUDA graphs of torch.compile included."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def _synchronize() -> None:
    torch = module("torch")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
