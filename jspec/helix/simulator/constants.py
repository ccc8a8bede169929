"""The constants of the cost model that the Helix paper does not state, each with its source."""

from __future__ import annotations

import dataclasses

MAX_CONSTANT = 1e9  # of any unit; larger ones overflow


def _constant(value: float, source: str) -> float:
    return dataclasses.field(default=value, metadata={"source": source})


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model that the paper does not state.

    `Constants.sources` gives the source of each. Fields that end in ``_us`` are microseconds;
    fields that end in ``_share`` are fractions of a peak rate, above 0.

    Raises:
        ValueError: a value is out of range.
    """

    bytes_per_value: float = _constant(0.5, "the paper: weights and cache in FP4")
    bytes_per_activation: float = _constant(0.5, "the paper: arithmetic in FP4; 2 is bfloat16")
    collective_us: float = _constant(
        6.5, "fixed time of a collective; NCCL's all-to-all of 2 KiB on 2 and 4 H100s"
    )
    exchange_us: float = _constant(
        6.5, "fixed time of the all-to-all over KVP; as collective_us, until it is fitted"
    )
    row_us: float = _constant(
        0.0, "time of each row in the exchange over KVP, in addition to its bytes; figure 3: 1.2"
    )
    kernel_us: float = _constant(
        2.0, "fixed time of each of a layer's kernels; a kernel that reads little takes 2 on H200"
    )
    attention_us: float = _constant(
        2.0, "fixed time of a layer's attention; as that of another kernel, until it is fitted"
    )
    memory_share: float = _constant(1.0, "of the memory's rate that is reached; appendix A: 1")
    arithmetic_share: float = _constant(1.0, "of the arithmetic's rate that is reached; assumed")
    attention_share: float = _constant(
        1.0, "of the rate of the other arithmetic that attention reaches; assumed"
    )
    link_share: float = _constant(1.0, "of the links' rate that is reached; assumed")
    memory_kept: float = _constant(0.0, "share of the memory that holds neither; assumed")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            divides = field.name.endswith("_share") or field.name.startswith("bytes")
            if not (value > 0 if divides else value >= 0):
                raise ValueError(
                    f"{field.name}={value} must be {'above' if divides else 'at least'} 0"
                )
            if value > MAX_CONSTANT:
                raise ValueError(f"{field.name}={value} must be at most {MAX_CONSTANT:g}")

    @classmethod
    def sources(cls) -> dict[str, str]:
        """The source of each constant, by name."""
        return {field.name: field.metadata["source"] for field in dataclasses.fields(cls)}


CONSTANTS = Constants()

__all__ = ["CONSTANTS", "Constants"]
