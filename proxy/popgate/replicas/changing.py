"""Carries out one change of a queue's replicas.

It checks the members of the queue, requests the change, and waits until a new member has caught up, or until the
requested member is the leader.
"""

import asyncio
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from popgate.domain.errors import BrokerUnavailable
from popgate.domain.replicas import Change, ChangeKind, MemberState, majority
from popgate.ports.clock import Clock
from popgate.ports.replicas import Proof, ReplicaBroker, ReplicaRefused
from popgate.replicas.options import KeeperOptions

LEAD_SECONDS_MAX = 10.0
"""Maximum seconds to wait until the requested member is the leader. RabbitMQ may confirm the request without an effect,
because the member can't be reached."""
LOOK_SECONDS_MIN = 0.25
LOOK_SECONDS_MAX = 5.0


class Ending(StrEnum):
    DONE = "done"
    DROPPED = "dropped"
    FAILED = "failed"


class ChangeOutcome(NamedTuple):
    ending: Ending
    reason: str


async def carry_out(
    change: Change, broker: ReplicaBroker, options: KeeperOptions, clock: Clock, prove: Proof
) -> ChangeOutcome:
    """Check and make a change, and return its outcome.

    ``prove`` is called right before the request to the broker, and confirms that the keeper still holds the lock.

    Raises: BrokerUnavailable, ReplicaRefused, and the errors of ``prove``.
    """
    members = await broker.look(change.queue)
    objection = _objection(change, members, options.lag_max)
    if objection is not None:
        return ChangeOutcome(Ending.DROPPED, objection)
    if change.kind is ChangeKind.FORGET:
        await broker.forget(change.queue, change.node, prove)
        return ChangeOutcome(Ending.DONE, change.reason)
    if change.kind is ChangeKind.LEAD:
        await broker.lead(change.queue, change.node, prove)
        return await _leads(change, broker, clock)
    await broker.add(change.queue, change.node, prove)
    return await _caught_up(change, broker, options, clock)


def _objection(change: Change, members: Sequence[MemberState], lag_max: int) -> str | None:
    """Return the reason why the current members don't permit the change, or None if they permit it."""
    names = frozenset(member.node for member in members)
    if not members:
        return "the queue does not exist any more"
    if names != change.members:
        return f"its members have been changed meanwhile: {', '.join(sorted(names))}"
    online = [member for member in members if member.is_online]
    if len(online) < majority(len(members)):
        return f"{len(online)} of {len(members)} members answer"
    if change.kind is ChangeKind.FORGET:
        return f"{change.node} answers again" if any(member.node == change.node for member in online) else None
    if change.kind is ChangeKind.LEAD:
        return _objection_to_leader(change.node, members, lag_max)
    lost = change.online - {member.node for member in online}
    if lost:  # the new member's vote may be needed before it has copied anything
        return f"{', '.join(sorted(lost))} answered when the change was decided, and does not answer any more"
    end = _end(members)
    behind = [member.node for member in online if not _keeps_up(member, end, lag_max)]
    return f"{', '.join(behind)} must catch up first" if behind else None


def _objection_to_leader(node: str, members: Sequence[MemberState], lag_max: int) -> str | None:
    new = next(member for member in members if member.node == node)
    if new.is_leader:
        return f"{node} is already its leader"
    if not new.is_online:
        return f"{node} does not answer"
    return None if _keeps_up(new, _end(members), lag_max) else f"{node} must catch up first"


def _end(members: Sequence[MemberState]) -> int:
    """Return the log position of the leader, or the highest position of all members if no leader is known.

    Return 0 if no position is known.
    """
    leading = [member.position for member in members if member.is_leader and member.position is not None]
    return max(leading or [member.position for member in members if member.position is not None], default=0)


def _keeps_up(member: MemberState, end: int, lag_max: int) -> bool:
    return member.is_voter and (member.position is None or member.position >= end - lag_max)


async def _leads(change: Change, broker: ReplicaBroker, clock: Clock) -> ChangeOutcome:
    deadline = clock.monotonic() + LEAD_SECONDS_MAX
    while True:
        members = await broker.look(change.queue)
        if any(member.node == change.node and member.is_leader for member in members):
            return ChangeOutcome(Ending.DONE, change.reason)
        if clock.monotonic() >= deadline:
            return ChangeOutcome(Ending.FAILED, f"{change.node} is not its leader after {LEAD_SECONDS_MAX:g} s")
        await asyncio.sleep(LOOK_SECONDS_MIN)


async def _caught_up(change: Change, broker: ReplicaBroker, options: KeeperOptions, clock: Clock) -> ChangeOutcome:
    """Wait until the new member has caught up with the leader, and return the outcome.

    The member has caught up when it reaches the position that the leader had at the first observation after the change.
    """
    deadline, pause, end = clock.monotonic() + options.catch_up_seconds_max, LOOK_SECONDS_MIN, None
    while True:
        try:
            members = await broker.look(change.queue)
        except (BrokerUnavailable, ReplicaRefused):  # the change was requested, but its result is unknown
            members = ()
        if members and end is None:
            end = _end(members)
        new = next((member for member in members if member.node == change.node), None)
        if new is not None and new.is_online and _keeps_up(new, end or 0, 0):
            return ChangeOutcome(Ending.DONE, change.reason)
        if clock.monotonic() >= deadline:
            return ChangeOutcome(
                Ending.FAILED, f"{change.node} has not caught up within {options.catch_up_seconds_max:g} s"
            )
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, LOOK_SECONDS_MAX)
