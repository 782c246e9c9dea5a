"""Combines several journals into one. Each event is passed to all of them, in the given order.

If a journal raises an exception, this journal loses the event, but the other journals still receive it. The exception
is not raised to the caller, because the caller has already published or settled the messages.
"""

from collections.abc import Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.journal import EventKind, Journal, JournalSubject
from popgate.runtime.faults import Faults


class CombinedJournal:
    """A journal that passes every event to ``journals``. ``faults`` counts the calls in which one of them failed.

    ``noting`` only get the events that are not about messages (``note``).
    """

    def __init__(self, faults: Faults, *journals: Journal, noting: Sequence[Journal] = ()) -> None:
        self._faults = faults
        self._journals = journals
        self._noting = (*journals, *noting)

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
        for journal in self._noting:
            try:
                journal.note(kind, topic, at, group=group, queue_index=queue_index, detail=detail)
            except Exception as error:
                self._faults.journal_failed(type(journal).__name__, error)


_conforms: type[Journal] = CombinedJournal
