"""Gemma 3 with images: its language model, which config.json has as text_config."""

from __future__ import annotations

import dataclasses

from jspec.config import ModelConfig
from jspec.models.families import gemma3_text
from jspec.models.families.shared.family import Family, refuse_unknown
from jspec.models.files import Fields

# Sizes that the hub's files leave out, as transformers fills them.
_SIZES = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
}
_OF_IMAGES = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
)


def read(fields: Fields) -> ModelConfig:
    text = fields.object("text_config")
    if not text.values:
        raise fields.error("text_config is missing; it has the settings of the language model")
    text = Fields({**_SIZES, **text.values}, text.source)
    config = gemma3_text.read(text)
    refuse_unknown(text)
    fields.ignore(*_OF_IMAGES)
    tied = fields.boolean("tie_word_embeddings", config.tie_embeddings)
    stops = dict.fromkeys((*fields.tokens("eos_token_id", config.vocab_size), *config.stop_tokens))
    return dataclasses.replace(config, tie_embeddings=tied, stop_tokens=tuple(stops))


def tensor_name(name: str) -> str | None:
    """The name in a file without images: ``language_model`` is first, or after ``model``."""
    name = name.replace("model.language_model.", "language_model.model.", 1)
    first, _, rest = name.removeprefix("model.").partition(".")
    if first == "language_model":
        return rest
    return None if first in ("vision_tower", "multi_modal_projector") else name


FAMILY = Family(read, gemma3_text.MODULES, tensor_name=tensor_name)
