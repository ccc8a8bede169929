"""Pallas kernels on Mosaic GPU, called by `jspec.ops` alone. None yet: XLA serves everything."""
