"""A text that ships with jspec, for what policies learn from the keys of a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from jspec.eval.ruler_bytes import training_document
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Policy
from jspec.policies.prepare import sample_keys
from jspec.typing import Model

TOKENS = 2048
_BYTES_A_TOKEN = 8  # more than any text has


def prepared(policy: Policy, model: Model, tokenizer: Tokenizer) -> Any:
    """The parameters of ``policy`` from the text that ships with jspec; None if it needs none."""

    def keys() -> list[np.ndarray]:
        max_tokens = min(TOKENS, model.config.max_context)
        text, _ = training_document(_BYTES_A_TOKEN * TOKENS, np.random.default_rng(0))
        return sample_keys(model, tokenizer.encode(text)[:max_tokens])

    return policy.prepare(model, keys)
