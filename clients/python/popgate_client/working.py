"""The messages that a consumer has in hand: waiting for a handler, or under one.

Owns the running handlers and how each of them ends. What an end means for the message is decided in `handling`; the
settlement is delivered by `settling`.

Messages of one ordering key are handled one after the other. Where one of them is not done with, those behind it in
hand go back, too: the server hands them out again behind it.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from popgate_client.calling import Handler, HandlerCalls
from popgate_client.counters import Counters
from popgate_client.handling import Reject, Retry, RetryDelays, Settlement, give_back, settlement_for
from popgate_client.leases import Extender, LeaseBook
from popgate_client.message import Message, Verb
from popgate_client.settling import Settler

logger = logging.getLogger(__name__)

FULL_PAUSE_SECONDS = 0.5

Line: TypeAlias = tuple[int, str | None]
"""A queue and an ordering key: what is handled in order."""


class Crew:
    """Runs at most `concurrency` handlers, and holds at most `capacity` messages."""

    def __init__(
        self,
        handler: Handler,
        *,
        concurrency: int,
        capacity: int,
        delays: RetryDelays | None,
        book: LeaseBook,
        extender: Extender,
        settler: Settler,
        counters: Counters,
    ) -> None:
        self._calls = HandlerCalls(handler, concurrency=concurrency)
        self._concurrency = concurrency
        self._capacity = capacity
        self._delays = delays
        self._book = book
        self._extender = extender
        self._settler = settler
        self._counters = counters
        self._waiting: deque[Message] = deque()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._lines: set[Line] = set()
        """Those of which a message is being handled."""
        self._tasks: asyncio.TaskGroup | None = None
        self._room = asyncio.Event()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run handlers in this task group from now on."""
        self._tasks = tasks

    async def free_places(self) -> int:
        """Wait for room; returns how much, at least 1."""
        while True:
            free = self._capacity - len(self._running) - len(self._waiting)
            if free > 0 and not self._settler.is_full:
                return free
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FULL_PAUSE_SECONDS if self._settler.is_full else None):
                    await self._room.wait()

    def take(self, messages: Sequence[Message], *, lease_seconds: float, extend_at_once: bool) -> None:
        """Answer for these leases from now on; `extend_at_once` where they may be older than they look."""
        now = asyncio.get_running_loop().time()
        self._counters.popped += len(messages)
        for message in messages:
            self._book.hold(message, now, lease_seconds, extend_at_once=extend_at_once)
            self._waiting.append(message)
        if extend_at_once and messages:
            self._extender.wake()
        self._start_waiting()

    def give_back_waiting(self) -> None:
        """Start no handler any more, and release what waits for one."""
        self._tasks = None
        while self._waiting:
            message = self._waiting.popleft()
            self._settle_soon(message, give_back(message))

    async def finish(self, seconds: float) -> None:
        """Wait so long for the running handlers; then cancel them and release their messages."""
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=seconds)
        late = list(self._running.values())
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
            self._calls.renew()

    async def idle(self) -> None:
        """Wait until no handler runs."""
        while self._running:
            await asyncio.wait(list(self._running.values()), return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Let the threads end, each when its handler does. Does not wait."""
        self._calls.close()

    def _start_waiting(self) -> None:
        while self._tasks is not None and self._waiting and len(self._running) < self._concurrency:
            message = self._next()
            if message is None:
                break
            if message.lease_lost:  # while it waited: somebody else has it, or will
                self._give_back_behind(message)
                self._room.set()
                continue
            if message.ordering_key is not None:
                self._lines.add(_line(message))
            task = self._tasks.create_task(self._handle(message), name="popgate-handler")
            self._running[message.receipt_handle] = task

    async def _handle(self, message: Message) -> None:
        error: BaseException | None = None
        try:
            await self._calls.call(message)
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # the stop; otherwise the handler cancelled itself
                self._settle_soon(message, give_back(message))
                message.lease_lost.set()  # for a thread that works on: what it does is not acked any more
                raise
            error = cancelled
        except (Exception, SystemExit) as raised:  # a library's sys.exit must not take the other leases with it
            error = raised
        finally:
            self._running.pop(message.receipt_handle, None)
            self._lines.discard(_line(message))
            self._room.set()
        try:
            settlement = settlement_for(message, error, self._delays)
        except Exception as undecidable:  # a kind of Retry or Reject whose fields can't be used: a failure like others
            error = undecidable
            settlement = settlement_for(message, undecidable, self._delays)
        self._count(message, error)
        self._settle_soon(message, settlement)
        if settlement.verb is Verb.RELEASE or message.lease_lost:
            self._give_back_behind(message)
        self._start_waiting()

    def _next(self) -> Message | None:
        """Take the first that waits for nothing but a handler."""
        for place, message in enumerate(self._waiting):
            if _line(message) not in self._lines:
                del self._waiting[place]
                return message
        return None

    def _give_back_behind(self, message: Message) -> None:
        """Those of its line that wait here must not be handled before it."""
        if message.ordering_key is None:
            return
        for later in [one for one in self._waiting if _line(one) == _line(message)]:
            self._waiting.remove(later)
            self._settle_soon(later, give_back(later))

    def _count(self, message: Message, error: BaseException | None) -> None:
        if error is None:
            self._counters.handled += 1
        elif not isinstance(error, Retry | Reject):
            self._counters.failed += 1
            logger.error(
                "the handler failed",
                exc_info=error,
                extra={
                    "topic": message.topic,
                    "group": message.group,
                    "message_id": message.message_id,
                    "delivery_count": message.delivery_count,
                },
            )

    def _settle_soon(self, message: Message, settlement: Settlement) -> None:
        """Hand over to the settler; what is no longer held was lost, and its result must not count."""
        ends_at = self._book.drop(message.receipt_handle)
        if ends_at is not None:
            self._settler.submit(settlement, ends_at)


def _line(message: Message) -> Line:
    return message.queue, message.ordering_key
