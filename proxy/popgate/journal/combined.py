"""Several journals as one: each hears of every event, in the order in which they are given."""

from collections.abc import Sequence

from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.journal import EventKind, Journal, Subject


class CombinedJournal:
    """A journal that passes on what it is told."""

    def __init__(self, *journals: Journal) -> None:
        self._journals = journals

    def record(
        self,
        kind: EventKind,
        subscription: Subscription,
        subjects: Sequence[Subject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        for journal in self._journals:
            journal.record(kind, subscription, subjects, at, details=details, new_copy_ids=new_copy_ids, groups=groups)

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
            journal.note(kind, topic, at, group=group, queue_index=queue_index, detail=detail)


_conforms: type[Journal] = CombinedJournal
