"""What a file of a family provides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from jspec.checks import shown
from jspec.config import ModelConfig
from jspec.models.files import Fields

# No value of these changes a token: what made the file, training, how transformers runs a model or
# generates with it, and what other functions read.
_WITHOUT_EFFECT = frozenset(
    # the file and the classes that read it
    "model_type architectures auto_map transformers_version torch_dtype dtype _name_or_path "
    "_commit_hash _attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "_experts_implementation attn_implementation use_flash_attn use_cache cache_implementation "
    "tokenizer_class task_specific_params finetuning_task id2label label2id problem_type "
    "num_labels torchscript use_bfloat16 tf_legacy_loss is_llama_config transformers.js_config "
    "quantization_config "
    # training
    "initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop residual_dropout "
    "output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise "
    "input_jitter_noise use_cut_cross_entropy ep_size pretraining_tp "
    # outputs and generation
    "output_attentions output_hidden_states output_scores return_dict return_dict_in_generate "
    "chunk_size_feed_forward bos_token_id pad_token_id sep_token_id decoder_start_token_id prefix "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens forced_bos_token_id "
    "forced_eos_token_id max_sequence_length".split()
)
_PREFIXES_WITHOUT_EFFECT = ("unsloth_",)
# Fields of other architectures, at the value that leaves them off.
_OFF = {
    "add_cross_attention": False,
    "attention_bias": False,
    "cross_attention_hidden_size": None,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "lm_head_bias": False,
    "mlp_bias": False,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
    "use_sliding_window": False,
}
_EXPERT = re.compile(r"mlp\.experts\.([0-9]+)\.")


def refuse_unknown(fields: Fields) -> None:
    """Raise `CheckpointError` for a field that nobody has read and that may change a token.

    Null is as good as absent.
    """
    unread = {k: v for k, v in fields.values.items() if k not in fields.read and v is not None}
    unknown = sorted(
        key
        for key, value in unread.items()
        if key not in _WITHOUT_EFFECT
        and not key.startswith(_PREFIXES_WITHOUT_EFFECT)
        and not (key in _OFF and value == _OFF[key])
    )
    if unknown:
        first = unknown[0]
        raise fields.error(
            f"fields {shown(unknown)} are unknown to jspec, the first with the value "
            f"{shown(fields.values[first])}; check model_type, and remove what changes nothing"
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's checkpoints are read.

    Attributes:
        read: turns the fields of a config.json into settings. It raises `CheckpointError` or
            `ValueError` for what is missing, of a wrong type, or asks for what jspec does not have.
        modules: names of tensors without layer and leaf: jspec's, such as ``"mlp.up"``, and those
            in the file, such as ``"mlp.up_proj"``. ``{}`` in the latter stands for the number of an
            expert. A tensor whose leaf in the file is neither weight nor bias is named with its
            leaf on both sides.
        more_layers: whether a file may hold layers beyond those of config.json, which are left out.
        packed: whether the experts of a layer are in one tensor, as `jspec.models.packed` says.
        interleaved: whether neighbouring channels of queries and keys are rotated.
        split: modules in the file whose rows are those of several others, in this order.
        tensor_name: maps the name of a tensor in a file to its name in a language model, or to None
            for a tensor of another part, which is left out.
    """

    read: Callable[[Fields], ModelConfig]
    modules: Mapping[str, str]
    more_layers: bool = False
    packed: bool = False
    interleaved: bool = False
    split: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
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
        module = self.modules[module.replace(expert[0], "mlp.experts.", 1)]
        return f"{prefix}{module.format(expert[1])}.{leaf}"
