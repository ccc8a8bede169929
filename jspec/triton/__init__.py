"""Triton kernels through jax-triton, called by `jspec.ops` alone.

A file of kernels (``*_kernel.py``) imports Triton and is itself imported when it first runs.
"""
