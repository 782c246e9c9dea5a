"""A queue with very many messages is visited in slices, between which other work goes on."""

import asyncio
from types import SimpleNamespace
from typing import cast

from popgate.domain.names import CopyId
from popgate.engine.explain.slices import SLICE_COUNT, slices
from popgate.engine.queue.buffered import BufferedMessage, Counts, MessageState
from popgate.engine.queue.host import QueueHost


async def test_other_work_goes_on_between_the_slices() -> None:
    counts = Counts()
    messages = {CopyId(str(n)): BufferedMessage(counts, 0, CopyId(str(n))) for n in range(5 * SLICE_COUNT + 1)}
    host = cast("QueueHost", SimpleNamespace(messages=messages.values))
    turns = 0

    async def work() -> None:
        nonlocal turns
        while True:
            turns += 1
            if turns == 2:  # a message is dropped, and the table of messages changes, in the middle of the visit
                messages.pop(CopyId(str(5 * SLICE_COUNT))).enter(MessageState.DROPPED)
            await asyncio.sleep(0)

    working = asyncio.create_task(work())
    sizes = [len(some) async for some in slices(host)]
    working.cancel()
    assert sizes == [SLICE_COUNT] * 5 + [0]
    assert turns >= 5
