"""Policies: what a layer keeps of each token, and which positions a query reads.

Adding one is a file with a subclass of `Policy` and a line in `named.POLICIES`.
"""

from jspec.policies.dense import Dense
from jspec.policies.exact_topk import ExactTopK
from jspec.policies.hata import Hata
from jspec.policies.loki import Loki
from jspec.policies.magicpig import MagicPIG
from jspec.policies.named import POLICIES, named_policy
from jspec.policies.policy import Policy, ScoredPolicy
from jspec.policies.quest import Quest
from jspec.policies.streaming import Streaming

__all__ = [
    "POLICIES",
    "Dense",
    "ExactTopK",
    "Hata",
    "Loki",
    "MagicPIG",
    "Policy",
    "Quest",
    "ScoredPolicy",
    "Streaming",
    "named_policy",
]
