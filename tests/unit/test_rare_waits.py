"""The small replacements for uvicorn's objects behave like them, and a waiting pop does without the large ones."""

import asyncio
import tracemalloc
from typing import Any

import pytest

from popgate.api.rare_waits import RareEvent, RareQueue

KIBIBYTE = 1024


@pytest.mark.parametrize("kind", [asyncio.Event, RareEvent])
async def test_every_task_that_waits_for_an_event_goes_on_when_it_is_set(kind: type[asyncio.Event]) -> None:
    event = kind()
    cancelled, *waiting = [asyncio.create_task(event.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.sleep(0)
    assert (cancelled.cancelled(), [task.done() for task in waiting]) == (True, [False, False])
    event.set()
    assert (await asyncio.gather(*waiting), event.is_set(), await event.wait()) == ([True, True], True, True)
    event.clear()
    again = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert not again.done()
    event.set()
    assert await again


def test_requests_leave_the_queue_in_the_order_in_which_they_came() -> None:
    queue = RareQueue[int]()
    assert not queue
    for number in range(3):
        queue.appendleft(number)
    assert [queue.pop() for _ in range(3)] == [0, 1, 2]


def test_neither_replacement_has_room_for_many_entries_from_the_beginning() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept: list[Any] = [RareEvent() for _ in range(100)] + [RareQueue[int]() for _ in range(100)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / len(kept) < KIBIBYTE / 4
