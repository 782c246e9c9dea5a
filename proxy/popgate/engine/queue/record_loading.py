"""Applies many lease records to the state of their queue: those that this proxy loads when it claims the queue, and
those that other proxies report.

A queue can have a million records, so all of them have one result, and equal deadlines are one object.
"""

from collections.abc import Iterable

from popgate.domain.names import is_transient
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.state import QueueState
from popgate.ports.leases import LoadedRecord


def heard(state: QueueState, records: Iterable[LoadedRecord]) -> list[LoadedRecord]:
    """Return those of ``records``, reported by another proxy, from which a message here must be updated.

    See ``QueueHost.hear``.
    """
    found: list[LoadedRecord] = []
    for one in records:
        message = state.messages.get(one.copy_id)
        if not (is_transient(one.copy_id) if message is None else message.is_undecided):
            found.append(one)
    return found


def learn_all(state: QueueState, records: Iterable[LoadedRecord], now: float) -> Effects:
    """Update the copies of ``records`` like ``QueueState.learn``, and return the effects of all updates."""
    effects = Effects()
    known, apply = state.known, state.apply
    latest, deadline = 0.0, now
    for copy_id, record, remaining_seconds in records:
        if remaining_seconds != latest:
            latest, deadline = remaining_seconds, now + remaining_seconds
        apply(known(copy_id), record, deadline, now, effects)
    return effects
