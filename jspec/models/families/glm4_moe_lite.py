"""GLM-4.7-Flash: DeepSeek-V3's layers."""

from jspec.models.families.deepseek_v3 import FAMILY

__all__ = ["FAMILY"]
