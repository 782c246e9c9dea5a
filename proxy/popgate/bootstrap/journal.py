"""Starts the journal if the settings request one, and combines it with the counters and the log."""

import contextlib
from functools import partial
from typing import TYPE_CHECKING

from popgate.bootstrap.endings import stop_in_time
from popgate.config import ServeOptions
from popgate.domain.errors import StartupError
from popgate.journal.combined import CombinedJournal
from popgate.journal.counters import EventCounters
from popgate.journal.event_log import EventLog
from popgate.ports.clock import Clock
from popgate.ports.stories import Stories
from popgate.runtime.faults import Faults

if TYPE_CHECKING:
    from popgate.adapters.journal_parquet.journal import ParquetJournal

TAIL_SECONDS = 0.8
"""Maximum seconds to write the journal's last events when the process exits. The whole exit also has a time limit
(``endings``)."""


async def started_journal(
    options: ServeOptions, instance: str, clock: Clock, stack: contextlib.AsyncExitStack
) -> "ParquetJournal | None":
    """Start the configured journal, and let ``stack`` stop it. Return None if no journal is configured. Raises:
    StartupError."""
    if options.journal is None:
        return None
    try:
        # These modules are slow to load, and need an optional extra.
        from popgate.adapters.journal_parquet.journal import ParquetJournal
        from popgate.adapters.journal_parquet.places import place_at, shown
        from popgate.adapters.journal_parquet.writer import Rotation
    except ImportError as error:
        raise StartupError(
            f"--journal needs packages that are not installed ({error}): install popgate[journal] where popgate runs"
        ) from error
    journal = ParquetJournal(
        instance,
        partial(place_at, options.journal),
        Rotation(options.journal_rotate_seconds, options.journal_rotate_events),
        clock,
        name=shown(options.journal),
    )
    await journal.start()
    stack.push_async_callback(stop_in_time, "journal", journal.stop, seconds=TAIL_SECONDS)
    return journal


def combined(faults: Faults, counters: EventCounters, written: "ParquetJournal | None") -> CombinedJournal:
    """Return the journal of the engine: it counts the events, writes them if ``written`` is a journal, and logs those
    that are not about messages."""
    return CombinedJournal(faults, counters, *([] if written is None else [written]), noting=[EventLog()])


def journal_stories(options: ServeOptions) -> Stories | None:
    """Return the reader of the journal's stories, or None if no journal is configured."""
    if options.journal is None:
        return None
    from popgate.adapters.journal_parquet.stories import ParquetStories  # slow to load, like the journal

    return ParquetStories(options.journal)
