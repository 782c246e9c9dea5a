"""Applies the stored lease records of a queue to its state, after this proxy has claimed the queue.

A queue can have a million records, so all of them have one result, and equal deadlines are one object.
"""

from collections.abc import Iterable

from popgate.engine.queue.effects import Effects
from popgate.engine.queue.state import QueueState
from popgate.ports.leases import LoadedRecord


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
