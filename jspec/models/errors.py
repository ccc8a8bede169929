"""Errors of reading and writing models, and how messages show what a file says."""


class CheckpointError(ValueError):
    """A model directory or one of its files is missing, malformed or of another shape."""


class ChatTemplateError(ValueError):
    """A chat template is malformed, refuses the messages, or makes too much of them."""


def on_one_line(error: object, limit: int = 200) -> str:
    """Another library's error on one line of at most ``limit`` characters, safe to print."""
    words = " ".join(str(error)[: 8 * limit].split())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in words[:limit])
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
