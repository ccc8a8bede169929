"""A second model that drafts for another one: both must mean the same by a token id."""

from __future__ import annotations

from pathlib import Path

from jspec.checks import shown
from jspec.models.checkpoint import load_model
from jspec.models.decoder import Decoder
from jspec.models.errors import CheckpointError
from jspec.models.files import directory_of
from jspec.models.gguf_file import gguf_path
from jspec.models.tokenizer import Tokenizer, load_tokenizer


def load_draft_model(path: str | Path, tokenizer: Tokenizer) -> Decoder:
    """The model at ``path``, which is to draft for a model with ``tokenizer``.

    Raises:
        CheckpointError: It cannot be loaded, or its tokenizer has another token at an id that both
            have, special and added ones aside. A directory without a tokenizer is taken as it is.
    """
    has_tokenizer = gguf_path(path) is not None or (directory_of(path) / "tokenizer.json").exists()
    if has_tokenizer:
        own = load_tokenizer(path)
        index = tokenizer.first_difference(own)
        if index is not None:
            pair = [shown(x.ordinary_tokens().get(index)) for x in (own, tokenizer)]
            raise CheckpointError(
                f"{path}: token {index} is {pair[0]}, but {pair[1]} in the model that it is to "
                "draft for; take a draft model of the same family, whose tokenizer is the same"
            )
    return load_model(path)
