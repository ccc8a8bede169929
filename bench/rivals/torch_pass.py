"""A pass of T tokens in torch at a real model's shape, as a rival of `decode`.

It has jspec's random weights in torch's order, and a cache of noise. Before it is timed, its first
layers are compared with jspec's on one cache of `CONTEXT` tokens.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.decode.check import LAYERS, REFERENCE, TOLERANCE
from bench.decode.running import rewound
from bench.decode.shapes import part_of
from bench.decode.states import KEY_SCALE, Blueprint
from bench.program import Absent, unavailable
from bench.rivals.common import module
from bench.rivals.decoding import triton_cache
from bench.rivals.torch_step import Start, Step, copied, fastest, seconds
from jspec.decode.draft import Drafted, NoDraft
from jspec.decode.settings import StepConfig
from jspec.decode.state import Models
from jspec.decode.step import run_target
from jspec.models.decoder import Decoder
from jspec.models.joined import separate

NAME = "torch_graph"
FAMILIES = ("llama", "qwen2", "qwen3")
CONTEXT = 512  # tokens of the comparison
STEPS = 16  # of a sample
REPEATS = 7
# transformers' names of a layer's parts.
LAYER = {
    "attention_norm.scale": "input_layernorm",
    "mlp_norm.scale": "post_attention_layernorm",
    "attention.q_norm.scale": "self_attn.q_norm",
    "attention.k_norm.scale": "self_attn.k_norm",
    **{
        f"attention.{x}.{leaf}": f"self_attn.{x}_proj" for x in "qkv" for leaf in ("kernel", "bias")
    },
    **{f"attention.out.{leaf}": "self_attn.o_proj" for leaf in ("kernel", "bias")},
    **{f"mlp.{x}.kernel": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
WHOLE = {"embedding": "model.embed_tokens", "head.kernel": "lm_head", "norm.scale": "model.norm"}


def measured(model: Decoder, batch: int, context: int, tokens: int) -> dict[str, Any] | Absent:
    """The samples of a step's nanoseconds, what was compared, and how it ran; or why it cannot.

    Args:
        model: with random weights.
        batch: rows.
        context: tokens in the cache of each.
        tokens: of a pass.
    """
    if reason := refuses(model):
        return Absent(NAME, reason)
    try:
        torch = module("torch")
        if not torch.cuda.is_available():
            return Absent(NAME, "CUDA graphs need a GPU")
        with triton_cache(), torch.no_grad():
            error = compared(model, batch, tokens, fused=True)
            if not error <= TOLERANCE:
                return Absent(NAME, f"its logits are {error:.1%} from jspec's", failed=True)
            start = noise(model, batch, context, tokens, torch.device("cuda"))
            step = Step(
                tensors_of(model, start.token.device), model.config, start, STEPS, fused=True
            )
            run, way = fastest(step)
            samples = [seconds(step, run, STEPS) / STEPS for _ in range(REPEATS + 1)][1:]
        note = f"one CUDA graph a step, {way}, pointwise operations fused by torch.compile"
        return {"step_ns": [round(x * 1e9) for x in samples], "error": error, "note": note}
    except Exception as problem:
        return unavailable(NAME, problem)
    finally:
        gc.collect()


def refuses(model: Decoder) -> str | None:
    """Why the step does not compute this model, or None."""
    config = model.config
    is_plain = config.experts is None and config.latent is None and not config.sinks
    if config.family in FAMILIES and is_plain and not any(x.window for x in config.layers):
        return None
    return f"it computes {', '.join(FAMILIES)} without windows and experts, not {config.family}"


def compared(model: Decoder, batch: int, tokens: int, *, fused: bool) -> float:
    """How far the logits of the first layers are from jspec's, relative to their norm.

    The largest mean over a row.
    """
    torch = module("torch")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small: Any = part_of(model, slice(LAYERS))
    config = StepConfig(tokens - 1, NoDraft(), REFERENCE)
    state = Blueprint.of(small, batch, CONTEXT, tokens - 1, tokens).filled(small.config.vocab_size)
    state = rewound(state, CONTEXT)
    rng = np.random.default_rng(0)
    draft = jnp.asarray(rng.integers(0, small.config.vocab_size, (batch, tokens - 1), np.int32))
    drafted = Drafted(draft, jnp.full(batch, tokens - 1, jnp.int32))
    start = Start.of(state, small.config.num_layers, device)
    more = torch.tensor(np.asarray(draft)).long().to(device)
    start.token = torch.cat([start.token, more], 1)
    step = Step(tensors_of(small, device), small.config, start, 1, fused=fused)
    actual = step.outputs().float().cpu().numpy()
    run = jax.jit(run_target, static_argnames="config")
    expected = np.asarray(run(Models(small), state, drafted, config=config)[0], np.float32)
    off = np.linalg.norm(actual - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    return float(off.mean(axis=1).max())


def noise(model: Decoder, batch: int, context: int, tokens: int, device: Any) -> Start:
    """A cache of random keys and values with room for the steps, and random tokens."""
    torch, config = module("torch"), model.config
    dtype, slots = getattr(torch, str(model.dtype)), context + STEPS + tokens
    generator = torch.Generator(device).manual_seed(0)

    def drawn(scale: float) -> list[Any]:
        shapes = [(batch, slots, spec.kv_heads, spec.key_size) for spec in config.layers]
        settings = {"generator": generator, "device": device, "dtype": dtype}
        return [torch.randn(shape, **settings).mul_(scale) for shape in shapes]

    token = torch.randint(config.vocab_size, (batch, tokens), generator=generator, device=device)
    lengths = torch.full((batch,), context, dtype=torch.int32, device=device)
    return Start(token, lengths, drawn(KEY_SCALE), drawn(1.0))


def tensors_of(model: Decoder, device: Any) -> dict[str, Any]:
    """Copies of a decoder's weights by transformers' names, ``[out, in]`` as torch has them."""
    tensors = {}
    for path, parameter in nnx.to_flat_state(nnx.state(model)):
        name = ".".join(map(str, path))
        for part, array in separate(model.config, name, parameter.get_value()).items():
            tensors[named(part)] = _in_order(part, copied(array, device))
    return tensors


def named(part: str) -> str:
    """transformers' name of a parameter."""
    leaf = "bias" if part.endswith(".bias") else "weight"
    if part in WHOLE:
        return f"{WHOLE[part]}.{leaf}"
    _, layer, rest = part.split(".", 2)
    return f"model.layers.{layer}.{LAYER[rest]}.{leaf}"


def _in_order(part: str, tensor: Any) -> Any:
    if part.endswith(".kernel"):  # [in, ...] to [out, in]
        return tensor.reshape(tensor.shape[0], -1).T.contiguous()
    return tensor.reshape(-1) if part.endswith(".bias") else tensor
