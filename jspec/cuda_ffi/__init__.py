"""CUDA kernels behind XLA's FFI, each with a CPU handler of the same name; called by `jspec.ops`.

``python -m jspec.cuda_ffi build`` compiles them ahead of time; otherwise the first use does.
"""
