"""The ways to bring sharded matrices together: one file each, and the table of all.

A new strategy is a subclass of `Strategy` in a file of its own and an entry here. The planner
compares the entries by their cost, and of equally cheap ones takes the first.
"""

from muon_optax.sharding.strategies.all_to_all import AllToAll
from muon_optax.sharding.strategies.base import Strategy
from muon_optax.sharding.strategies.gather import Gather
from muon_optax.sharding.strategies.gram import Gram
from muon_optax.sharding.strategies.groups import Groups
from muon_optax.sharding.strategies.local import Local

__all__ = ["GROUPS", "LOCAL", "STRATEGIES", "Strategy"]

LOCAL = Local()
STRATEGIES: dict[str, Strategy] = {s.name: s for s in (AllToAll(), Gather(), LOCAL, Gram())}
# Weighed by 'auto' in plans of their own, where there are more devices than matrices.
GROUPS = (Groups(2), Groups(4), Groups(8))
