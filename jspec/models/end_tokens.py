"""Tokens that end a text: those that any file of a model directory names."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path

from jspec.models.errors import CheckpointError
from jspec.models.files import Fields, read_json
from jspec.models.special_tokens import read_special_tokens
from jspec.models.tokenizer import load_tokenizer

GENERATION = "generation_config.json"


def end_tokens(directory: Path, of_config: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The end tokens of a model directory, each once.

    Args:
        directory: the directory.
        of_config: those that config.json names.
        vocab_size: of the model; an id that is not below it is skipped with a warning.

    Returns:
        Ids of config.json, of generation_config.json, and of the tokenizer's ``eos_token``.

    Raises:
        CheckpointError: one of the files is malformed.
    """
    ends = [*of_config, *generation_end_tokens(directory, vocab_size)]
    eos = _eos_token(directory)
    if eos is not None and eos < vocab_size:
        ends.append(eos)
    elif eos is not None:
        warnings.warn(
            f"{directory}: the tokenizer's eos_token has id {eos}, outside the model's vocabulary "
            f"of {vocab_size}; it ends no text",
            stacklevel=2,
        )
    return tuple(dict.fromkeys(ends))


def generation_end_tokens(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Those of generation_config.json in ``directory``; none without the file."""
    file = directory / GENERATION
    fields = Fields(read_json(file) if file.is_file() else {}, str(file))
    return fields.tokens("eos_token_id", vocab_size)


def _eos_token(directory: Path) -> int | None:
    special_tokens = read_special_tokens(directory)
    spelling = special_tokens.named.get("eos_token")
    if spelling is None:
        return None
    for token in special_tokens.declared:
        if token.content == spelling and token.index is not None:
            return token.index
    # A directory without a tokenizer that jspec reads still has a model.
    with contextlib.suppress(CheckpointError):
        for index, content in load_tokenizer(directory).special_ids.items():
            if content == spelling:
                return index
    return None
