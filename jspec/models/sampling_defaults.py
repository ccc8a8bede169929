"""Sampling parameters that the authors of a model recommend."""

from __future__ import annotations

import os
import warnings
from typing import Any

from jspec.checks import shown
from jspec.models.end_tokens import GENERATION
from jspec.models.errors import CheckpointError
from jspec.models.files import Fields, directory_of, read_json

# Fields that change the distribution in transformers and that jspec lacks, where they change
# nothing.
_LOGITS = {  # fields that change logits, also of greedy requests, by their names here
    "repetition_penalty": "repetition_penalty",
    "min_new_tokens": "min_new_tokens",
    "suppress_tokens": "banned_tokens",
}
_NEUTRAL: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "num_beams": 1,
    "penalty_alpha": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


def sampling_defaults(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Arguments of `jspec.SamplingParams` from a model's generation_config.json.

    Args:
        path: a model directory, or a GGUF file in one.

    Returns:
        ``max_new_tokens``, ``min_new_tokens``, ``repetition_penalty`` and ``banned_tokens``, and
        with ``do_sample`` also ``temperature`` (1 if it is missing), ``top_k``, ``top_p`` and
        ``min_p``, as far as the file has them; nothing without a file.

    Raises:
        CheckpointError: there is no such directory, or the file is malformed.
    """
    directory = directory_of(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no model directory; pass a local one")
    file = directory / GENERATION
    fields = Fields(read_json(file) if file.is_file() else {}, str(file))
    defaults: dict[str, Any] = {}
    if fields.has("max_new_tokens"):
        defaults["max_new_tokens"] = fields.integer("max_new_tokens")
    defaults |= {
        ours: value for name, ours in _LOGITS.items() if (value := fields.get(name)) is not None
    }
    if fields.boolean("do_sample", False):
        names = ("temperature", "top_k", "top_p", "min_p")
        defaults["temperature"] = 1.0
        defaults |= {name: fields.get(name) for name in names if fields.has(name)}
    ignored = {
        name: fields.get(name)
        for name, neutral in _NEUTRAL.items()
        if fields.get(name) not in (None, neutral)
    }
    if ignored:
        warnings.warn(
            f"{file}: jspec does not implement {shown(ignored)}; its samples differ from those "
            "that the model's authors recommend",
            stacklevel=3,
        )
    return defaults
