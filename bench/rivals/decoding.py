"""Rivals of whole greedy decoding: transformers, and torch with FlashAttention-3 in a CUDA graph.

Both load the checkpoint that `bench.real` loaded, by transformers, in the dtype of jspec's model.
What they need of the GPU is free again when they return.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.program import Absent, unavailable
from bench.rivals.common import module
from bench.rivals.torch_step import Start, Step, fastest, seconds
from jspec.decode.state import DecodeState
from jspec.models.decoder import Decoder

NAMES = ("transformers", "torch_graph")
FAMILIES = ("llama", "qwen2")  # of the step in torch
TRITON_CACHE = "TRITON_CACHE_DIR"
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a rival decoded, and how long it took.

    Attributes:
        tokens: ``new_tokens`` ids of each row.
        decode_s_samples: seconds of decoding all of them, of each repeat.
        prefill_s: seconds of the prefill, None where jspec's was used.
        note: how it decodes.
    """

    tokens: list[list[int]]
    decode_s_samples: list[float]
    prefill_s: float | None
    note: str


def decode_transformers(
    path: Path, model: Decoder, prompts: Sequence[Sequence[int]], new_tokens: int
) -> Decoded | Absent:
    """Decode greedily with transformers' ``generate`` over a static cache.

    Rows are padded on the left. On a GPU ``generate`` compiles the step (torch.compile with CUDA
    graphs), which is not in the times. A time of decoding begins at the first new token, and is
    scaled from ``new_tokens - 1`` steps to ``new_tokens``.

    Args:
        path: of the checkpoint.
        model: jspec's model of that checkpoint.
        prompts: token ids of each row.
        new_tokens: of each row, at least 2; no token ends a row.

    Returns:
        What it decoded, or why it did not.
    """

    def decode() -> Decoded | Absent:
        torch = module("torch")
        theirs, width = load(path, model), max(map(len, prompts))
        pairs = [(width - len(prompt), list(prompt)) for prompt in prompts]
        ids = torch.tensor([[0] * pad + x for pad, x in pairs], device=theirs.device)
        mask = torch.tensor([[0] * pad + [1] * len(x) for pad, x in pairs], device=theirs.device)
        settings: dict[str, Any] = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
        settings |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        settings |= {"cache_implementation": "static", "disable_compile": not ids.is_cuda}
        output, samples = None, []  # seconds of the prefill, and of decoding
        for _ in range(REPEATS + 1):
            first = _FirstToken()
            begin = time.perf_counter()
            # Given one by one: None in a GenerationConfig stands for the checkpoint's own end.
            output = theirs.generate(
                ids, attention_mask=mask, stopping_criteria=[first], **settings
            )
            synchronize()
            steps = (time.perf_counter() - first.time) * new_tokens / (new_tokens - 1)
            samples.append((first.time - begin, steps))
        assert output is not None
        prefills, decodes = zip(*samples[1:], strict=True)  # the first call compiles
        return Decoded(
            output[:, width:].tolist(), list(decodes), min(prefills), "static cache, sdpa"
        )

    return _run("transformers", decode)


def decode_torch_graph(
    path: Path, model: Decoder, state: DecodeState, new_tokens: int
) -> Decoded | Absent:
    """Decode greedily by replaying one CUDA graph of a step in torch, cuBLAS and FlashAttention-3.

    Args:
        path: of the checkpoint.
        model: jspec's model of that checkpoint, of family llama or qwen2.
        state: what `jspec.start_decoding` gave, with room for ``new_tokens``. Its cache is copied;
            it stays as it is.
        new_tokens: of each row; no token ends a row.

    Returns:
        What it decoded, or why it did not.
    """

    def decode() -> Decoded | Absent:
        if model.config.family not in FAMILIES or any(x.window for x in model.config.layers):
            families = " and ".join(FAMILIES)
            return Absent(
                "torch_graph", f"it computes {families} without windows, not {model.config.family}"
            )
        torch = module("torch")
        if not torch.cuda.is_available():
            return Absent("torch_graph", "CUDA graphs need a GPU")
        theirs = load(path, model)
        start = Start.of(state, model.config.num_layers, theirs.device)
        tensors = dict(theirs.named_parameters())
        step = Step(tensors, model.config, start, new_tokens, fused=True)
        run, way = fastest(step)
        samples = [seconds(step, run, new_tokens) for _ in range(REPEATS + 1)][1:]
        note = f"one CUDA graph a step, {way}, pointwise operations fused by torch.compile"
        return Decoded(step.tokens[..., 0].T.tolist(), samples, None, note)

    return _run("torch_graph", decode)


def load(path: Path, model: Decoder) -> Any:
    """The checkpoint as transformers' model, in the dtype of ``model``, where torch computes."""
    torch, library = module("torch"), module("transformers")
    where = {"pretrained_model_name_or_path": path}
    if path.is_file():
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    settings = {"dtype": getattr(torch, str(model.dtype)), "attn_implementation": "sdpa"}
    theirs = library.AutoModelForCausalLM.from_pretrained(**where, **settings)
    return theirs.eval().to("cuda" if torch.cuda.is_available() else "cpu")


class _FirstToken:
    """A stopping criterion that ends no row and notes the time of the first token."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self, ids: Any, scores: Any, **unused: Any) -> Any:
        if not self.time:
            synchronize()
            self.time = time.perf_counter()
        return module("torch").zeros(len(ids), dtype=module("torch").bool, device=ids.device)


def _run(name: str, decode: Callable[[], Decoded | Absent]) -> Decoded | Absent:
    """What ``decode`` returns, or the reason for its error; frees torch's memory."""
    try:
        torch = module("torch")
        with triton_cache(), torch.no_grad():
            return decode()
    except Exception as error:
        absent = unavailable(name, error)
        failed = absent.failed and "out of memory" not in str(error).lower()
        return dataclasses.replace(absent, failed=failed)
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


def _free() -> None:
    """Give back the GPU's memory that torch has, CUDA graphs of torch.compile included."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    torch = module("torch")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
