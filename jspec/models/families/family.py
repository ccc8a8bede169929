"""What a file of a family provides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from jspec.config import ModelConfig
from jspec.models.files import Fields

_EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.")


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read.

    ``read`` turns the fields of a config.json into settings; it raises `CheckpointError` or
    `ValueError` for what is missing, of a wrong type, or asks for what jspec does not have.
    ``modules`` are the names of tensors without layer and leaf: jspec's, such as ``"mlp.up"``, and
    those in the file, such as ``"mlp.up_proj"``. A tensor whose leaf in the file is neither weight
    nor bias is named with its leaf on both sides. With ``more_layers`` a file may hold layers
    beyond those of config.json, which are left out.
    """

    read: Callable[[Fields], ModelConfig]
    modules: Mapping[str, str]
    more_layers: bool = False

    def stored_name(self, parameter: str) -> str:
        """The name in the file of a parameter, or of a part of one that is joined.

        ``layers.0.mlp.up.kernel`` of a Llama is ``model.layers.0.mlp.up_proj.weight``.
        """
        if parameter == "embedding":
            return f"{self.modules[parameter]}.weight"
        module, _, leaf = parameter.rpartition(".")
        prefix = ""
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
            prefix = f"model.layers.{layer}."
        if stored := self.modules.get(f"{module}.{leaf}"):
            return f"{prefix}{stored}"
        leaf = "bias" if leaf == "bias" else "weight"
        expert = _EXPERT.match(module)
        if expert is None:
            return f"{prefix}{self.modules[module]}.{leaf}"
        # All experts of a layer are named alike, but for their numbers.
        module = self.modules[module.replace(expert[0], "mlp.experts.", 1)]
        return f"{prefix}{expert[0]}{module}.{leaf}"
