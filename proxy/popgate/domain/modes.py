"""The consume mode of a group: how it is switched, and what is good in which (design: section 4).

Pure: each step is another spec, which somebody writes where the one before it still stands (``ports.catalog``). The
generation grows by one with each step, and the store gives no lease under an earlier one: who has not heard of a step
yet can't do harm.

               to pull                    the last lease is over, or its time is
    POP g ----------------> DRAINING g+1 ----------------------------------------> PULL g+2
      ^                          |                                                    |
      +--------------------------+                                                    |
      |    back to pop (g+2): no lease is cut off                                     |
      +-------------------------------------------------------------------------------+
           to pop (g+3): what is not committed returns, at once or, the same way round, after a drain

A lease is good while the mode lasts in which it was given, its drain and the way back included. One that isn't is given
back by whoever owns its queue.
"""

from dataclasses import replace

from popgate.domain.errors import WrongMode
from popgate.domain.names import LeaseId
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec

DRAIN_SECONDS = 60.0
"""How long a drain from pop to pull takes at most, where nothing else is asked for. From pull to pop there is none."""
DRAIN_SECONDS_MAX = 43_200.0
_PULL = "pull-"


def switched(spec: GroupSpec, to: ConsumeMode, *, now: float, drain_seconds: float | None = None) -> GroupSpec:
    """``spec`` after somebody asked for mode ``to`` (pop or pull); itself where there is nothing to do.

    ``now``: the store's time. ``drain_seconds``: how long leases have to end, counted anew where a drain goes on; None:
    as long as is usual, or as was asked for before.
    """
    assert to is not ConsumeMode.DRAINING, "nobody can ask for a drain that leads nowhere"
    if spec.drain is not None:
        if spec.drain.to is not to:
            return _entered(spec, to, spec.lease_generation)
        return spec if drain_seconds is None else replace(spec, drain=Drain(to=to, ends_at=now + drain_seconds))
    if spec.mode is to:
        return spec
    seconds = drain_seconds
    if seconds is None:
        seconds = DRAIN_SECONDS if to is ConsumeMode.PULL else 0.0
    if seconds <= 0 and to is ConsumeMode.POP:
        return _entered(spec, to, spec.mode_generation + 1)
    draining = _entered(spec, ConsumeMode.DRAINING, spec.lease_generation)
    return replace(draining, drain=Drain(to=to, ends_at=now + seconds))


def drained(spec: GroupSpec) -> GroupSpec:
    """``spec`` after its drain: leases of the mode before are good no more."""
    assert spec.drain is not None, "only what is draining is drained"
    return _entered(spec, spec.drain.to, spec.mode_generation + 1)


def leased_by(spec: GroupSpec) -> ConsumeMode:
    """In which mode, pop or pull, the leases were given that are good now."""
    if spec.drain is None:
        return spec.mode
    return ConsumeMode.POP if spec.drain.to is ConsumeMode.PULL else ConsumeMode.PULL


def is_good(spec: GroupSpec, lease_id: LeaseId) -> bool:
    """Whether a lease is of the mode that is in force, or drains."""
    if leased_by(spec) is ConsumeMode.PULL:
        return lease_id.startswith(pull_prefix(spec))
    return not lease_id.startswith(_PULL)


def pull_prefix(spec: GroupSpec) -> str:
    """How the ids of all leases begin that pull clients are given while ``spec`` is in force."""
    return f"{_PULL}{spec.lease_generation}-"


def pull_lease_id(spec: GroupSpec, since: int) -> LeaseId:
    """Of all that is pulled from a queue by the client that has held it since the assignment's generation ``since``."""
    return LeaseId(f"{pull_prefix(spec)}{since}")


def extended_under(spec: GroupSpec) -> int:
    """The mode generation under which leases are extended. In a drain that is none, so that leases which ran out are
    not: it ends when no lease is left, and from then on there must be no more."""
    return spec.mode_generation if spec.mode is ConsumeMode.POP else -1


def is_pulled(lease_id: LeaseId) -> bool:
    """Whether a pull client has it, or had."""
    return lease_id.startswith(_PULL)


def wrong_mode(spec: GroupSpec, wanted: ConsumeMode) -> WrongMode:
    """What is told to whom came for ``wanted``, pop or pull, which is not the mode now."""
    topic, group = spec.subscription
    return WrongMode(f"{_situation(spec, wanted)} (group {group!r} of topic {topic!r})", mode=spec.mode)


def _situation(spec: GroupSpec, wanted: ConsumeMode) -> str:
    if spec.drain is None:
        if spec.mode is ConsumeMode.PULL:
            return "the group is in pull mode: ask for an assignment, or let an admin switch it to pop"
        return "the group is in pop mode: pop, or let an admin switch it to pull"
    if spec.drain.to is wanted:
        return f"the group is on its way to {wanted} mode, as soon as all leases are over: try again then"
    return f"the group is on its way to {spec.drain.to} mode: what is leased can be settled, and nothing new is given"


def _entered(spec: GroupSpec, mode: ConsumeMode, lease_generation: int) -> GroupSpec:
    return replace(
        spec, mode=mode, mode_generation=spec.mode_generation + 1, lease_generation=lease_generation, drain=None
    )
