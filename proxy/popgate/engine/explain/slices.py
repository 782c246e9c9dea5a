"""Visits all messages of a queue without stalling the event loop, even if there are a million of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost

SLICE_COUNT = 2_000
"""Maximum number of messages that are visited in one turn of the event loop, which takes about a millisecond."""


async def slices(host: QueueHost) -> AsyncIterator[Sequence[BufferedMessage]]:
    """Yield the messages that the queue has now, a slice at a time. Other work is done between two slices.

    A message may have changed its state meanwhile. Dropped messages are left out.
    """
    messages = list(host.messages())
    for start in range(0, len(messages), SLICE_COUNT):
        if start:
            await asyncio.sleep(0)
        yield [one for one in messages[start : start + SLICE_COUNT] if one.state is not MessageState.DROPPED]
