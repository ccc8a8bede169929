"""Options of decoding: what callers pass, and what is made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.checks import shown, whole_number
from jspec.config import SamplingMode, positive
from jspec.decode.auto import LADDER
from jspec.decode.checks import check_exact, check_models, refuses_exact
from jspec.decode.draft import Drafter, NoDraft, SelfDraft
from jspec.decode.on_mesh import mesh_model
from jspec.decode.processors import LogitsProcessor, check_processors
from jspec.decode.settings import EXACT_BACKENDS, StepConfig, check_draft
from jspec.decode.state import Exact, FlatModels, Models
from jspec.decode.weights import NewTarget, VariableAndValue, variables_of
from jspec.dispatch import Backends
from jspec.ops.stochastic import Rule
from jspec.policies import Dense, Policy
from jspec.policies.prepare import prepare_params
from jspec.sharding import device_sharding, place
from jspec.typing import Model

Gamma = int | Literal["auto"] | None
# The level of `exact` where a caller names none, for requests that it can serve.
DEFAULT_EXACT: Exact | None = None


class DecodeOptions(TypedDict, total=False):
    """Keyword arguments that `jspec.generate`, `jspec.Engine` and `jspec.LLM` share.

    All may be left out.

    Attributes:
        draft: Where draft tokens come from. None is ``NoDraft()``: plain decoding by the same code.
            The default is ``SelfDraft()``, of `jspec.LLM` ``NgramDraft()``.
        gamma: Most draft tokens per step. ``"auto"`` chooses it for each chunk by measured times
            and acceptance (docs/drafting.md). None, the default, is ``"auto"`` where that changes
            no seeded token, as `usual_gamma` says.
        draft_model: The second model, for ``ModelDraft()``. Where the target is on another device
            than the default one, it is copied there.
        target: The policy by which the model itself reads the context when it decodes. The default
            is ``Dense()``; any other is not lossless, and needs ``draft=None``.
        rule: ``"token"``, the default, or ``"block"``, as in `StepConfig`.
        policy_params: What `jspec.policies.prepare_params` made for a policy that needs parameters;
            None, the default, makes them of the model, and in `jspec.LLM` of a text.
        steps_per_chunk: Steps between two calls of ``on_tokens``. None, the default, is 4 on a CPU,
            or where drafts take passes of a model and ``gamma="auto"`` is not passed, else 16.
        cache_dtype: Dtype of the target's keys and values; None, the default, is the model's.
            ``"float8_e4m3fn"`` halves a cache of 16 bits, and changes tokens (docs/cache.md).
        backends: Backends of operations by name, as in ``{"verify_greedy": "cuda"}``.
        exact: ``"tokens"`` for the greedy tokens of plain decoding, also in bfloat16 and with any
            batch and draft, on an NVIDIA GPU; ``"bits"`` for logits that do not depend on how a
            prompt is prefilled either (docs/exact.md). None, the default, promises neither.
        processors: Logits processors of all requests, in this order. `jspec.generate` and
            `jspec.LLM` add those that fields of `SamplingParams` need before them; a
            `jspec.Engine`, which compiles nothing later, needs these in the list too.
    """

    draft: Drafter | None
    gamma: Gamma
    draft_model: Model | None
    target: Policy
    rule: Rule
    policy_params: Any
    steps_per_chunk: int | None
    cache_dtype: DTypeLike | None
    backends: Mapping[str, str]
    exact: Exact | None
    processors: Sequence[LogitsProcessor]


@dataclasses.dataclass(frozen=True)
class ResolvedOptions:
    """Options of decoding, checked and complete.

    Attributes:
        models: The models, on the device.
        flat: The same, as programs take them.
        config: The config of the longest step.
        configs: The configs that a chunk may take, by gamma: several with ``gamma="auto"``.
        sampled_gamma: The gamma of chunks with sampled requests; None where it is chosen for them
            as for others.
        steps: Steps of a chunk.
        cache_dtype: As in `DecodeOptions`.
        processors: As in `DecodeOptions`.
        makes_params: Whether the policy's parameters were made of the target, not passed.
        makes_draft: Whether the drafter made ``models.draft`` of the target.
        variables: Of models with new weights, as `variables_of` returns them, but for those of
            what the drafter made.
    """

    models: Models
    flat: FlatModels
    config: StepConfig
    configs: Mapping[int, StepConfig]
    sampled_gamma: int | None
    steps: int
    cache_dtype: DTypeLike | None
    processors: tuple[LogitsProcessor, ...]
    makes_params: bool
    makes_draft: bool
    variables: Sequence[VariableAndValue] = ()

    def with_at_most(self, gamma: int) -> ResolvedOptions:
        """These with at most ``gamma`` draft tokens a step: more than are asked for cost time."""
        if self.config.gamma <= gamma or len(self.configs) > 1:
            return self
        config = dataclasses.replace(self.config, gamma=gamma)
        return dataclasses.replace(self, config=config, configs={gamma: config})

    @classmethod
    def of(cls, model: Model, options: DecodeOptions) -> ResolvedOptions:
        """Check ``options``, and make what they need of the model.

        Raises `TypeError` and `ValueError` for invalid ones.
        """
        check_names(options)
        policy_params = options.get("policy_params")
        models = Models(model, options.get("draft_model"), policy_params)
        check_models(models)
        makes_params = policy_params is None
        draft, asked = options.get("draft", SelfDraft()), options.get("gamma")
        draft = NoDraft() if draft is None else draft
        check_draft(draft)
        usual, sampled_gamma = usual_gamma(draft)
        gamma = usual if asked is None else asked
        if gamma != "auto" and whole_number(gamma) is None:
            raise TypeError(f"gamma={shown(gamma)} must be a whole number or 'auto'")
        config = StepConfig(
            draft.traits.default_gamma if gamma == "auto" else gamma,
            draft,
            options.get("backends", Backends()),
            options.get("target", Dense()),
            options.get("rule", "token"),
        )
        if "exact" in options:
            exact = options["exact"]
        else:
            exact = usual_exact(model, config, DEFAULT_EXACT)
        config = dataclasses.replace(config, exact=exact)
        if gamma == "auto" and isinstance(draft, NoDraft):
            raise ValueError(
                "gamma='auto' chooses how much a drafter drafts; pass one, or gamma=0 for plain "
                "decoding"
            )
        gammas = sorted({*LADDER, config.gamma}) if gamma == "auto" else [config.gamma]
        configs = {gamma: dataclasses.replace(config, gamma=gamma) for gamma in gammas}
        config = configs[gammas[-1]]
        if config.exact:
            check_exact(model, config.cache_policy, config.exact)
        if (on_mesh := mesh_model(model)) is not None:
            on_mesh.check(config)
        models = _on_device(_prepared(models, config, makes_params=makes_params))
        traits = draft.traits
        if (models.draft is None) == (traits.needs_model or traits.makes_model):
            raise ValueError(
                "draft=ModelDraft() and draft_model go together; pass both or neither. SelfDraft "
                "takes one with quantized=, and makes it where there is none"
            )
        steps_per_chunk = options.get("steps_per_chunk")
        steps = usual_steps(draft, asked)
        if steps_per_chunk is not None:
            steps = positive("steps_per_chunk", steps_per_chunk)
        dtype, flat = options.get("cache_dtype"), FlatModels.of(models)
        sampled_gamma = sampled_gamma if asked is None else None
        processors = check_processors(options.get("processors", ()))
        makes = makes_params, traits.makes_model and options.get("draft_model") is None
        return cls(models, flat, config, configs, sampled_gamma, steps, dtype, processors, *makes)

    def without_weights(self, blank: Model) -> ResolvedOptions:
        """The same without the arrays of the target and of what was made of it.

        ``blank``: the target without arrays, of `WeightTypes`.
        """
        models = self.models._replace(target=blank)
        if self.makes_draft:
            models = models._replace(draft=None)
        if self.makes_params:
            models = models._replace(policy=None)
        empty = FlatModels((), ())
        return dataclasses.replace(self, models=models, flat=empty, variables=())

    def with_models_of(self, other: ResolvedOptions) -> ResolvedOptions:
        """The same with the models of ``other``, which differ in their arrays alone."""
        models = {"models": other.models, "flat": other.flat, "variables": other.variables}
        return dataclasses.replace(self, **models)

    def updated(
        self, target: NewTarget, params_of: Callable[[Model], Any] | None
    ) -> ResolvedOptions:
        """The same with another ``target``, and with what is made of it.

        Call it on `without_weights`, so that no weight is in memory twice.

        ``params_of`` returns the policy's parameters for the new target; None leaves those that the
        caller passed.
        """
        models = self.models._replace(target=target.model)
        if params_of is not None:
            models = models._replace(policy=params_of(models.target))
        makes_params = self.makes_params and params_of is None
        models = _prepared(models, self.config, makes_params=makes_params)
        models = models._replace(draft=_on_device(models.draft), policy=_on_device(models.policy))
        flat = FlatModels.of(models, (target.leaves, target.structure))
        of_draft = [] if self.makes_draft else variables_of(models.draft)
        variables = [*target.variables, *of_draft]
        return dataclasses.replace(self, models=models, flat=flat, variables=variables)

    def configs_of(self, mode: SamplingMode) -> Mapping[int, StepConfig]:
        """The configs that a chunk of ``mode`` may take, by gamma."""
        if mode == "greedy" or self.sampled_gamma is None:
            return self.configs
        return {self.sampled_gamma: self.configs[self.sampled_gamma]}


def usual_gamma(draft: Drafter) -> tuple[int | Literal["auto"], int | None]:
    """The gamma where the caller names none, and that of chunks with sampled requests.

    The latter is None where it is the same. What ``"auto"`` chooses follows measured times, so that
    it may not decide about sampled tokens: those of drafts with logits depend on gamma.
    """
    if isinstance(draft, NoDraft):
        return 0, None
    return "auto", None if draft.traits.one_hot else draft.traits.default_gamma


def usual_exact(model: Model, config: StepConfig, level: Exact | None) -> Exact | None:
    """``level`` where a request can be served so, else None; ``config`` has the other options."""
    if level is None or config.is_lossy or config.draft.traits.branches:
        return None
    is_named = not set(config.backends).isdisjoint(EXACT_BACKENDS[level])
    return None if is_named or refuses_exact(model, config.cache_policy, level) else level


def check_names(options: Mapping[str, Any]) -> None:
    """Raise `TypeError` for an option that does not exist."""
    names = DecodeOptions.__annotations__
    if unknown := sorted(options.keys() - names.keys()):
        raise TypeError(f"there is no option {unknown[0]!r}; pass any of {', '.join(names)}")


def usual_steps(draft: Drafter, gamma: Gamma) -> int:
    """Steps of a chunk by default: few, but enough that the host is done before the device.

    ``gamma="auto"`` may choose plain steps, which are short.
    """
    steps_are_long = jax.default_backend() == "cpu" or (draft.traits.runs_model and gamma != "auto")
    return 4 if steps_are_long else 16


def _prepared(models: Models, config: StepConfig, *, makes_params: bool) -> Models:
    """``models`` with what policy and drafter make of the target."""
    if makes_params:
        models = models._replace(policy=prepare_params(config.cache_policy, models.target))
    others = models.draft, models.policy
    # Only where there are any, as flattening the target takes milliseconds.
    has_others = any(x is not None for x in others)
    if (on_mesh := mesh_model(models.target)) is not None:
        models = on_mesh.placed(models)
    elif has_others and (device := device_sharding(models.target)) is not None:
        models = Models(models.target, *place(others, device))
    return config.draft.prepare(models)


def _on_device(tree: Any) -> Any:
    """``tree`` with arrays of JAX for those of numpy, which each call would copy again."""
    if not any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)
