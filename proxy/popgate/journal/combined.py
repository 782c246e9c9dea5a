"""Combines several journals: each receives every event, in the order in which the journals are given.

If a journal raises, it loses the event. The other journals still receive it. The caller, which has already published or
settled, also continues.
"""

from collections.abc import Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.journal import EventKind, Journal, JournalSubject
from popgate.runtime.faults import Faults


class CombinedJournal:
    """A journal that forwards every event to other journals. ``faults`` counts the calls on which a journal failed."""

    def __init__(self, faults: Faults, *journals: Journal) -> None:
        self._faults = faults
        self._journals = journals

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
        for journal in self._journals:
            try:
                journal.record(
                    kind, subscription, subjects, at, details=details, new_copy_ids=new_copy_ids, groups=groups
                )
            except Exception as error:
                self._faults.journal_failed(type(journal).__name__, error)

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
        for journal in self._journals:
            try:
                journal.note(kind, topic, at, group=group, queue_index=queue_index, detail=detail)
            except Exception as error:
                self._faults.journal_failed(type(journal).__name__, error)


_conforms: type[Journal] = CombinedJournal
