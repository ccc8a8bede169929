"""Pallas kernels on Mosaic GPU, called by `jspec.ops` alone; nothing here imports Pallas early."""
