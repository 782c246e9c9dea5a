"""Reads the story of one message from the journal's files.

Theory of operation. The files have no index of message ids. So all files are searched, the latest ones first, until the
time is over. Parquet's statistics and dictionaries let Arrow skip most of their contents, and Arrow releases Python's
global interpreter lock meanwhile. An event of another proxy may have the copy id, but not the message id. So the files
are searched again if the first search has found copy ids; and again for the copies that replace them. One story is read
at a time, on a thread, so that readers can't take all of the machine.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from popgate.adapters.journal_parquet.arrow import FileSystem, compute, filesystems, parquet
from popgate.adapters.journal_parquet.places import WRITING, filesystem_at, first_line
from popgate.domain.story import EVENTS_MAX, Story, StoryEvent
from popgate.ports.stories import Stories

SEARCH_SECONDS = 10.0
"""Maximum seconds for which files are searched for one story."""
ROUNDS_MAX = 4
"""Maximum number of searches: a message that was dead-lettered and redriven has one more copy id each time."""
COPIES_MAX = 100
_COLUMNS = (
    *("at", "event", "topic", "group", "queue", "copy_id", "message_id", "delivery_count", "client", "proxy"),
    *("held_seconds", "new_copy_id", "detail", "journal_seq"),
)
_SHOWN = (
    "event",
    "group",
    "queue",
    "copy_id",
    "delivery_count",
    "client",
    "proxy",
    "held_seconds",
    "new_copy_id",
    "detail",
)

_Row = dict[str, Any]


class ParquetStories:
    """Reads stories from the journal at ``target``, a path or a URL."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._turn = asyncio.Lock()

    async def story(self, topic: str, message_id: str) -> Story:
        """See ``Stories``."""
        async with self._turn:
            return await asyncio.to_thread(self._story, topic, message_id)

    def _story(self, topic: str, message_id: str) -> Story:
        search = _Search(topic, time.monotonic() + SEARCH_SECONDS)
        try:
            filesystem, root = filesystem_at(self._target)
            search.run(filesystem, root, message_id)
        except Exception as error:  # any error of an external filesystem
            search.trouble = f"the journal can't be read: {first_line(error)}"
        rows = sorted(search.found.values(), key=lambda row: (row["at"], row["journal_seq"]))
        events = [_event(row) for row in rows[-EVENTS_MAX:]]
        return Story(events=events, is_complete=not search.trouble, trouble=search.trouble or None)


class _Search:
    """The search for the events of one message."""

    def __init__(self, topic: str, until: float) -> None:
        self._topic = topic
        self._until = until
        self.found: dict[tuple[str, int], _Row] = {}
        """The rows by the proxy that wrote them and their number, which identify an event."""
        self.trouble = ""

    def run(self, filesystem: FileSystem, root: str, message_id: str) -> None:
        files = _files(filesystem, root)
        known: set[str] = {message_id}
        wanted = {message_id}
        for number in range(ROUNDS_MAX):
            columns = ("message_id", "copy_id", "new_copy_id") if number == 0 else ("copy_id", "new_copy_id")
            for path in files:
                if time.monotonic() > self._until:
                    self.trouble = f"not all files could be searched within {SEARCH_SECONDS:g} seconds"
                    return
                self._look_into(filesystem, path, columns, sorted(wanted))
            ids = {row[name] for row in self.found.values() for name in ("copy_id", "new_copy_id") if row[name]}
            wanted = ids - known
            known |= wanted
            if not wanted or len(known) > COPIES_MAX:
                return

    def _look_into(self, filesystem: FileSystem, path: str, columns: Sequence[str], ids: Sequence[str]) -> None:
        try:
            topic = compute.field("topic") == self._topic
            named = compute.field(columns[0]).isin(ids)
            for name in columns[1:]:
                named = named | compute.field(name).isin(ids)
            table = parquet.read_table(
                path, columns=list(_COLUMNS), filters=topic & named, filesystem=filesystem, partitioning=None
            )
        except Exception as error:  # a damaged file, or one that was deleted meanwhile
            self.trouble = f"a file can't be read: {first_line(error)}"
            return
        rows: list[_Row] = table.to_pylist()
        self.found.update(((row["proxy"], row["journal_seq"]), row) for row in rows)


def _files(filesystem: FileSystem, root: str) -> list[str]:
    """Return the paths of all files of the journal, the latest hours first."""
    selector = filesystems.FileSelector(root, recursive=True, allow_not_found=True)
    paths = [str(one.path) for one in filesystem.get_file_info(selector) if one.is_file]
    files = [path for path in paths if path.endswith(".parquet") and WRITING not in PurePosixPath(path).parts]
    return sorted(files, reverse=True)


def _event(row: _Row) -> StoryEvent:
    return StoryEvent(at=row["at"].timestamp(), **{name: row[name] for name in _SHOWN})


_conforms: type[Stories] = ParquetStories
