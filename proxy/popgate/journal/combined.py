"""Several journals as one: each hears of every event, in the order in which they are given.

A journal that raises loses the event. Its caller, which has published or settled already, and the other journals go on.
"""

from collections.abc import Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.journal import EventKind, Journal, JournalSubject
from popgate.runtime.faults import Faults


class CombinedJournal:
    """A journal that passes on what it is told. ``faults`` counts the events that a journal failed on."""

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
