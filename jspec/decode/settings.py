"""What a step is compiled for: its draft length, its drafter and its backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, get_args

from jspec.config import refuse_class, shown, whole_number
from jspec.decode.draft import Drafter, NoDraft, SelfDraft
from jspec.decode.state import Exact, Models
from jspec.dispatch import Backends, use_backends
from jspec.ops.registry import step_operations
from jspec.ops.stochastic import Rule, check_rule
from jspec.policies import Dense, Guided, Policy
from jspec.policies.policy import check_policy, needs_params

# With ``exact``, the backends of all passes of the target, by which every drafter stores the same
# keys, and those of its batch-invariant passes.
EXACT_APPENDS = Backends(rotate_and_append="triton", rotate_append_encode="exact")
EXACT_BACKENDS: dict[Exact, Backends] = {
    "tokens": Backends(
        dict.fromkeys(("linear", "linear_chain", "attention", "scored_attention"), "exact_decode"),
        **EXACT_APPENDS,
    ),
    "bits": Backends(
        linear="exact",
        linear_chain="one_by_one",
        attention="exact",
        scored_attention="exact",
        **EXACT_APPENDS,
    ),
}


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """The static part of a step: each value that is used compiles one program.

    Attributes:
        gamma: Most draft tokens of a step. 0 is a plain step, from which the drafter learns; with
            ``NoDraft()`` more give passes of the same shape as those of speculation.
        draft: Where draft tokens come from.
        backends: A backend by the name of an operation of a step; where none is named, the best
            one.
        target: The policy by which the model itself reads the context when it decodes. Any but
            ``Dense()`` is not lossless, and takes ``draft=NoDraft(), gamma=0``. Prompts are
            prefilled densely in any case.
        rule: How drafts that were sampled from logits are verified: ``token`` decides token by
            token, ``block`` for the draft as a whole, which accepts at least as much on average.
            Greedy rows and drafts without logits do not depend on it.
        exact: ``"tokens"`` for steps whose logits have the same bits whatever is drafted and
            batched, ``"bits"`` for such a prefill too; a model that supports neither is refused
            (docs/exact.md). None promises neither.

    Raises:
        BackendError: For the name of a backend that does not exist.
        TypeError: For a setting of another type.
        ValueError: For settings that do not go together.
    """

    gamma: int = 4
    draft: Drafter = SelfDraft()
    backends: Mapping[str, str] = Backends()
    target: Policy = Dense()
    rule: Rule = "token"
    exact: Exact | None = None

    def __post_init__(self) -> None:
        check_draft(self.draft)
        if not isinstance(self.backends, Mapping):
            raise TypeError(
                f"backends={shown(self.backends)} must name backends of operations, as in "
                "{'verify_greedy': 'cuda'}"
            )
        gamma = whole_number(self.gamma)
        if gamma is None:
            raise TypeError(f"gamma={shown(self.gamma)} must be a whole number")
        if gamma >= 2**31:
            raise ValueError(f"gamma={shown(gamma)} must be below 2**31")
        object.__setattr__(self, "gamma", gamma)
        backends = Backends(self.backends)
        backends.check(step_operations())
        object.__setattr__(self, "backends", backends)
        if gamma < 0:
            raise ValueError(f"gamma={gamma} must be at least 0, which decodes plainly")
        check_target(self.target, self.draft, self.gamma)
        check_rule(self.rule)
        self._check_exact()

    def _check_exact(self) -> None:
        """Raise `ValueError` for a level that does not exist or settings that do not go with it."""
        if self.exact is None:
            return
        if self.exact not in get_args(Exact):
            raise ValueError(
                f'exact={shown(self.exact)} must be "tokens" (drafts change no greedy token), '
                '"bits" (no bit depends on how a text is computed, prefill included) or None'
            )
        if self.is_lossy:
            raise ValueError(
                f'target={shown(self.target)} selects what the model reads; exact="{self.exact}" '
                "needs target=Dense()"
            )
        named = set(self.backends) & set(EXACT_BACKENDS[self.exact])
        if named:
            raise ValueError(
                f'exact="{self.exact}" chooses the backends of {", ".join(sorted(named))}; leave '
                "them out of backends"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether the model itself reads a selection of the context."""
        return not isinstance(self.target, Dense)

    @property
    def numbers_of_step(self) -> bool:
        """Whether each step samples with random numbers of its own under the token rule too.

        It must where drafts of a step depend on tokens that an earlier step rejected
        (docs/sampling.md).
        """
        return self.gamma > 0 and self.draft.traits.learns_from_rejected

    @property
    def selects_in_prefill(self) -> bool:
        """Whether the last query of a prompt's prefill selects what the first draft reads."""
        return self.draft.collect_policy is not None

    @property
    def cache_policy(self) -> Policy:
        """The policy whose columns and pages the target's cache keeps."""
        return self.target if self.is_lossy else self.draft.cache_policy

    def of_models(self) -> AbstractContextManager[None]:
        """A context in which operations take the backends that are named."""
        return use_backends(self.backends)

    @property
    def of_verification(self) -> Backends:
        """The backends of the target's passes in steps: verification and plain ones."""
        return Backends(self.backends) | (EXACT_BACKENDS[self.exact] if self.exact else {})

    def of_target(self) -> AbstractContextManager[None]:
        """As `of_models`, for the target's passes in steps."""
        return use_backends(self.of_verification)

    @property
    def of_prefill(self) -> Backends:
        """The backends of the target's passes over prompts."""
        if self.exact == "tokens":
            return Backends(self.backends) | EXACT_APPENDS
        return self.of_verification


def check_draft(draft: Any) -> None:
    """Raise `TypeError` for a value that is no drafter, with what was probably meant."""
    if isinstance(draft, Drafter):
        return
    if isinstance(draft, str):
        raise TypeError(f"draft={shown(draft)} is a string; pass jspec.named_draft({shown(draft)})")
    refuse_class("draft", draft)
    if isinstance(draft, Guided):
        raise TypeError(f"draft={shown(draft)} is a policy; pass GuidedDraft({shown(draft)})")
    if isinstance(draft, Policy):
        raise TypeError(f"draft={shown(draft)} is a policy; pass SelfDraft({shown(draft)})")
    raise TypeError(f"draft={shown(draft)} must be a drafter, as NgramDraft() is")


def check_target(target: Any, draft: Drafter, gamma: int) -> None:
    """Raise `TypeError` for a value that is no policy, `ValueError` where it cannot decode."""
    check_policy("target", target)
    if isinstance(target, Guided):
        raise ValueError(
            f"target={shown(target)} reads what verification attended to, so it only drafts: pass "
            f"draft=GuidedDraft({shown(target)})"
        )
    if not isinstance(target, Dense) and (gamma or not isinstance(draft, NoDraft)):
        raise ValueError(
            f"target={shown(target)} selects for one token at a time; pass draft=NoDraft(), "
            "gamma=0, or draft=SelfDraft(...) with that policy for lossless decoding"
        )


def check_arrays(models: Models, config: StepConfig) -> None:
    """Raise `ValueError` where a policy lacks what `jspec.policies.prepare_params` makes for it."""
    if models.policy is None and needs_params(config.cache_policy, models.target):
        raise ValueError(
            f"{type(config.cache_policy).__name__} needs parameters; pass jspec.Models(target, "
            "policy=jspec.policies.prepare_params(policy, target, tokens)), with a sample text"
        )


PLAIN = StepConfig(gamma=0, draft=NoDraft())
