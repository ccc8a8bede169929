"""A greedy pass of a model in torch, cuBLAS and FlashAttention-3, recorded as one CUDA graph.

It is what serving engines run between their schedulers: joined projections, fused pointwise
operations, one launch for all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bench.rivals.common import module
from jspec.config import ModelConfig
from jspec.decode.state import DecodeState
from jspec.models.rope import rope_frequencies

SPLITS = (0, 8, 32)  # parts that FlashAttention-3 cuts the keys into; 0 leaves it to the library
TRIAL = 16  # steps that choose between the numbers of splits


@dataclasses.dataclass
class Start:
    """What the first step finds.

    Attributes:
        token: int64 ``[B, T]``, known but not in the cache yet.
        lengths: int32 ``[B]``, tokens in the cache.
        keys: of each layer ``[B, S, K, H]``, to be written in place; ``values`` likewise.
        values: of each layer.
    """

    token: Any
    lengths: Any
    keys: Sequence[Any]
    values: Sequence[Any]

    @classmethod
    def of(cls, state: DecodeState, layers: int, device: Any) -> Start:
        """Copies of what a state has, which stays as it is."""
        torch = module("torch")
        last, lengths = jax.device_get((state.last_token, state.cache.lengths))
        keys, values = (
            [copied(read(layer), device) for layer in range(layers)]
            for read in (state.cache.keys, state.cache.values)
        )
        token = torch.tensor(last).long().to(device)[:, None]
        return cls(token, torch.tensor(lengths).to(device), keys, values)


class Step:
    """The weights, the cache, and the tensors that a step reads and writes in place.

    Attributes:
        token: int64 ``[B, T]``, known but not in the cache yet.
        lengths: int32 ``[B]``, tokens in the cache.
        tokens: int64 ``[steps, B, T]``, what the steps gave.
        index: int64 ``[1]``, the step to come.
        splits: of the keys, as FlashAttention-3 takes it.
    """

    def __init__(
        self,
        tensors: dict[str, Any],
        config: ModelConfig,
        start: Start,
        steps: int,
        *,
        fused: bool,
    ) -> None:
        """Join weights.

        Args:
            tensors: the weights by the names of transformers' families llama, qwen2 and qwen3.
            config: of the same model.
            start: what the first step finds, with room for ``steps``.
            steps: that ``tokens`` has room for.
            fused: whether torch.compile makes one kernel of each group of pointwise operations.
        """
        torch, spec, device = module("torch"), config.layers[0], start.token.device
        self.eps, self.sizes = config.norm_eps, (config.num_heads, spec.kv_heads, spec.key_size)
        self._set_weights(tensors, config.num_layers)
        rope = config.ropes[spec.rope]
        frequencies, self.factor = rope_frequencies(spec.key_size, rope)
        self.frequencies = torch.from_numpy(frequencies).to(device)
        self.start, self.keys, self.values = start, start.keys, start.values
        self.token, self.lengths = start.token.clone(), start.lengths.clone()
        self.offsets = torch.arange(start.token.shape[1], device=device)
        shape = (steps, *start.token.shape)
        self.tokens = torch.zeros(shape, dtype=torch.long, device=device)
        self.index = torch.zeros(1, dtype=torch.long, device=device)
        fuse = torch.compile(dynamic=False) if fused else lambda function: function
        self.normed, self.rotated = fuse(_normed), fuse(_rotated)
        self.added, self.gated = fuse(_added), fuse(_gated)
        self.splits = 0

    def _set_weights(self, tensors: dict[str, Any], layers: int) -> None:
        """Join what shares an input: queries, keys and values; gate and up."""
        torch = module("torch")

        def joined(*names: str) -> tuple[Any, Any]:
            kernels = [tensors.pop(f"{name}.weight") for name in names]
            biases = [tensors.pop(f"{name}.bias", None) for name in names]
            return torch.cat(kernels), None if biases[0] is None else torch.cat(biases)

        self.layers = []
        for layer in range(layers):
            prefix = f"model.layers.{layer}"
            attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
            norms = (f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
            block = {
                "norms": [tensors.pop(f"{name}.weight") for name in norms],
                "qkv": joined(*(f"{attention}.{x}_proj" for x in "qkv")),
                "qk_norms": [tensors.pop(f"{attention}.{x}_norm.weight", None) for x in "qk"],
                "out": joined(f"{attention}.o_proj"),
                "gate_up": joined(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                "down": joined(f"{mlp}.down_proj"),
            }
            self.layers.append(block)
        self.embedding = tensors["model.embed_tokens.weight"]
        self.norm = tensors["model.norm.weight"]
        self.head = tensors.get("lm_head.weight", self.embedding)

    def reset(self) -> None:
        """Back to the state that it was made of; slots past its lengths are written again."""
        self.token.copy_(self.start.token)
        self.lengths.copy_(self.start.lengths)
        self.index.zero_()

    def __call__(self) -> None:
        """Feed ``token``, write the next one into ``token`` and ``tokens``, and advance by one."""
        self.token.copy_(self.outputs().argmax(-1))
        self.tokens.index_copy_(0, self.index, self.token[None])
        self.lengths.add_(1)
        self.index.add_(1)

    def outputs(self) -> Any:
        """The logits ``[B, T, V]`` of a pass over ``token``."""
        torch = module("torch")
        linear = torch.nn.functional.linear
        positions = self.lengths[:, None] + self.offsets
        angles = positions.float().reshape(-1, 1, 1) * self.frequencies
        cosine, sine = angles.cos() * self.factor, angles.sin() * self.factor
        queries = self.sizes[0] * self.sizes[2]
        x, change = self.embedding[self.token.reshape(-1)], None
        for layer, block in enumerate(self.layers):
            first, second = block["norms"]
            if change is None:
                y = self.normed(x, first, self.eps)
            else:
                x, y = self.added(x, change, first, self.eps)
            joined, norms = linear(y, *block["qkv"]), block["qk_norms"]
            q, k, v = self.rotated(torch.cat, joined, cosine, sine, self.sizes, norms, self.eps)
            out = self.attended(layer, q, k, v)
            change = linear(out.reshape(-1, queries), *block["out"])
            x, y = self.added(x, change, second, self.eps)
            change = linear(self.gated(linear(y, *block["gate_up"])), *block["down"])
        _, y = self.added(x, change, self.norm, self.eps)
        return self.logits(y).reshape(*self.token.shape, -1)

    def logits(self, y: Any) -> Any:
        """Logits float32 ``[B, V]``, as jspec computes them, which has fewer ties than bfloat16."""
        torch = module("torch")
        if y.is_cuda and y.dtype != torch.float32:
            return torch.mm(y, self.head.T, out_dtype=torch.float32)
        return y.float() @ self.head.float().T

    def attended(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Append ``k`` and ``v`` and attend with ``q``, ``[B * T, 1, heads, H]`` each."""
        q, k, v = (x.reshape(*self.token.shape, *x.shape[2:]) for x in (q, k, v))
        # Query heads that share keys go into one tile.
        pack = True if self.sizes[0] > self.sizes[1] else None
        settings = {"cache_seqlens": self.lengths, "num_splits": self.splits, "pack_gqa": pack}
        if self.token.shape[1] > 1:
            settings["causal"] = True
        attend = module("fa3_fwd_interface").flash_attn_with_kvcache
        return attend(q, self.keys[layer], self.values[layer], k=k, v=v, **settings)


def copied(array: jax.Array, device: Any) -> Any:
    """A finished copy of a JAX array as a contiguous tensor.

    JAX cannot donate a buffer that torch refers to, and may write a freed one before torch's stream
    has read it.
    """
    torch = module("torch")
    view = torch.from_dlpack(jax.block_until_ready(jnp.asarray(array)))
    copy = torch.empty(view.shape, dtype=view.dtype, device=device).copy_(view)
    if copy.is_cuda:
        torch.cuda.synchronize()
    return copy


def _normed(x: Any, scale: Any, eps: float) -> Any:
    """RMSNorm in float32, rounded before it is scaled."""
    y = x.float()
    y = y * (y.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return y.to(x.dtype) * scale


def _added(x: Any, change: Any, scale: Any, eps: float) -> tuple[Any, Any]:
    """``x + change`` and its norm."""
    x = x + change
    return x, _normed(x, scale, eps)


def _gated(joined: Any) -> Any:
    """SwiGLU of ``joined [B, 2 * F]``: gate, then up."""
    gate, up = joined.chunk(2, -1)
    return (gate.float() * gate.float().sigmoid() * up.float()).to(joined.dtype)


def _rotated(
    cat: Any,
    joined: Any,
    cosine: Any,
    sine: Any,
    sizes: tuple[int, int, int],
    norms: Sequence[Any],
    eps: float,
) -> tuple[Any, ...]:
    """Queries ``[B * T, 1, N, H]``, keys and values ``[B * T, 1, K, H]``, the first two rotated.

    Args:
        cat: ``torch.cat``; torch.compile cannot trace an import.
        joined: ``[B * T, (N + 2 K) H]``: queries, keys, values.
        cosine: float32 ``[B * T, 1, H / 2]``; ``sine`` has the same shape.
        sine: of the same angles.
        sizes: N, K and H.
        norms: scales ``[H]`` of queries' and keys' RMSNorm, or None each.
        eps: of these norms.
    """
    queries, kv, size = sizes
    heads = joined.view(-1, queries + 2 * kv, size)
    parts = heads[:, :queries], heads[:, queries : queries + kv]
    normed = [
        x if norm is None else _normed(x, norm, eps) for x, norm in zip(parts, norms, strict=True)
    ]
    first, second = cat(normed, 1).float().chunk(2, -1)
    halves = (first * cosine - second * sine, second * cosine + first * sine)
    rotated = cat(halves, -1).to(joined.dtype)[:, None]
    return rotated[:, :, :queries], rotated[:, :, queries:], heads[:, None, queries + kv :]


def seconds(step: Step, run: Any, steps: int) -> float:
    """Wall time of ``steps`` calls of ``run``, each of which does ``step``, from the beginning."""
    step.reset()
    float(step.token[0, 0])  # waits for the device
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    float(step.token[0, 0])
    return time.perf_counter() - begin


def recorded(step: Step) -> Any:
    """A function that replays ``step`` as one CUDA graph."""
    torch = module("torch")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step.reset()
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def fastest(step: Step) -> tuple[Any, str]:
    """The graph with the fastest number of splits, and what it is."""
    times = {}
    for step.splits in SPLITS:
        run, steps = recorded(step), min(TRIAL, len(step.tokens))
        times[step.splits] = min(seconds(step, run, steps) for _ in range(3))
    step.splits = min(times, key=times.__getitem__)
    return recorded(step), f"{step.splits or 'its own number of'} splits"
