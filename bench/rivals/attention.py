"""Rivals of attention over a cache or a selection of it.

cuDNN, PyTorch, FlashAttention-3 and FlashInfer. A selection is read as pages of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.caches import Inputs
from bench.program import Absent, Program
from bench.rivals import flash
from bench.rivals.common import Check, Maker, module, program
from jspec.typing import Array

if TYPE_CHECKING:
    from bench.attention import Selected

NAMES = ("cudnn", "torch", *flash.NAMES)
GATHERED = flash.NAMES
PAGE = 64  # slots of a page in FlashInfer's view of the cache
NEVER = -1e9  # the bias of a key that a query must not read


def attention(inputs: Inputs, check: Check) -> Mapping[str, Maker]:
    """All rivals of attention; none copies the cache."""
    arrays = (inputs.q, inputs.k, inputs.v)

    def paged(name: str) -> Program | Absent:
        batch, slots, kv_heads, size = inputs.k.shape
        count = batch * slots // PAGE
        if slots % PAGE:
            return Absent(name, f"S={slots} is no multiple of its pages of {PAGE} slots")
        table = np.arange(count, dtype=np.int32).reshape(batch, -1)
        pages = flash.Pages((count, PAGE, kv_heads, size), table)
        return flash.flashinfer(name, arrays, inputs.lengths, check, pages=pages)

    return {
        "cudnn": lambda name: _cudnn(name, inputs, check),
        "torch": lambda name: _torch(name, inputs, check),
        "fa3": lambda name: flash.fa3(name, arrays, inputs.lengths, check),
        "flashinfer": paged,
    }


def gathered_attention(data: Selected, check: Check) -> Mapping[str, Maker]:
    """All rivals of attention over a selection; page tables are made beforehand."""
    arrays, pages, restore = paged_selection(data)
    rows, count = pages.table.shape
    lengths = np.full(rows, count, np.int32)

    def is_right(out: Any) -> bool:
        return check(restore(np.asarray(out, np.float32)))

    makers = {"fa3": flash.fa3, "flashinfer": flash.flashinfer}
    return {
        name: lambda name, make=make: make(name, arrays, lengths, is_right, pages=pages)
        for name, make in makers.items()
    }


def paged_selection(
    data: Selected,
) -> tuple[flash.Arrays, flash.Pages, Callable[[np.ndarray], np.ndarray]]:
    """Queries, keys and values, the cache as pages of one token, and a function that restores the
    output shape ``[B, T, N, H]``.

    Where each KV head has its own selection, each is a row of its own, with pages of one head.
    """
    batch, slots, kv_heads, size = data.k.shape
    tokens, query_heads = data.q.shape[1:3]
    selected, tail = np.asarray(data.selected), np.asarray(data.tail)
    if selected.ndim == 2:
        table = np.concatenate([selected, tail], axis=1) + np.arange(batch)[:, None] * slots
        pages = flash.Pages((batch * slots, 1, kv_heads, size), table.astype(np.int32))
        return (data.q, data.k, data.v), pages, lambda out: out
    tails = np.broadcast_to(tail[:, None], (batch, kv_heads, tokens))
    rows = np.arange(batch)[:, None, None] * slots + np.concatenate([selected, tails], axis=2)
    table = rows * kv_heads + np.arange(kv_heads)[None, :, None]
    table = table.reshape(batch * kv_heads, -1).astype(np.int32)
    group = query_heads // kv_heads
    q = jnp.swapaxes(data.q.reshape(batch, tokens, kv_heads, group, size), 1, 2)
    q = q.reshape(batch * kv_heads, tokens, group, size)

    def restore(out: np.ndarray) -> np.ndarray:
        parts = out.reshape(batch, kv_heads, tokens, group, size)
        return np.swapaxes(parts, 1, 2).reshape(batch, tokens, query_heads, size)

    return (q, data.k, data.v), flash.Pages((batch * slots * kv_heads, 1, 1, size), table), restore


def _cudnn(name: str, inputs: Inputs, check: Check) -> Program | Absent:
    """cuDNN's flash attention as JAX calls it.

    Its causal mask begins at the first key, so that several queries at the end of a cache need a
    bias ``[B, 1, T, S]`` instead, made beforehand.
    """
    if jax.default_backend() != "gpu":
        return Absent(name, "cuDNN needs a GPU")
    bias = None
    if inputs.q.shape[1] > 1:
        is_visible = jnp.arange(inputs.k.shape[1])[None, None] <= inputs.positions[..., None]
        bias = jnp.where(is_visible, 0, NEVER).astype(inputs.q.dtype)[:, None]
    arguments = (inputs.q, inputs.k, inputs.v, jnp.asarray(inputs.lengths), bias)

    def call(q: Array, k: Array, v: Array, lengths: Array, bias: Array | None) -> Array:
        settings: dict[str, Any] = {"key_value_seq_lengths": lengths, "implementation": "cudnn"}
        return jax.nn.dot_product_attention(q, k, v, bias, **settings)

    ready = jax.jit(call).lower(*arguments).compile()
    return Program(name, partial(ready, *arguments), check)


def _torch(name: str, inputs: Inputs, check: Check) -> Program | Absent:
    """`scaled_dot_product_attention` by PyTorch's flash or memory-efficient kernel."""
    torch, kernels = module("torch"), module("torch.nn.attention")
    if inputs.lengths.min() < inputs.k.shape[1]:
        return Absent(name, "PyTorch's flash kernel takes no length of each row")
    q, k, v = (torch.from_dlpack(x).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    mask = None
    if q.shape[2] > 1:
        lower = module("torch.nn.attention.bias").causal_lower_right
        mask = lower(q.shape[2], k.shape[2])
    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION") if q.is_cuda else ("MATH",)
    allowed = [getattr(kernels.SDPBackend, kernel) for kernel in names]

    def call() -> Any:
        with kernels.sdpa_kernel(allowed):
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return program(name, call, lambda out: check(flash.numbers(out)))
