"""Prompts of `jspec.LLM` in the forms that callers have them: text, token ids, vLLM's dicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from jspec.config import shown, token_ids, whole_number
from jspec.models.tokenizer import Tokenizer


class TextPrompt(TypedDict):
    """A prompt as vLLM takes it."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids of a prompt as vLLM takes them."""

    prompt_token_ids: Sequence[int]


Prompt = str | bytes | Sequence[int] | np.ndarray | TextPrompt | TokensPrompt
_WAY_OUT = (
    "pass a text, token ids, or {'prompt': text} or {'prompt_token_ids': ids}, or a list of these"
)


def encode_prompts(tokenizer: Tokenizer, prompts: Prompt | Sequence[Prompt]) -> list[list[int]]:
    """Token ids of one prompt or several.

    Args:
        tokenizer: converts texts.
        prompts: a prompt, or a sequence of prompts.

    Returns:
        The ids of each prompt. Those of a text begin with the special tokens that the tokenizer
        adds.

    Raises:
        TypeError: a prompt has another form.
        ValueError: a text cannot be encoded.
    """
    if isinstance(prompts, str | bytes | Mapping) or _is_ids(prompts):
        return [encode_prompt(tokenizer, prompts)]
    if not isinstance(prompts, Sequence) and getattr(prompts, "ndim", 0) != 2:
        raise TypeError(f"prompts={shown(prompts)} are no prompts; {_WAY_OUT}")
    return [encode_prompt(tokenizer, prompt) for prompt in prompts]


def encode_prompt(tokenizer: Tokenizer, prompt: Any) -> list[int]:
    """Token ids of one prompt; raises as `encode_prompts`."""
    if isinstance(prompt, Mapping):
        if list(prompt) == ["prompt"] and isinstance(prompt["prompt"], str | bytes):
            return tokenizer.encode(prompt["prompt"])
        if list(prompt) != ["prompt_token_ids"]:
            raise TypeError(
                f"prompt {shown(dict(prompt))} is a mapping of another form; {_WAY_OUT}"
            )
        prompt = prompt["prompt_token_ids"]
    elif isinstance(prompt, str | bytes):
        return tokenizer.encode(prompt)
    if not _is_ids(prompt) and not (isinstance(prompt, list | tuple) and not prompt):
        raise TypeError(f"prompt {shown(prompt)} is no prompt; {_WAY_OUT}")
    return list(token_ids("prompt_token_ids", prompt))


def _is_ids(value: Any) -> bool:
    """Whether ``value`` is a sequence of whole numbers, and not empty."""
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__"):
        return False
    return getattr(value, "ndim", 1) == 1 and len(value) > 0 and whole_number(value[0]) is not None
