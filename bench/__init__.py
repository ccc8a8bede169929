"""Benchmarks of jspec: `python -m bench list`."""

import os

# Rivals run in the same process: JAX must not preallocate the whole device.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# By default JAX uses at most three quarters of a device, and the largest cases need more. The rest
# is for NCCL: a device without memory for it does not join the others, which then wait forever.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
