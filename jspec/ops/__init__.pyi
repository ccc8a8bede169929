"""Public operations, each loaded on first use."""

from .attention.appended import rotate_append_attend as rotate_append_attend
from .attention.dense import attention as attention
from .attention.gathered import gathered_attention as gathered_attention
from .attention.hashed import hash_attention as hash_attention
from .attention.merge import merge_attention as merge_attention
from .attention.scored import scored_attention as scored_attention
from .attention.tree import tree_attention as tree_attention
from .attention.weights import mean_weights as mean_weights
from .collisions import bucket_codes as bucket_codes
from .collisions import collision_scores as collision_scores
from .exact_probabilities import token_probabilities as token_probabilities
from .fused import verify_and_pack as verify_and_pack
from .hash import (
    hamming_scores as hamming_scores,
)
from .hash import (
    hash_encode as hash_encode,
)
from .hash import (
    hash_encode_both as hash_encode_both,
)
from .hash_selection import hash_select as hash_select
from .key_scores import dot_scores as dot_scores
from .key_scores import page_scores as page_scores
from .packing import Packed as Packed
from .packing import pack as pack
from .path import pack_path as pack_path
from .registry import operations as operations
from .sample import Sampling as Sampling
from .selection import select as select
from .stochastic import verify_stochastic as verify_stochastic
from .tree import Tree as Tree
from .tree import verify_tree as verify_tree
from .verify import Verified as Verified
from .verify import verify_greedy as verify_greedy
