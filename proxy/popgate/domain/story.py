"""Describes what the journal tells of one message.

These values are sent to clients as they are, so each field has a plain JSON type. Times are Unix seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass

EVENTS_MAX = 1_000
"""Maximum number of events of a story: the latest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryEvent:
    """One event of the journal (docs/journal.md). A null field is unknown, or does not apply to the event."""

    at: float
    event: str
    group: str | None = None
    queue: int | None = None
    copy_id: str | None = None
    delivery_count: int | None = None
    client: str | None = None
    proxy: str | None = None
    held_seconds: float | None = None
    new_copy_id: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The events of a message, the oldest first.

    ``is_complete`` is false if the search was ended before all files were read, or if a file could not be read; the
    latest files are read first. ``trouble`` says why. Events of the last minute may not be in the files yet.
    """

    events: Sequence[StoryEvent]
    is_complete: bool
    trouble: str | None = None
