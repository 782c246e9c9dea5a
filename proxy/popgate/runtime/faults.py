"""Counts faults: failures inside popgate that did not stop other work.

The metrics show the counts. This module also remembers with which messages popgate has failed. After two failures, a
message is considered unreadable, and is dead-lettered without its headers. Only the first fault of each message and of
each journal is logged.
"""

import logging
from collections import Counter, OrderedDict
from enum import StrEnum

_log = logging.getLogger(__name__)

ATTEMPTS_MAX = 2
"""Number of failures after which a message is considered unreadable."""
REMEMBERED_MAX = 4_096
"""Maximum number of messages whose failures are remembered."""


class FaultPart(StrEnum):
    """The kind of work in which a fault happened. The metric of the faults has this label."""

    MESSAGE = "message"
    """Work on one message, which was then retried or dead-lettered."""
    TASK = "task"
    """A background task."""
    JOURNAL = "journal"
    """A call of a journal. The journal lost the events of this call."""


class Faults:
    """Counts the faults of one process, and remembers the messages that caused them."""

    def __init__(self) -> None:
        self.counts: Counter[FaultPart] = Counter(dict.fromkeys(FaultPart, 0))
        self._failures: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._failed_journals: set[str] = set()

    def task_failed(self) -> None:
        """Count the failure of a background task. The caller has already logged it."""
        self.counts[FaultPart.TASK] += 1

    def journal_failed(self, journal: str, error: Exception) -> None:
        """Count a failed call of a journal. ``journal`` is the name of the journal's class."""
        self.counts[FaultPart.JOURNAL] += 1
        if journal not in self._failed_journals:
            self._failed_journals.add(journal)
            _log.error("a journal failed and lost events", exc_info=error, extra={"journal": journal})

    def message_failed(self, queue: str, copy_id: str, error: Exception) -> bool:
        """Count a failure to process a message. Return whether the message is now considered unreadable."""
        self.counts[FaultPart.MESSAGE] += 1
        message = (queue, copy_id)
        failures = self._failures[message] = self._failures.pop(message, 0) + 1
        if failures == 1:
            _log.error("a message failed inside popgate", exc_info=error, extra={"queue": queue, "copy_id": copy_id})
        while len(self._failures) > REMEMBERED_MAX:
            self._failures.popitem(last=False)
        return failures >= ATTEMPTS_MAX

    def is_unreadable(self, queue: str, copy_id: str) -> bool:
        """Return whether the message is considered unreadable, because popgate has failed to process it too often."""
        return bool(self._failures) and self._failures.get((queue, copy_id), 0) >= ATTEMPTS_MAX

    def set_aside(self, queue: str, copy_id: str) -> None:
        """Forget the failures of a message that has been moved to the dead-letter queue."""
        self._failures.pop((queue, copy_id), None)
