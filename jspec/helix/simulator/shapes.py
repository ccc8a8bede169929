"""What is simulated: a model by its sizes and a machine by its rates, each from a JSON file."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jspec.models.files import INTEGER_LIMIT, read_json

MIN_RATE = 1e-6
MAX_RATE = 1e12  # of a machine, in any of its units
DATA = files("jspec.helix.simulator") / "data"
CONFIG = {  # of a Hugging Face config.json
    "layers": ("num_hidden_layers",),
    "hidden": ("hidden_size",),
    "query_heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_size": ("head_dim",),
    "ffn": ("intermediate_size",),
    "vocabulary": ("vocab_size",),
    "dense_layers": ("first_k_dense_replace",),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "shared_experts": ("n_shared_experts",),
    "expert_ffn": ("moe_intermediate_size",),
    "latent": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "rope": ("qk_rope_head_dim",),
    "nope": ("qk_nope_head_dim",),
    "value_size": ("v_head_dim",),
}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, as far as its decoding time depends on them.

    ``ffn``: the inner size of a gated feed-forward. With ``experts`` above 0 all layers but the
    first ``dense_layers`` are mixtures of experts of ``expert_ffn``. With ``latent`` above 0
    attention is MLA: a cache of ``latent + rope`` channels that all heads share, of which the
    projections to keys (``nope``) and values (``value_size``) are absorbed at decode.
    """

    name: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    dense_layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    expert_ffn: int = 0
    latent: int = 0
    query_rank: int = 0
    rope: int = 0
    nope: int = 0
    value_size: int = 0

    def __post_init__(self) -> None:
        needed = ["layers", "hidden", "query_heads", "kv_heads", "ffn", "vocabulary"]
        needed += ["experts_per_token", "expert_ffn"] if self.experts else []
        needed += ["rope", "nope", "value_size"] if self.latent else ["head_size"]
        sizes = [field.name for field in dataclasses.fields(self)[1:]]
        for name in sizes:
            value = getattr(self, name)
            least = 1 if name in needed else 0
            if type(value) is not int or not least <= value <= INTEGER_LIMIT:
                raise ValueError(
                    f"model {self.name}: {name}={value!s:.20} must be a whole number, at "
                    f"least {least} and at most {INTEGER_LIMIT}"
                )
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"model {self.name}: {self.query_heads} query heads are no multiple of "
                f"{self.kv_heads} KV heads"
            )
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"model {self.name}: {self.experts_per_token} experts a token of {self.experts}"
            )


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The rates of a machine.

    ``memory_gb`` and ``memory_gbps`` of one GPU, ``link_gbps`` of its links in one direction,
    ``tflops`` dense at the precision that is simulated, ``gpus`` in one domain of links.
    """

    name: str
    gpus: int
    memory_gb: float
    memory_gbps: float
    link_gbps: float
    tflops: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not MIN_RATE <= value <= MAX_RATE:
                raise ValueError(
                    f"hardware {self.name}: {field.name}={value!s:.20} must be a number, at "
                    f"least {MIN_RATE:g} and at most {MAX_RATE:g}"
                )


def load_shape(name: str) -> ModelShape:
    """A model that ships with jspec, by name, or that of a ``config.json`` (or its folder)."""
    if (DATA / "models" / f"{name}.json").is_file():
        return ModelShape(name=name, **_sizes(_shipped("models", name)))
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"model {name!r} is neither a file nor one of {', '.join(shipped('models'))}"
        )
    return shape_of_config(path.parent.name or path.stem, read_json(path))


def shape_of_config(name: str, config: dict[str, Any]) -> ModelShape:
    """The `ModelShape` of the fields of a Hugging Face ``config.json``."""
    config = {**config, **config.get("text_config", {})}
    sizes = {}
    for field, keys in CONFIG.items():
        values = [config[key] for key in keys if config.get(key) is not None]
        if values:
            sizes[field] = values[0]
    wrong = {key: value for key, value in sizes.items() if type(value) is not int}
    if wrong:
        raise ValueError(f"model {name}: sizes must be whole numbers: {wrong}")
    missing = {"layers", "hidden", "query_heads", "kv_heads", "ffn", "vocabulary"} - sizes.keys()
    if missing:
        raise ValueError(f"model {name}: config.json lacks {', '.join(sorted(missing))}")
    if sizes.get("latent"):
        # A latent cache is one head to all queries, whatever the file says of KV heads.
        sizes |= {"kv_heads": 1, "head_size": 0}
    elif "head_size" not in sizes:
        sizes["head_size"] = sizes["hidden"] // sizes["query_heads"]
    if sizes.get("experts") and "expert_ffn" not in sizes:
        sizes["expert_ffn"] = sizes["ffn"]
    return ModelShape(name=name, **sizes)


def load_hardware(name: str) -> Hardware:
    """A machine that ships with jspec, by name, or that of a JSON file with the same fields."""
    if (DATA / "hardware" / f"{name}.json").is_file():
        return Hardware(name=name, **_sizes(_shipped("hardware", name)))
    if not (path := Path(name)).is_file():
        raise ValueError(
            f"hardware {name!r} is neither a file nor one of {', '.join(shipped('hardware'))}"
        )
    try:
        return Hardware(name=path.stem, **_sizes(read_json(path)))
    except TypeError as error:
        raise ValueError(f"hardware {name}: {error}") from None


def shipped(kind: str) -> list[str]:
    """The names of the ``models`` or the ``hardware`` that ship with jspec."""
    return sorted(path.name.removesuffix(".json") for path in (DATA / kind).iterdir())


def _shipped(kind: str, name: str) -> dict[str, Any]:
    return json.loads((DATA / kind / f"{name}.json").read_text())


def _sizes(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a data file without its ``source``."""
    return {key: value for key, value in fields.items() if key != "source"}
