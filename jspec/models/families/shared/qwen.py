"""Settings that Qwen's families share: windows in some layers, and dual chunk attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.families.shared.family import refuse_unknown
from jspec.models.families.shared.layers import layer_count, read_layers, sliding_layers
from jspec.models.files import Fields


def read_qwen(
    fields: Fields,
    *,
    first_window: int | None = 28,
    has_window: Callable[[int, int], bool] = lambda layer, limit: layer >= limit,
    **special: Any,
) -> ModelConfig:
    """Read the fields that the families share.

    Args:
        fields: the object in config.json.
        first_window: default of max_window_layers, 28 as in transformers.
        has_window: whether a layer has a window, by its number and max_window_layers.
        **special: further arguments of `read_layers`.

    Returns:
        The settings.

    Raises:
        CheckpointError: as `read_layers`, and where num_key_value_heads is missing, which
            transformers fills with the size of one certain model.
    """
    fields.integer("num_key_value_heads")
    limit = fields.count("max_window_layers", first_window)
    used, size = fields.boolean("use_sliding_window", False), fields.get("sliding_window")
    # Without a size there is no window, whatever else is said.
    used = used and not ("sliding_window" in fields.values and size is None)
    windows = sliding_layers(fields, lambda layer: used and has_window(layer, limit))
    if any(windows) and not used:
        raise fields.error(
            "layer_types asks for sliding windows, but use_sliding_window=false or "
            f"sliding_window={shown(size)} for none; correct the one that is wrong"
        )
    window = fields.integer("sliding_window", 4096) if any(windows) else None
    config = read_layers(fields, windows=windows, window=window, **special)
    return dataclasses.replace(config, max_context=_single_chunk(fields, config.max_context))


def _single_chunk(fields: Fields, context: int) -> int:
    """The part of ``context`` in which dual chunk attention (Qwen2.5-1M) is plain attention."""
    chunks = fields.object("dual_chunk_attention_config")
    if not chunks.values:
        return context
    # Local and sparse attention approximate the same model within these lengths.
    chunks.ignore("local_size", "sparse_attention_enabled", "sparse_attention_threshold")
    chunks.ignore("sparse_attention_config", "sparse_attention_last_q")
    size = chunks.integer("chunk_size")
    original = chunks.integer("original_max_position_embeddings", size)
    refuse_unknown(chunks)
    return min(context, size, original)


def dense_layers(fields: Fields) -> tuple[int, ...]:
    """The layers without experts, by mlp_only_layers and decoder_sparse_step."""
    layers = layer_count(fields)
    step = fields.integer("decoder_sparse_step", 1)
    listed = fields.numbers("mlp_only_layers", layers)
    return tuple(n for n in range(layers) if n in listed or (n + 1) % step)
