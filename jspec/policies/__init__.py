"""Policies: what a layer keeps of each token, and which positions a query reads.

Adding one is a file with a subclass of `Policy` and a line in `named.POLICIES`, or, where
verification guides it, a subclass of `Guided` and a line in `named.GUIDED`.
"""

from jspec.cache.storage import HostStorage
from jspec.policies.budgeted import ScoredPolicy
from jspec.policies.dense import Dense, DenseAttend
from jspec.policies.exact_topk import ExactTopK
from jspec.policies.guided import Guided
from jspec.policies.hata import Hata
from jspec.policies.hata_off import HataOff
from jspec.policies.loki import Loki
from jspec.policies.magicpig import MagicPIG
from jspec.policies.named import GUIDED, POLICIES, named_policy
from jspec.policies.policy import HashEncoder, Pages, Policy, TokenAttention
from jspec.policies.prepare import prepare_params
from jspec.policies.quest import Quest
from jspec.policies.selection import Selection
from jspec.policies.streaming import Streaming
from jspec.policies.vegas import SparseSpec, SpecExtend, Vegas

__all__ = [
    "GUIDED",
    "POLICIES",
    "Dense",
    "DenseAttend",
    "ExactTopK",
    "Guided",
    "HashEncoder",
    "Hata",
    "HataOff",
    "HostStorage",
    "Loki",
    "MagicPIG",
    "Pages",
    "Policy",
    "Quest",
    "ScoredPolicy",
    "Selection",
    "SparseSpec",
    "SpecExtend",
    "Streaming",
    "TokenAttention",
    "Vegas",
    "named_policy",
    "prepare_params",
]
