"""What a file of a family provides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from jspec.config import ModelConfig
from jspec.models.files import Fields


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read.

    ``read`` turns the fields of a config.json into settings; it raises `CheckpointError` or
    `ValueError` for what is missing, of a wrong type, or asks for what jspec does not have.
    ``modules`` are the names of tensors without layer and leaf: jspec's, such as ``"mlp.up"``, and
    those in the file, such as ``"mlp.up_proj"``.
    """

    read: Callable[[Fields], ModelConfig]
    modules: Mapping[str, str]

    def stored_name(self, parameter: str) -> str:
        """The name in the file of a parameter, or of a part of one that is joined.

        ``layers.0.mlp.up.kernel`` of a Llama is ``model.layers.0.mlp.up_proj.weight``.
        """
        if parameter == "embedding":
            return f"{self.modules[parameter]}.weight"
        module, _, leaf = parameter.rpartition(".")
        leaf = "bias" if leaf == "bias" else "weight"
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
            return f"model.layers.{layer}.{self.modules[module]}.{leaf}"
        return f"{self.modules[module]}.{leaf}"
