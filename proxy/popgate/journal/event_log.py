"""Logs the events of topics, groups and queues: what was created, deleted and switched, and which queues this proxy
claims and releases.

At a start, and when a proxy joins or leaves, many queues change their owner at once. Therefore claims and releases are
collected for a moment, and logged in one line for each group; if there are many groups, in one line for all.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.journal import EventKind, Journal, JournalSubject

_log = logging.getLogger(__name__)

COLLECTED_SECONDS = 0.5
"""Seconds for which claims and releases are collected."""
GROUPS_MAX = 20
"""Maximum number of groups whose claims, or releases, get a line each."""
_TEXTS = {
    EventKind.GROUP_CREATED: "a group was created",
    EventKind.GROUP_DELETED: "a group was deleted",
    EventKind.TOPIC_DELETED: "a topic was deleted",
    EventKind.MODE_CHANGED: "the consume mode of a group was switched",
}
_MOVES = {
    EventKind.QUEUE_CLAIMED: "this proxy owns queues of a group now",
    EventKind.QUEUE_RELEASED: "this proxy no longer owns queues of a group",
}
_MANY_MOVES = {
    EventKind.QUEUE_CLAIMED: "this proxy owns queues of many groups now",
    EventKind.QUEUE_RELEASED: "this proxy no longer owns queues of many groups",
}


def _call_later(seconds: float, call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_later(seconds, call)


class EventLog:
    """A journal that logs. ``call_later`` calls a function after some seconds."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], None] = _call_later) -> None:
        self._call_later = call_later
        self._moved: dict[EventKind, dict[tuple[TopicName, GroupName | None], set[int]]] = {}

    def record(
        self,
        kind: EventKind,
        subscription: Subscription,
        subjects: Sequence[JournalSubject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        """Log nothing: there are too many messages."""

    def note(
        self,
        kind: EventKind,
        topic: TopicName,
        at: float,
        *,
        group: GroupName | None = None,
        queue_index: int | None = None,
        detail: str = "",
    ) -> None:
        if kind in _MOVES:
            self._note_move(kind, topic, group, queue_index)
        elif kind in _TEXTS:
            fields: dict[str, Any] = {"topic": topic, **({} if group is None else {"group": group})}
            if kind is EventKind.MODE_CHANGED:
                fields["mode"] = detail
            _log.info(_TEXTS[kind], extra=fields)

    def _note_move(self, kind: EventKind, topic: TopicName, group: GroupName | None, queue: int | None) -> None:
        if not self._moved:
            self._call_later(COLLECTED_SECONDS, self._log_moves)
        other = EventKind.QUEUE_RELEASED if kind is EventKind.QUEUE_CLAIMED else EventKind.QUEUE_CLAIMED
        queues = {-1 if queue is None else queue}
        self._moved.setdefault(kind, {}).setdefault((topic, group), set()).update(queues)
        if opposite := self._moved.get(other, {}).get((topic, group)):  # only the last change matters
            opposite -= queues

    def _log_moves(self) -> None:
        moved, self._moved = self._moved, {}
        for kind, groups in moved.items():
            changed = {group: queues for group, queues in groups.items() if queues}
            if len(changed) > GROUPS_MAX:
                count = sum(map(len, changed.values()))
                _log.info(_MANY_MOVES[kind], extra={"groups": len(changed), "queues": count})
                continue
            for (topic, group), queues in changed.items():
                _log.info(_MOVES[kind], extra={"topic": topic, "group": group, "queues": sorted(queues)})


_conforms: type[Journal] = EventLog
