"""The models of the suites: the shapes of their published configurations.

gpt-oss-20b-attention is there for its attention alone: its four active experts of 2880 are one
dense SwiGLU of as many bytes, in bfloat16, and it has no sinks. gpt-oss-20b has all that the model
has, its experts in bfloat16 too; gpt-oss-20b-mxfp4 is the same with them in MXFP4, as it is
published.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from jspec.config import LayerSpec, ModelConfig
from jspec.parts import ClampedSwiGLU, Experts, Latent, Rope, RopeScaling

CONTEXT = 131072  # of every model here; those that reach it by YaRN take no more time


def _qwen3(layers: int = 36, heads: int = 32, kv_heads: int = 8, **settings: Any) -> ModelConfig:
    return ModelConfig.uniform(
        vocab_size=151936,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=128,
        rope_theta=1e6,
        qk_norm=True,
        family="qwen3",
        max_context=CONTEXT,
        **settings,
    )


def _llama3(factor: float, **settings: Any) -> ModelConfig:
    """A Llama 3 model; ``factor``: by which its context was extended."""
    return ModelConfig.uniform(
        vocab_size=128256,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", factor, original_context=8192),
        norm_eps=1e-5,
        max_context=CONTEXT,
        **settings,
    )


def _gpt_oss(**settings: Any) -> ModelConfig:
    windows = itertools.islice(itertools.cycle((128, None)), 24)
    specs = [LayerSpec(kv_heads=8, key_size=64, value_size=64, window=w) for w in windows]
    scaling = RopeScaling("yarn", 32.0, original_context=4096, truncate=False)
    return ModelConfig(
        vocab_size=201088,
        hidden_size=2880,
        num_heads=64,
        layers=tuple(specs),
        ropes=(Rope(150000.0, scaling),),
        norm_eps=1e-5,
        qkv_bias=True,
        out_bias=True,
        max_context=CONTEXT,
        **settings,
    )


def _gemma3(
    layers: int, kv_heads: int, head_size: int, query_scale: int, hidden_size: int, **settings: Any
) -> ModelConfig:
    """A Gemma 3 model; scores are divided by the square root of ``query_scale``."""

    def spec(layer: int) -> LayerSpec:
        sees_all = layer % 6 == 5
        return LayerSpec(
            kv_heads=kv_heads,
            key_size=head_size,
            value_size=head_size,
            window=None if sees_all else 1024,
            scale=query_scale**-0.5,
            rope=0 if sees_all else 1,
        )

    return ModelConfig(
        vocab_size=262208,
        hidden_size=hidden_size,
        layers=tuple(map(spec, range(layers))),
        ropes=(Rope(1e6, RopeScaling("linear", 8.0)), Rope(1e4)),
        family="gemma3_text",
        tie_embeddings=True,
        qk_norm=True,
        post_norms=True,
        centered_norms=True,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(hidden_size),
        max_context=CONTEXT,
        **settings,
    )


def _deepseek(
    layers: int, latent: Latent, experts: Experts, mscale: float, **settings: Any
) -> ModelConfig:
    """A DeepSeek model, whose context YaRN extended 40 times with the temperature ``mscale``."""
    temperature = 0.1 * mscale * math.log(40.0) + 1.0
    spec = LayerSpec(
        kv_heads=1,
        key_size=latent.rank + latent.rope_size,
        value_size=latent.rank,
        values_in_keys=True,
        scale=latent.query_size**-0.5 * temperature**2,
    )
    scaling = RopeScaling("yarn", 40.0, original_context=4096, attention_factor=1.0)
    return ModelConfig(
        layers=(spec,) * layers,
        ropes=(Rope(10000.0, scaling),),
        latent=latent,
        experts=experts,
        max_context=CONTEXT,
        **settings,
    )


TINY = ModelConfig.uniform(  # for a CPU
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_size=16,
)
IN_MXFP4 = ("gpt-oss-20b-mxfp4",)  # those whose experts are in MXFP4
MODELS: dict[str, ModelConfig] = {
    "tiny": TINY,
    "smollm2-135m": ModelConfig.uniform(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_size=64,
        rope_theta=100000.0,
        norm_eps=1e-5,
        tie_embeddings=True,
        max_context=CONTEXT,
    ),
    "qwen2.5-coder-0.5b": ModelConfig.uniform(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_size=64,
        rope_theta=1e6,
        qkv_bias=True,
        tie_embeddings=True,
        max_context=CONTEXT,
    ),
    "qwen3-8b": _qwen3(hidden_size=4096, intermediate_size=12288),
    # No published models: for tensor parallelism over more devices than there are KV heads.
    "qwen3-8b-2kv": _qwen3(kv_heads=2, hidden_size=4096, intermediate_size=12288),
    "qwen3-8b-1kv": _qwen3(kv_heads=1, hidden_size=4096, intermediate_size=12288),
    "qwen3-4b": _qwen3(hidden_size=2560, intermediate_size=9728, tie_embeddings=True),
    "qwen3-1.7b": _qwen3(28, 16, hidden_size=2048, intermediate_size=6144, tie_embeddings=True),
    "qwen3-0.6b": _qwen3(28, 16, hidden_size=1024, intermediate_size=3072, tie_embeddings=True),
    "llama-3.1-8b": _llama3(
        8.0, hidden_size=4096, intermediate_size=14336, num_layers=32, head_size=128
    ),
    "llama-3.2-1b": _llama3(
        32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        head_size=64,
        tie_embeddings=True,
    ),
    "llama-2-7b": ModelConfig.uniform(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_size=128,
        rope_theta=10000.0,
        norm_eps=1e-5,
        max_context=CONTEXT,
    ),
    "gpt-oss-20b-attention": _gpt_oss(intermediate_size=4 * 2880),
    "gpt-oss-20b": _gpt_oss(
        intermediate_size=2880,
        family="gpt_oss",
        sinks=True,
        experts=Experts(
            routed=32, chosen=4, size=2880, normalized=True, bias=True, clamped=ClampedSwiGLU()
        ),
    ),
    "qwen3-30b-a3b": ModelConfig.uniform(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_size=128,
        rope_theta=1e6,
        qk_norm=True,
        family="qwen3_moe",
        experts=Experts(routed=128, chosen=8, size=768, normalized=True),
        max_context=CONTEXT,
    ),
    "deepseek-v2-lite": _deepseek(
        27,
        Latent(rank=512, rope_size=64, plain_size=128, value_size=128),
        Experts(routed=64, chosen=6, size=1408, shared_size=2 * 1408, dense_layers=(0,)),
        mscale=0.707,
        family="deepseek_v2",
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        num_heads=16,
    ),
    "deepseek-r1": _deepseek(
        61,
        Latent(rank=512, rope_size=64, plain_size=128, value_size=128, query_rank=1536),
        Experts(
            routed=256,
            chosen=8,
            size=2048,
            shared_size=2048,
            dense_layers=(0, 1, 2),
            score="sigmoid",
            groups=8,
            chosen_groups=4,
            group_score="two_highest",
            corrected=True,
            normalized=True,
            factor=2.5,
        ),
        mscale=1.0,
        family="deepseek_v3",
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_heads=128,
    ),
    "gemma-3-4b": _gemma3(34, 4, 256, 256, 2560, intermediate_size=10240, num_heads=8),
    "gemma-3-27b": _gemma3(62, 16, 128, 168, 5376, intermediate_size=21504, num_heads=32),
}
MODELS |= {name: MODELS[name.removesuffix("-mxfp4")] for name in IN_MXFP4}
