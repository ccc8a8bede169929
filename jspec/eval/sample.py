"""What policies take of a model: its trained hashes, or what a text that ships with jspec gives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from jspec.eval.ruler import training_document
from jspec.models.hashes import BUNDLED, check_hashes, load_hashes
from jspec.models.tokenizer import Tokenizer
from jspec.policies import Hata, Policy
from jspec.policies.prepare import prepare
from jspec.typing import Model

TOKENS = 2048
_BYTES_A_TOKEN = 8  # more than any text has


def prepared(
    policy: Policy, model: Model, tokenizer: Tokenizer, path: str | os.PathLike[str] | None = None
) -> Any:
    """The arrays of ``policy``, None where it needs nothing.

    Hashes of as many bits in the folder ``hashes`` of the model's directory ``path``, as
    `jspec train-hash` writes them; else `jspec.prepare` with a text that ships with jspec. Raises
    `CheckpointError` or `ValueError` for hashes that are damaged or of another model.
    """
    if not policy.needs_arrays:
        return None
    if isinstance(policy, Hata) and path is not None and (Path(path) / BUNDLED).is_dir():
        hashes = load_hashes(Path(path) / BUNDLED)
        check_hashes(hashes, model.config.layers)
        if all(w is None or w.shape[2] == policy.bits for w in hashes):
            return hashes
    most = min(TOKENS, model.config.max_context)
    text, _ = training_document(_BYTES_A_TOKEN * TOKENS, np.random.default_rng(0))
    return prepare(policy, model, tokenizer.encode(text)[:most])
