"""Implementations that jspec is compared with, one file per operation."""
