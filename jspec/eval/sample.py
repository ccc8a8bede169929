"""A text that ships with jspec, for what policies learn from the keys of a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from jspec.eval.ruler import training_document
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Policy
from jspec.policies.prepare import prepare
from jspec.typing import Model

TOKENS = 2048
_BYTES_A_TOKEN = 8  # more than any text has


def prepared(policy: Policy, model: Model, tokenizer: Tokenizer) -> Any:
    """`jspec.prepare` with the text that ships with jspec; None where the policy needs nothing."""
    if not policy.needs_arrays:
        return None
    if not policy.needs_keys:
        return prepare(policy, model)
    max_tokens = min(TOKENS, model.config.max_context)
    text, _ = training_document(_BYTES_A_TOKEN * TOKENS, np.random.default_rng(0))
    return prepare(policy, model, tokenizer.encode(text)[:max_tokens])
