"""Errors of building and loading the kernels."""

from jspec.dispatch import BackendError


class BuildError(BackendError):
    """The kernels cannot be built or loaded here; the message says why and what to do."""
