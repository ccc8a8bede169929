"""CUDA kernels called through XLA's FFI, each with a C++ handler of the same name for CPUs.

Only `jspec.ops` calls them. ``python -m jspec.cuda_ffi build`` compiles them ahead of time;
otherwise the first use does.
"""
