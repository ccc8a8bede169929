"""jspec: fast, lossless long-context decoding in JAX.

The public names are loaded on first use, so that importing jspec costs nothing and touches no
device.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jspec.cache import Cache, LinearLayout, RingLayout, StripedLayout
    from jspec.config import LayerSpec, ModelConfig, Rope, RopeScaling, SamplingParams
    from jspec.decode.checks import mode_of, sampling_of
    from jspec.decode.convert_state import convert_state
    from jspec.decode.draft import (
        Chain,
        Drafted,
        Drafter,
        GuidedDraft,
        ModelDraft,
        NgramDraft,
        NoDraft,
        SelfDraft,
        SuffixDraft,
        named_draft,
    )
    from jspec.decode.engine import Engine
    from jspec.decode.generation import Generation, Interrupted, generate
    from jspec.decode.growth import grow_capacity
    from jspec.decode.prefill import fill_slot, start_decoding
    from jspec.decode.request import Request
    from jspec.decode.score import score
    from jspec.decode.settings import PLAIN, StepConfig
    from jspec.decode.state import DecodeState, Models, StepRecord
    from jspec.decode.stats import Stats
    from jspec.decode.step import decode_chunk, speculative_step, step
    from jspec.dispatch import BackendError, Backends
    from jspec.llm import LLM, Completion
    from jspec.models.bundled import load_bundled
    from jspec.models.chat import ChatTemplate, load_chat_template
    from jspec.models.checkpoint import load_model, save_model
    from jspec.models.decoder import Decoder
    from jspec.models.errors import CheckpointError
    from jspec.models.hashes import load_hashes
    from jspec.models.tokenizer import Tokenizer, load_tokenizer
    from jspec.ops.attention.dense import attention
    from jspec.ops.attention.gathered import gathered_attention
    from jspec.ops.attention.hashed import hash_attention
    from jspec.ops.attention.merge import merge_attention
    from jspec.ops.attention.scored import scored_attention
    from jspec.ops.attention.weights import mean_weights
    from jspec.ops.collisions import bucket_codes, collision_scores
    from jspec.ops.fused import verify_and_pack
    from jspec.ops.hash import hamming_scores, hash_encode, hash_encode_both
    from jspec.ops.hash_select import hash_select
    from jspec.ops.law import law
    from jspec.ops.pack import Packed, pack
    from jspec.ops.sample import Sampling
    from jspec.ops.select import select
    from jspec.ops.stochastic import verify_stochastic
    from jspec.ops.verify import Verified, verify_greedy
    from jspec.parts import ClampedSwiGLU, Experts, Latent
    from jspec.policies import (
        Dense,
        ExactTopK,
        Guided,
        Hata,
        HataOff,
        Loki,
        MagicPIG,
        Policy,
        QuantSpec,
        Quest,
        ScoredPolicy,
        SparseSpec,
        SpecExtend,
        Streaming,
        Vegas,
        named_policy,
    )
    from jspec.policies.attend import dense_attend
    from jspec.policies.prepare import prepare
    from jspec.typing import Attend, Model, ModelShape

__version__ = "0.2.0.dev0"

_HOMES = {
    "jspec.cache": ["Cache", "LinearLayout", "RingLayout", "StripedLayout"],
    "jspec.config": ["LayerSpec", "ModelConfig", "Rope", "RopeScaling", "SamplingParams"],
    "jspec.decode.draft": [
        "Chain",
        "Drafted",
        "Drafter",
        "GuidedDraft",
        "ModelDraft",
        "NgramDraft",
        "NoDraft",
        "SelfDraft",
        "SuffixDraft",
        "named_draft",
    ],
    "jspec.decode.engine": ["Engine"],
    "jspec.decode.generation": ["Generation", "Interrupted", "generate"],
    "jspec.decode.growth": ["grow_capacity"],
    "jspec.decode.request": ["Request"],
    "jspec.decode.prefill": ["fill_slot", "start_decoding"],
    "jspec.decode.checks": ["mode_of", "sampling_of"],
    "jspec.decode.score": ["score"],
    "jspec.decode.settings": ["PLAIN", "StepConfig"],
    "jspec.decode.state": ["DecodeState", "Models", "StepRecord"],
    "jspec.decode.stats": ["Stats"],
    "jspec.decode.step": ["decode_chunk", "speculative_step", "step"],
    "jspec.decode.convert_state": ["convert_state"],
    "jspec.dispatch": ["BackendError", "Backends"],
    "jspec.llm": ["LLM", "Completion"],
    "jspec.models.chat": ["ChatTemplate", "load_chat_template"],
    "jspec.models.bundled": ["load_bundled"],
    "jspec.models.checkpoint": ["load_model", "save_model"],
    "jspec.models.decoder": ["Decoder"],
    "jspec.models.errors": ["CheckpointError"],
    "jspec.models.hashes": ["load_hashes"],
    "jspec.models.tokenizer": ["Tokenizer", "load_tokenizer"],
    "jspec.ops.attention.dense": ["attention"],
    "jspec.ops.attention.gathered": ["gathered_attention"],
    "jspec.ops.attention.hashed": ["hash_attention"],
    "jspec.ops.attention.merge": ["merge_attention"],
    "jspec.ops.attention.scored": ["scored_attention"],
    "jspec.ops.attention.weights": ["mean_weights"],
    "jspec.ops.collisions": ["bucket_codes", "collision_scores"],
    "jspec.ops.fused": ["verify_and_pack"],
    "jspec.ops.hash": ["hash_encode", "hash_encode_both", "hamming_scores"],
    "jspec.ops.hash_select": ["hash_select"],
    "jspec.ops.law": ["law"],
    "jspec.ops.pack": ["Packed", "pack"],
    "jspec.ops.sample": ["Sampling"],
    "jspec.ops.select": ["select"],
    "jspec.ops.stochastic": ["verify_stochastic"],
    "jspec.ops.verify": ["Verified", "verify_greedy"],
    "jspec.parts": ["ClampedSwiGLU", "Experts", "Latent"],
    "jspec.policies": [
        "Dense",
        "ExactTopK",
        "Guided",
        "Hata",
        "HataOff",
        "Loki",
        "MagicPIG",
        "Policy",
        "QuantSpec",
        "Quest",
        "ScoredPolicy",
        "SparseSpec",
        "SpecExtend",
        "Streaming",
        "Vegas",
        "named_policy",
    ],
    "jspec.policies.attend": ["dense_attend"],
    "jspec.policies.prepare": ["prepare"],
    "jspec.typing": ["Attend", "Model", "ModelShape"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "PLAIN",
    "Attend",
    "BackendError",
    "Backends",
    "Cache",
    "Chain",
    "ChatTemplate",
    "CheckpointError",
    "ClampedSwiGLU",
    "Completion",
    "DecodeState",
    "Decoder",
    "Dense",
    "Drafted",
    "Drafter",
    "Engine",
    "ExactTopK",
    "Experts",
    "Generation",
    "Guided",
    "GuidedDraft",
    "Hata",
    "HataOff",
    "Interrupted",
    "Latent",
    "LayerSpec",
    "LinearLayout",
    "Loki",
    "MagicPIG",
    "Model",
    "ModelConfig",
    "ModelDraft",
    "ModelShape",
    "Models",
    "NgramDraft",
    "NoDraft",
    "Packed",
    "Policy",
    "QuantSpec",
    "Quest",
    "Request",
    "RingLayout",
    "Rope",
    "RopeScaling",
    "Sampling",
    "SamplingParams",
    "ScoredPolicy",
    "SelfDraft",
    "SparseSpec",
    "SpecExtend",
    "Stats",
    "StepConfig",
    "StepRecord",
    "Streaming",
    "StripedLayout",
    "SuffixDraft",
    "Tokenizer",
    "Vegas",
    "Verified",
    "attention",
    "bucket_codes",
    "collision_scores",
    "convert_state",
    "decode_chunk",
    "dense_attend",
    "fill_slot",
    "gathered_attention",
    "generate",
    "grow_capacity",
    "hamming_scores",
    "hash_attention",
    "hash_encode",
    "hash_encode_both",
    "hash_select",
    "law",
    "load_bundled",
    "load_chat_template",
    "load_hashes",
    "load_model",
    "load_tokenizer",
    "mean_weights",
    "merge_attention",
    "mode_of",
    "named_draft",
    "named_policy",
    "pack",
    "prepare",
    "sampling_of",
    "save_model",
    "score",
    "scored_attention",
    "select",
    "speculative_step",
    "start_decoding",
    "step",
    "verify_and_pack",
    "verify_greedy",
    "verify_stochastic",
]


if not TYPE_CHECKING:  # a type checker knows the names from above, and would take any other

    def __getattr__(name: str):
        if name not in _HOME:
            raise AttributeError(f"module 'jspec' has no attribute {name!r}")
        value = getattr(_import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
