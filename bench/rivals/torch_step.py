"""One greedy decode step in torch, cuBLAS and FlashAttention-3, recorded as one CUDA graph."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp

from bench.rivals.common import module
from jspec.config import ModelConfig
from jspec.decode.state import DecodeState
from jspec.models.rope import rope_frequencies

SPLITS = (0, 8, 32)  # parts that FlashAttention-3 cuts the keys into; 0 leaves it to the library
TRIAL = 16  # steps that choose between the numbers of splits


class Step:
    """The weights, a copy of the cache, and the tensors that a step reads and writes in place.

    Attributes:
        token: int64 ``[B]``, known but not in the cache yet.
        lengths: int32 ``[B]``, tokens in the cache.
        tokens: int64 ``[new_tokens, B]``, what the steps gave.
        index: int64 ``[1]``, the step to come.
        keys: of each layer ``[B, S, K, H]``; ``values`` has the same shape.
        splits: of the keys, as FlashAttention-3 takes it.
    """

    def __init__(
        self, model: Any, config: ModelConfig, state: DecodeState, new_tokens: int, *, fused: bool
    ) -> None:
        """Copy the cache, and join weights.

        Args:
            model: transformers' model of family llama or qwen2.
            config: of the same model.
            state: with room for ``new_tokens``; it stays as it is.
            new_tokens: steps that ``tokens`` has room for.
            fused: whether torch.compile makes one kernel of each group of pointwise operations.
        """
        torch, spec, device = module("torch"), config.layers[0], model.device
        self.eps, self.sizes = config.norm_eps, (config.num_heads, spec.kv_heads, spec.key_size)
        self._set_weights(dict(model.named_parameters()), config.num_layers)
        rope = config.ropes[spec.rope]
        frequencies, self.factor = rope_frequencies(spec.key_size, rope)
        self.frequencies = torch.from_numpy(frequencies).to(device)
        layers = range(config.num_layers)
        self.keys = [_copied(state.cache.keys(layer), device) for layer in layers]
        self.values = [_copied(state.cache.values(layer), device) for layer in layers]
        last, lengths = jax.device_get((state.last_token, state.cache.lengths))
        self.start = torch.tensor(last).long().to(device), torch.tensor(lengths).to(device)
        self.token, self.lengths = (x.clone() for x in self.start)
        self.tokens = torch.zeros(new_tokens, len(last), dtype=torch.long, device=device)
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
        self.token.copy_(self.start[0])
        self.lengths.copy_(self.start[1])
        self.index.zero_()

    def __call__(self) -> None:
        """Feed ``token``, write the next one into ``token`` and ``tokens``, and advance."""
        torch = module("torch")
        linear = torch.nn.functional.linear
        angles = self.lengths.float()[:, None, None] * self.frequencies
        cosine, sine = angles.cos() * self.factor, angles.sin() * self.factor
        queries = self.sizes[0] * self.sizes[2]
        x, change = self.embedding[self.token], None
        for layer, block in enumerate(self.layers):
            first, second = block["norms"]
            if change is None:
                y = self.normed(x, first, self.eps)
            else:
                x, y = self.added(x, change, first, self.eps)
            joined = linear(y, *block["qkv"])
            q, k, v = self.rotated(torch.cat, joined, cosine, sine, self.sizes)
            out = self.attended(layer, q, k, v)
            change = linear(out.reshape(-1, queries), *block["out"])
            x, y = self.added(x, change, second, self.eps)
            change = linear(self.gated(linear(y, *block["gate_up"])), *block["down"])
        _, y = self.added(x, change, self.norm, self.eps)
        self.token.copy_(self.logits(y).argmax(-1))
        self.tokens.index_copy_(0, self.index, self.token[None])
        self.lengths.add_(1)
        self.index.add_(1)

    def logits(self, y: Any) -> Any:
        """Logits float32 ``[B, V]``, as jspec computes them, which has fewer ties than bfloat16."""
        torch = module("torch")
        if y.is_cuda and y.dtype != torch.float32:
            return torch.mm(y, self.head.T, out_dtype=torch.float32)
        return y.float() @ self.head.float().T

    def attended(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """Append ``k`` and ``v [B, 1, K, H]`` and attend with ``q [B, 1, N, H]``."""
        # Query heads that share keys go into one tile.
        pack = True if self.sizes[0] > self.sizes[1] else None
        settings = {"cache_seqlens": self.lengths, "num_splits": self.splits, "pack_gqa": pack}
        attend = module("fa3_fwd_interface").flash_attn_with_kvcache
        return attend(q, self.keys[layer], self.values[layer], k=k, v=v, **settings)


def _copied(array: jax.Array, device: Any) -> Any:
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
    cat: Any, joined: Any, cosine: Any, sine: Any, sizes: tuple[int, int, int]
) -> tuple[Any, ...]:
    """Queries ``[B, 1, N, H]``, keys and values ``[B, 1, K, H]``, the first two rotated.

    Args:
        cat: ``torch.cat``; torch.compile cannot trace an import.
        joined: ``[B, (N + 2 K) H]``: queries, keys, values.
        cosine: float32 ``[B, 1, H / 2]``; ``sine`` has the same shape.
        sine: of the same angles.
        sizes: N, K and H.
    """
    queries, kv, size = sizes
    heads = joined.view(-1, queries + 2 * kv, size)
    first, second = heads[:, : queries + kv].float().chunk(2, -1)
    halves = (first * cosine - second * sine, second * cosine + first * sine)
    rotated = cat(halves, -1).to(joined.dtype)[:, None]
    return rotated[:, :, :queries], rotated[:, :, queries:], heads[:, None, queries + kv :]


def seconds(step: Step, run: Any, steps: int) -> float:
    """Wall time of ``steps`` calls of ``run``, each of which does ``step``, from the beginning."""
    step.reset()
    float(step.token[0])  # waits for the device
    begin = time.perf_counter()
    for _ in range(steps):
        run()
    float(step.token[0])
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
