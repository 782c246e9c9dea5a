"""Defines the options of a replica keeper."""

from dataclasses import dataclass, field

from popgate.domain.replica_plan import ReplicaLimits
from popgate.domain.replica_wanted import ReplicaPolicies


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperOptions:
    """Options of a replica keeper.

    ``lag_max`` is the maximum number of log entries by which a member can be behind the leader and still counts as
    caught up.
    """

    policies: ReplicaPolicies = field(default_factory=ReplicaPolicies)
    limits: ReplicaLimits = field(default_factory=ReplicaLimits)
    check_interval_seconds: float = 30.0
    catch_up_seconds_max: float = 600.0
    lag_max: int = 1_000
