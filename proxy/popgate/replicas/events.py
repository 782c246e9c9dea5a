"""Records the decisions and actions of a keeper as events.

Each event is counted for the metrics, stored in memory for requests, and logged.
"""

import logging
from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from popgate.domain.replicas import Change, QueueRef

_log = logging.getLogger(__name__)

KEPT_MAX = 200


class KeeperEvent(StrEnum):
    TERM_BEGAN = "term_began"
    TERM_ENDED = "term_ended"
    BLIND = "blind"
    """The keeper can't work at present. For example, RabbitMQ did not answer, or no proxy reported the replica settings
    of its groups."""
    DECIDED = "decided"
    """The verdict on a queue differs from the verdict in the previous plan."""
    STARTED = "started"
    DONE = "done"
    DROPPED = "dropped"
    """The change was not made, because the check before the change found a reason against it (for example, the queue
    has other members by now), or because the keeper lost the lock."""
    FAILED = "failed"


LEVELS = {
    KeeperEvent.TERM_ENDED: logging.WARNING,
    KeeperEvent.BLIND: logging.WARNING,
    KeeperEvent.FAILED: logging.WARNING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """An event of a keeper. ``at`` is in Unix seconds.

    ``what`` is the kind of the change, or the verdict on the queue, or empty.
    """

    at: float
    event: KeeperEvent
    what: str = ""
    queue: QueueRef | None = None
    node: str = ""
    reason: str = ""
    fencing_token: int | None = None


class KeeperRecord:
    """Stores the latest ``KEPT_MAX`` events. ``counts`` is the number of all events by event and ``what``."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.latest: deque[RecordedEvent] = deque(maxlen=KEPT_MAX)

    def note(self, event: RecordedEvent) -> None:
        self.counts[event.event, event.what] += 1
        self.latest.append(event)
        said = {
            "event": str(event.event),
            "what": str(event.what),
            "node": event.node,
            "reason": event.reason,
            "fencing_token": event.fencing_token,
        }
        extra = {name: value for name, value in said.items() if value not in ("", None)}
        if event.queue is not None:
            extra |= {"queue": event.queue.name, "vhost": event.queue.vhost}
        _log.log(LEVELS.get(event.event, logging.INFO), "replica keeper", extra=extra)

    def note_change(
        self, event: KeeperEvent, at: float, change: Change, reason: str, fencing_token: int | None
    ) -> None:
        self.note(
            RecordedEvent(
                at=at,
                event=event,
                what=change.kind,
                queue=change.queue,
                node=change.node,
                reason=reason,
                fencing_token=fencing_token,
            )
        )
