"""Errors of reading and writing models."""


class CheckpointError(ValueError):
    """A model directory or one of its files is missing, malformed or of another shape."""
