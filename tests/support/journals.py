"""The journal adapter alone, started on a location, with sample subjects for events."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from popgate.adapters.journal_parquet.journal import ParquetJournal
from popgate.adapters.journal_parquet.places import Place
from popgate.adapters.journal_parquet.writer import Rotation
from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, Subscription, TopicName
from popgate.ports.clock import Clock

TOPIC, GROUP = TopicName("t"), GroupName("g")
NAME = Subscription(TOPIC, GROUP)
PATIENCE_SECONDS = 20.0


class Subject(NamedTuple):
    copy_id: CopyId
    message: Message | None = None
    queue_index: int = 3
    delivery_count: int = 1
    leased_at: float = 0.0
    client: str | None = None
    invisibility_seconds: float = 0.0


def subjects(count: int, **fields: Any) -> list[Subject]:
    return [Subject(CopyId(secrets.token_hex(16)), **fields) for _ in range(count)]


@asynccontextmanager
async def started(
    place: Callable[[], Place], clock: Clock, *, seconds: float = 60.0, events: int = 1_000, most: int = 100_000
) -> AsyncGenerator[ParquetJournal]:
    journal = ParquetJournal("p1", place, Rotation(seconds, events), clock, name="here", events_max=most)
    await journal.start()
    yield journal
    async with asyncio.timeout(PATIENCE_SECONDS):
        await journal.stop()
