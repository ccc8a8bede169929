"""Public names of Helix, each loaded on first use."""

from .cache import (
    cache_specs as cache_specs,
)
from .cache import (
    layouts_on as layouts_on,
)
from .cache import (
    part_of as part_of,
)
from .cache import (
    whole_of as whole_of,
)
from .hosts import Hosts as Hosts
from .mesh import HelixConfig as HelixConfig
from .sharded import Sharded as Sharded
from .sharded import load_model as load_model
from .sharded import shard as shard
