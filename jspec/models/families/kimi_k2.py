"""Kimi K2: DeepSeek-V3 under a name of its own."""

from jspec.models.families.deepseek_v3 import FAMILY

__all__ = ["FAMILY"]
