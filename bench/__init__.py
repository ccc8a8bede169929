"""Benchmarks of jspec: `python -m bench list`."""
