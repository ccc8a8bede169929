"""Benchmarks of jspec: `python -m bench list`."""

import os

# The rivals live in the same process: JAX must not take the whole device before they start.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# By default JAX takes three quarters of a device at most, and the largest cases need more. What is
# left is for NCCL: a device that has none for it does not meet the others, which then wait forever.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
