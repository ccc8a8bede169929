"""Public names of jspec, each loaded on first use."""

from . import helix as helix
from . import ops as ops
from . import policies as policies
from .cache import (
    Cache as Cache,
)
from .cache import (
    LinearLayout as LinearLayout,
)
from .cache import (
    PagedLayout as PagedLayout,
)
from .cache import (
    RingLayout as RingLayout,
)
from .cache import (
    StripedLayout as StripedLayout,
)
from .config import (
    LayerSpec as LayerSpec,
)
from .config import (
    ModelConfig as ModelConfig,
)
from .config import (
    SamplingParams as SamplingParams,
)
from .decode.checks import mode_of as mode_of
from .decode.checks import sampling_of as sampling_of
from .decode.convert_state import convert_state as convert_state
from .decode.draft import (
    Chain as Chain,
)
from .decode.draft import (
    Drafted as Drafted,
)
from .decode.draft import (
    Drafter as Drafter,
)
from .decode.draft import (
    DrafterTraits as DrafterTraits,
)
from .decode.draft import (
    GuidedDraft as GuidedDraft,
)
from .decode.draft import (
    ModelDraft as ModelDraft,
)
from .decode.draft import (
    NgramDraft as NgramDraft,
)
from .decode.draft import (
    NoDraft as NoDraft,
)
from .decode.draft import (
    SelfDraft as SelfDraft,
)
from .decode.draft import (
    SuffixDraft as SuffixDraft,
)
from .decode.draft import (
    TargetPass as TargetPass,
)
from .decode.draft import (
    named_draft as named_draft,
)
from .decode.engine import Engine as Engine
from .decode.generation import (
    Generation as Generation,
)
from .decode.generation import (
    Interrupted as Interrupted,
)
from .decode.generation import (
    generate as generate,
)
from .decode.logprobs import Logprobs as Logprobs
from .decode.logprobs import TokenScores as TokenScores
from .decode.options import DecodeOptions as DecodeOptions
from .decode.prefill import fill_slot as fill_slot
from .decode.prefill import start_decoding as start_decoding
from .decode.processors import LogitBias as LogitBias
from .decode.processors import LogitsFunction as LogitsFunction
from .decode.processors import LogitsProcessor as LogitsProcessor
from .decode.processors import MinNewTokens as MinNewTokens
from .decode.processors import Penalties as Penalties
from .decode.processors import TokenHistory as TokenHistory
from .decode.request import Request as Request
from .decode.rows import grow_capacity as grow_capacity
from .decode.score import score_tokens as score_tokens
from .decode.score import score_top_tokens as score_top_tokens
from .decode.settings import PLAIN as PLAIN
from .decode.settings import StepConfig as StepConfig
from .decode.state import DecodeState as DecodeState
from .decode.state import Models as Models
from .decode.state import PromptRecord as PromptRecord
from .decode.state import StepRecord as StepRecord
from .decode.stats import Stats as Stats
from .decode.step import (
    decode_chunk as decode_chunk,
)
from .decode.step import (
    decode_step as decode_step,
)
from .decode.step import (
    speculative_step as speculative_step,
)
from .dispatch import BackendError as BackendError
from .dispatch import Backends as Backends
from .dispatch import Choice as Choice
from .dispatch import record_choices as record_choices
from .llm import LLM as LLM
from .llm import Completion as Completion
from .models.bundled import load_bundled as load_bundled
from .models.chat import ChatTemplate as ChatTemplate
from .models.chat import load_chat_template as load_chat_template
from .models.checkpoint import load_model as load_model
from .models.checkpoint import save_model as save_model
from .models.decoder import Decoder as Decoder
from .models.errors import ChatTemplateError as ChatTemplateError
from .models.errors import CheckpointError as CheckpointError
from .models.hashes import load_hashes as load_hashes
from .models.tokenizer import Tokenizer as Tokenizer
from .models.tokenizer import load_tokenizer as load_tokenizer
from .parts import ClampedSwiGLU as ClampedSwiGLU
from .parts import Experts as Experts
from .parts import Latent as Latent
from .parts import Rope as Rope
from .parts import RopeScaling as RopeScaling
from .typing import Attend as Attend
from .typing import Model as Model
from .typing import ModelShape as ModelShape

__version__: str
