"""Writes tests/models/maxtext/: parameters of two goldens as MaxText's converter makes them.

``python -m tests.models.maxtext_goldens FILE``, FILE being MaxText's
``checkpoint_conversion/utils/param_mapping.py``, which needs nothing else of it (0.2.5). Names are
those of the tree, joined by hyphens.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.models.goldens import GOLDEN

FOLDER = Path(__file__).parent / "maxtext"
# The functions' family, and whether layers are scanned.
MADE = {"llama3": ("LLAMA31", True), "qwen3": ("QWEN", False)}


def tree_of(converter: Any, name: str) -> dict[str, np.ndarray]:
    """The parameters of a golden by MaxText's names."""
    family, scanned = MADE[name]
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = load_file(GOLDEN / name / "model.safetensors")
    functions = (
        getattr(converter, f"{family}_MAXTEXT_TO_HF_PARAM_{x}") for x in ("MAPPING", "HOOK_FN")
    )
    mapping, hooks = (function(config, None, scan_layers=scanned) for function in functions)
    heads, size = (config[x] for x in ("num_attention_heads", "head_dim"))
    kv_heads, width = config["num_key_value_heads"], config["hidden_size"]

    def converted(name: str, source: str) -> np.ndarray:
        x = tensors[source]
        rows = {"query": heads, "key": kv_heads, "value": kv_heads}.get(name.split("-")[-2])
        shape = x.T.shape if rows is None else (width, rows, size)[-x.ndim - 1 :]
        shape = (heads, size, width) if name.endswith("out-kernel") else shape
        shape = x.shape if name.endswith("embedding") else shape
        some = hooks.get(name) or []
        for hook in some if isinstance(some, list) else [some]:
            x = hook(x, shape)
        return np.ascontiguousarray(x)

    made = {}
    for name, sources in mapping.items():
        if isinstance(sources, list):
            made[name] = np.stack([converted(name, x) for x in sources], axis=1)
        elif sources in tensors:  # a tied head is not
            made[name] = converted(name, sources)
    return made


if __name__ == "__main__":
    spec: Any = importlib.util.spec_from_file_location("param_mapping", Path(sys.argv[1]))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for golden in MADE:
        save_file(tree_of(module, golden), FOLDER / f"{golden}.safetensors")
