"""Options of decoding, resolved: models on the device, the config of the step, its gammas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec.config import shown, whole_number
from jspec.decode.auto import Gammas
from jspec.decode.checks import check_models
from jspec.decode.draft import Drafter, NoDraft
from jspec.decode.exact import check_exact
from jspec.decode.on_mesh import mesh_model
from jspec.decode.settings import StepConfig, check_draft
from jspec.decode.state import FlatModels, Models
from jspec.ops.stochastic import Rule
from jspec.policies import Policy
from jspec.policies.prepare import prepare_params
from jspec.typing import Model

Gamma = int | Literal["auto"] | None


@dataclasses.dataclass(frozen=True)
class ResolvedOptions:
    """Options of decoding, checked and complete.

    Attributes:
        models: The models, on the device.
        flat: The same, as programs take them.
        config: The config of the longest step.
        gammas: The configs that ``gamma="auto"`` chooses from, None for a fixed gamma.
        steps: Steps of a chunk.
    """

    models: Models
    flat: FlatModels
    config: StepConfig
    gammas: Gammas | None
    steps: int

    @classmethod
    def of(
        cls,
        model: Model,
        *,
        draft: Drafter | None,
        gamma: Gamma,
        draft_model: Model | None,
        target: Policy,
        rule: Rule,
        policy_params: Any,
        steps_per_chunk: int | None,
        backends: Mapping[str, str],
        exact: bool,
    ) -> ResolvedOptions:
        """Check settings as `jspec.generate` takes them, and make what they need of the model.

        Raises `TypeError` and `ValueError` for invalid ones.
        """
        models = Models(model, draft_model, policy_params)
        check_models(models)
        draft = NoDraft() if draft is None else draft
        check_draft(draft)
        max_gamma = draft.traits.default_gamma if gamma is None or gamma == "auto" else gamma
        config = StepConfig(max_gamma, draft, backends, target, rule, exact)
        gammas = Gammas(config) if gamma == "auto" else None
        config = config if gammas is None else gammas.longest
        if exact:
            check_exact(model, config.cache_policy)
        if policy_params is None:
            models = models._replace(policy=prepare_params(config.cache_policy, model))
        on_mesh = mesh_model(model)
        if on_mesh is not None:
            on_mesh.check(config)
            models = on_mesh.placed(models)
        models = draft.prepare(models)
        traits = draft.traits
        if (models.draft is None) == (traits.needs_model or traits.makes_model):
            raise ValueError(
                "draft=ModelDraft() and draft_model go together; pass both or neither. SelfDraft "
                "takes one with quantized=, and makes it where there is none"
            )
        if steps_per_chunk is None:
            steps_per_chunk = usual_steps(draft, gamma)
        steps = whole_number(steps_per_chunk) or 0
        if steps < 1:
            raise ValueError(f"steps_per_chunk={shown(steps_per_chunk)} must be at least 1")
        models = _on_device(models)
        return cls(models, FlatModels.of(models), config, gammas, steps)


def usual_steps(draft: Drafter, gamma: Gamma) -> int:
    """Steps of a chunk by default: few, but enough that the host is done before the device.

    ``gamma="auto"`` may choose plain steps, which are short.
    """
    steps_are_long = jax.default_backend() == "cpu" or (draft.traits.runs_model and gamma != "auto")
    return 4 if steps_are_long else 16


def _on_device(models: Models) -> Models:
    """``models`` with arrays of JAX for those of numpy, which each call would copy again."""
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(models)):
        return models
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, models)
