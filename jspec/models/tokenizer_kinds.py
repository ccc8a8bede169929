"""Which tokenizer.json files take time and memory in proportion to the text, whatever the text."""

from __future__ import annotations

from typing import Any

from jspec.models.errors import quoted
from jspec.models.split_patterns import KNOWN_PATTERNS

# The field of tokenizer.json, the key of a Sequence in it, and the types that are linear.
_LINEAR = (
    (
        "normalizer",
        "normalizers",
        "NFC NFD NFKC NFKD Lowercase StripAccents BertNormalizer Nmt ByteLevel Strip Prepend "
        "Replace",
    ),
    (
        "pre_tokenizer",
        "pretokenizers",
        "ByteLevel Metaspace Whitespace WhitespaceSplit BertPreTokenizer Punctuation Digits "
        "CharDelimiterSplit UnicodeScripts Split",
    ),
    (
        "post_processor",
        "processors",
        "TemplateProcessing BertProcessing RobertaProcessing ByteLevel",
    ),
    (
        "decoder",
        "decoders",
        "ByteLevel WordPiece Metaspace ByteFallback Fuse Strip Replace BPEDecoder CTC",
    ),
)
_STEPS = 16  # of a Sequence
_GROWTH = 16  # times that replacements may lengthen a text
_TEMPLATE = 64  # parts of a template, and ids of each
_WORD = 1000  # characters of a word in WordPiece, whose time is their square


def unproven(values: dict[str, Any]) -> str | None:
    """What in a tokenizer.json could take more than linear time or memory; None if nothing can.

    Whatever is not known to be linear counts as unproven.
    """
    for field, key, kinds in _LINEAR:
        steps = _steps(values.get(field), key)
        if not isinstance(steps, list) or len(steps) > _STEPS:
            return f"{field} is no list of at most {_STEPS} steps"
        growth = 1.0
        for step in steps:
            kind = step.get("type") if isinstance(step, dict) else None
            if not isinstance(kind, str) or kind not in kinds.split():
                return f"{field} has the type {quoted(kind)}"
            if reason := _unproven_pattern(step):
                return f"{field} has {reason}"
            growth *= _growth(step)
        if growth > _GROWTH:
            return f"{field} lengthens texts {growth:.0f}-fold"
    return _unproven_model(values.get("model")) or _unproven_tokens(values.get("added_tokens"))


def _steps(component: Any, key: str) -> Any:
    if component is None:
        return []
    if isinstance(component, dict) and component.get("type") == "Sequence":
        return component.get(key)
    return [component]


def _unproven_pattern(step: dict[str, Any]) -> str | None:
    if step["type"] == "TemplateProcessing":
        return None if _is_short(step) else "a template that repeats itself"
    if step["type"] not in ("Split", "Replace"):
        return None
    pattern = step.get("pattern")
    if isinstance(pattern, dict) and len(pattern) == 1:
        if isinstance(pattern.get("String"), str) and pattern["String"]:
            return None
        known = step["type"] == "Split" and isinstance(pattern.get("Regex"), str)
        if known and pattern["Regex"] in KNOWN_PATTERNS:
            return None
    return f"the pattern {quoted(pattern)}"


def _growth(step: dict[str, Any]) -> float:
    content = step.get("content", step.get("prepend"))
    if step["type"] == "Replace" and isinstance(content, str):
        return max(1.0, len(content) / len(step["pattern"]["String"]))
    if step["type"] == "Prepend" and isinstance(content, str):
        return max(1.0, float(len(content)))
    return 1.0


def _is_short(template: dict[str, Any]) -> bool:
    single, special = template.get("single"), template.get("special_tokens")
    if not isinstance(single, list) or not isinstance(special, dict):
        return False
    ids = [token.get("ids") if isinstance(token, dict) else None for token in special.values()]
    return (
        len(single) <= _TEMPLATE
        and sum("Sequence" in part for part in single if isinstance(part, dict)) <= 1
        and all(isinstance(each, list) and len(each) <= _TEMPLATE for each in ids)
    )


def _unproven_model(model: Any) -> str | None:
    kind = model.get("type", "BPE") if isinstance(model, dict) else None
    if kind not in ("BPE", "WordLevel", "WordPiece"):
        return f"a model of type {quoted(kind)}"
    if not isinstance(model.get("vocab"), dict):
        return "a vocabulary that is no object"
    word = model.get("max_input_chars_per_word", 0)
    if type(word) is not int or word > _WORD:
        return f"max_input_chars_per_word={quoted(word)}"
    return None


def _unproven_tokens(added: Any) -> str | None:
    tokens = [] if added is None else added
    if not isinstance(tokens, list) or not all(isinstance(token, dict) for token in tokens):
        return "added_tokens that are no list of objects"
    # Each time such a token is found, all of the text before it is searched.
    return "an added token with lstrip" if any(t.get("lstrip") for t in tokens) else None
