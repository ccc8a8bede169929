"""Policies: what a layer keeps of each token, and which positions a query reads.

Adding one is a file with a subclass of `Policy` and a line in `POLICIES`.
"""

from jspec.policies.dense import Dense
from jspec.policies.policy import Policy, ScoredPolicy
from jspec.policies.streaming import Streaming

POLICIES: dict[str, type[Policy]] = {
    "dense": Dense,
    "streaming": Streaming,
}

__all__ = ["POLICIES", "Dense", "Policy", "ScoredPolicy", "Streaming"]
