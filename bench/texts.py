"""Prompts that every machine has: for the bundled model, and for another one."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import jspec
from bench.real import texts as real_texts
from jspec.eval.ruler_bytes import training_document

BYTES_A_TOKEN = 4  # more than the source of Python has
MIN_BYTES = 1024  # of a document


def texts(tokenizer: jspec.Tokenizer, rows: Iterable[int], tokens: int) -> list[list[int]]:
    """Texts of ``tokens`` tokens, which depend only on the number of their row.

    Even rows are stretches of the standard library's source, odd ones documents that ask for facts
    which they gave before.
    """
    root = Path(sysconfig.get_path("stdlib"))
    source = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    size, result = max(BYTES_A_TOKEN * tokens, MIN_BYTES), []
    for row in rows:
        rng = np.random.default_rng([1, row])
        begin = int(rng.integers(len(source) - size))
        text = training_document(size, rng)[0] if row % 2 else source[begin : begin + size]
        result.append(tokenizer.encode(text)[:tokens])
    return result


def model_and_prompts(
    path: Path | None, count: int, tokens: int
) -> tuple[jspec.Decoder, jspec.Tokenizer, list[list[int]]]:
    """The model at ``path``, None for the bundled one, its tokenizer, and prompts of ``tokens``.

    Those of another model are the prompts of the suite `real`, up to so long.

    Raises:
        ValueError: for a model without a chat template.
    """
    if path is None:
        model, tokenizer = jspec.load_bundled()
        return model, tokenizer, texts(tokenizer, range(count), tokens)
    tokenizer, template = jspec.load_tokenizer(path), jspec.load_chat_template(path)
    if template is None:
        raise ValueError(f"{path} has no chat template; the texts ask questions in one")
    prompts = [x.tokens for x in real_texts.prompts(tokenizer, template, count, tokens)]
    return jspec.load_model(path), tokenizer, prompts
