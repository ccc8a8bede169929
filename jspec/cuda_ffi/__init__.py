"""CUDA kernels behind XLA's FFI, called by `jspec.ops` alone. None yet: XLA serves everything."""
