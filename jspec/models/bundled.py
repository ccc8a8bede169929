"""The small byte-level model that ships with jspec."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from jax.typing import DTypeLike

from jspec.models.checkpoint import load_model
from jspec.models.decoder import Decoder
from jspec.models.tokenizer import Tokenizer, load_tokenizer


def bundled_path() -> Path:
    """The directory of the bundled model, in Hugging Face layout, with its MODEL_CARD.md."""
    return Path(str(resources.files("jspec.models") / "bundled_model"))


def load_bundled(dtype: DTypeLike | None = None) -> tuple[Decoder, Tokenizer]:
    """Load the small byte-level model that ships with jspec.

    Args:
        dtype: as in `jspec.load_model`.

    Returns:
        The model and its tokenizer.
    """
    path = bundled_path()
    return load_model(path, dtype=dtype), load_tokenizer(path)
