"""What a file of a family provides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from jspec.config import ModelConfig
from jspec.models.errors import quoted
from jspec.models.files import Fields

# What a config.json says of training, of its own making and of code that jspec does not run.
_WITHOUT_EFFECT = frozenset(
    "model_type architectures auto_map dtype torch_dtype transformers_version use_cache "
    "cache_implementation initializer_range attention_dropout bos_token_id pad_token_id "
    "output_router_logits router_aux_loss_coef output_attentions output_hidden_states return_dict "
    "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type "
    "quantization_config".split()
)
_EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.")


def refuse_unknown(fields: Fields) -> None:
    """Raise `CheckpointError` for what nobody asked of ``fields`` that may change a token."""
    unknown = sorted(
        key for key in fields.values if key not in fields.read | _WITHOUT_EFFECT and key[:1] != "_"
    )
    if unknown:
        raise fields.error(
            f"fields {quoted(unknown)} are unknown to jspec; remove them if they change nothing"
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read.

    ``read`` turns the fields of a config.json into settings; it raises `CheckpointError` or
    `ValueError` for what is missing, of a wrong type, or asks for what jspec does not have.
    ``modules`` are the names of tensors without layer and leaf: jspec's, such as ``"mlp.up"``, and
    those in the file, such as ``"mlp.up_proj"``. A tensor whose leaf in the file is neither weight
    nor bias is named with its leaf on both sides. With ``more_layers`` a file may hold layers
    beyond those of config.json, which are left out. With ``packed`` the experts of a layer are in
    one tensor, as `jspec.models.packed` says. ``tensor_name`` maps the name of a tensor in a file
    to its name in a language model, or to None for a tensor of another part, which is left out.
    """

    read: Callable[[Fields], ModelConfig]
    modules: Mapping[str, str]
    more_layers: bool = False
    packed: bool = False
    tensor_name: Callable[[str], str | None] = lambda name: name

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
