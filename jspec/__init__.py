"""jspec: fast, lossless long-context decoding in JAX.

The public names are loaded on first use, so that importing jspec costs nothing and touches no
device.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.cache import KVCache, dense
    from jspec.config import (
        PLAIN,
        ModelConfig,
        ModelDraft,
        NgramDraft,
        RopeScaling,
        SamplingParams,
        StepConfig,
        StreamDraft,
    )
    from jspec.decode.engine import Generation, generate
    from jspec.decode.state import DecodeState, start
    from jspec.decode.stats import Stats
    from jspec.decode.step import decode_chunk, speculative_step
    from jspec.dispatch import BackendError
    from jspec.models.bundled import load_bundled
    from jspec.models.checkpoint import load_model, save_model
    from jspec.models.decoder import Decoder
    from jspec.models.errors import CheckpointError
    from jspec.models.tokenizer import Tokenizer, load_tokenizer
    from jspec.ops.attention import attention
    from jspec.ops.fused import verify_and_append, verify_and_pack
    from jspec.ops.law import law
    from jspec.ops.pack import Packed, pack
    from jspec.ops.sample import Sampling
    from jspec.ops.stochastic import verify_stochastic
    from jspec.ops.verify import Verified, verify_greedy

__version__ = "0.1.0"

_HOMES = {
    "jspec.cache": ["KVCache", "dense"],
    "jspec.config": [
        "PLAIN",
        "ModelConfig",
        "ModelDraft",
        "NgramDraft",
        "RopeScaling",
        "SamplingParams",
        "StepConfig",
        "StreamDraft",
    ],
    "jspec.decode.engine": ["Generation", "generate"],
    "jspec.decode.state": ["DecodeState", "start"],
    "jspec.decode.stats": ["Stats"],
    "jspec.decode.step": ["decode_chunk", "speculative_step"],
    "jspec.dispatch": ["BackendError"],
    "jspec.models.bundled": ["load_bundled"],
    "jspec.models.checkpoint": ["load_model", "save_model"],
    "jspec.models.decoder": ["Decoder"],
    "jspec.models.errors": ["CheckpointError"],
    "jspec.models.tokenizer": ["Tokenizer", "load_tokenizer"],
    "jspec.ops.attention": ["attention"],
    "jspec.ops.fused": ["verify_and_append", "verify_and_pack"],
    "jspec.ops.law": ["law"],
    "jspec.ops.pack": ["Packed", "pack"],
    "jspec.ops.sample": ["Sampling"],
    "jspec.ops.stochastic": ["verify_stochastic"],
    "jspec.ops.verify": ["Verified", "verify_greedy"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "PLAIN",
    "BackendError",
    "CheckpointError",
    "DecodeState",
    "Decoder",
    "Generation",
    "KVCache",
    "ModelConfig",
    "ModelDraft",
    "NgramDraft",
    "Packed",
    "RopeScaling",
    "Sampling",
    "SamplingParams",
    "Stats",
    "StepConfig",
    "StreamDraft",
    "Tokenizer",
    "Verified",
    "attention",
    "decode_chunk",
    "dense",
    "generate",
    "law",
    "load_bundled",
    "load_model",
    "load_tokenizer",
    "pack",
    "save_model",
    "speculative_step",
    "start",
    "verify_and_append",
    "verify_and_pack",
    "verify_greedy",
    "verify_stochastic",
]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'jspec' has no attribute {name!r}")
    value = getattr(_import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
