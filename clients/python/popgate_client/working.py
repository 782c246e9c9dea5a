"""The messages that a consumer has leased: those that wait for a handler, and those that are being handled.

Owns the running handlers and the way each of them ends. `handling` decides what that means for the message; `settling`
delivers the settlement.

Messages of one ordering key are handled one after the other. If one of them is released or lost, the messages of its
key that wait here are released too: the server delivers them again after it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from popgate_client.calling import Handler, HandlerCalls
from popgate_client.counters import Counters
from popgate_client.facts import FactLogger
from popgate_client.handling import Reject, Retry, RetryDelays, Settlement, give_back, settlement_for
from popgate_client.leases import Extender, LeaseBook
from popgate_client.message import Message, Verb
from popgate_client.settling import Settler

logger = FactLogger(__name__)

FULL_PAUSE_SECONDS = 0.5

Line: TypeAlias = tuple[int, str | None]
"""A queue and an ordering key; messages of one line are handled in order."""


class HandlerPool:
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
        self._running: set[asyncio.Task[None]] = set()
        self._lines: set[Line] = set()
        """The lines with a message that is being handled."""
        self._tasks: asyncio.TaskGroup | None = None
        self._room = asyncio.Event()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run handlers in this task group from now on."""
        self._tasks = tasks

    async def free_places(self) -> int:
        """Wait until there is room; return for how many messages, at least 1."""
        while True:
            free = self._capacity - len(self._running) - len(self._waiting)
            if free > 0 and not self._settler.is_full:
                return free
            self._room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FULL_PAUSE_SECONDS if self._settler.is_full else None):
                    await self._room.wait()

    def take(self, messages: Sequence[Message], *, lease_seconds: float, extend_at_once: bool) -> None:
        """Take over these leases. `extend_at_once`: they may have begun before now."""
        now = asyncio.get_running_loop().time()
        self._counters.popped += len(messages)
        for message in messages:
            self._book.hold(message, now, lease_seconds, extend_at_once=extend_at_once)
            self._waiting.append(message)
        if extend_at_once and messages:
            self._extender.wake()
        self._start_waiting()

    def give_back_waiting(self) -> None:
        """Start no more handlers, and release the messages that wait for one."""
        self._tasks = None
        while self._waiting:
            message = self._waiting.popleft()
            self._settle_soon(message, give_back(message))

    async def finish(self, seconds: float) -> None:
        """Wait up to `seconds` for the running handlers; then cancel them and release their messages."""
        if self._running:
            await asyncio.wait(self._running, timeout=seconds)
        late = set(self._running)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
            self._calls.renew()

    async def idle(self) -> None:
        """Wait until no handler runs."""
        while self._running:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)

    def close(self) -> None:
        """Let each thread end when its handler ends. Does not wait."""
        self._calls.close()

    def _start_waiting(self) -> None:
        while self._tasks is not None and self._waiting and len(self._running) < self._concurrency:
            message = self._next()
            if message is None:
                break
            if message.lease_lost:  # while it waited: another client has it, or will
                self._give_back_behind(message)
                self._room.set()
                continue
            if message.ordering_key is not None:
                self._lines.add(_line(message))
            self._running.add(self._tasks.create_task(self._handle(message), name="popgate-handler"))

    async def _handle(self, message: Message) -> None:
        error: BaseException | None = None
        task = asyncio.current_task()
        assert task is not None, "it runs in one"
        try:
            await self._calls.call(message)
        except asyncio.CancelledError as cancelled:
            if task.cancelling():  # the stop; otherwise the handler cancelled itself
                self._settle_soon(message, give_back(message))
                message.lease_lost.set()  # for a thread that runs on: its work will not be acked
                raise
            error = cancelled
        except (KeyboardInterrupt, GeneratorExit):  # this process is to end
            raise
        except BaseException as raised:  # a library's sys.exit or panic must not take the other leases with it
            error = raised
        finally:
            self._running.discard(task)
            self._lines.discard(_line(message))
            self._room.set()
        try:
            settlement = settlement_for(message, error, self._delays)
        except Exception as undecidable:  # a subclass of Retry or Reject with unusable fields: treat it as a failure
            error = undecidable
            settlement = settlement_for(message, undecidable, self._delays)
        self._count(message, error)
        self._settle_soon(message, settlement)
        if settlement.verb is Verb.RELEASE or message.lease_lost:
            self._give_back_behind(message)
        self._start_waiting()

    def _next(self) -> Message | None:
        """Remove and return the first message that can be handled now."""
        for place, message in enumerate(self._waiting):
            if _line(message) not in self._lines:
                del self._waiting[place]
                return message
        return None

    def _give_back_behind(self, message: Message) -> None:
        """Release the messages of its line that wait here, because they must not be handled before it."""
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
                    "cause": type(error).__name__,
                },
            )

    def _settle_soon(self, message: Message, settlement: Settlement) -> None:
        """Pass a settlement to the settler, unless the lease was lost: then the handler's result must not count."""
        ends_at = self._book.drop(message.receipt_handle)
        if ends_at is not None:
            self._settler.submit(settlement, ends_at)


def _line(message: Message) -> Line:
    return message.queue, message.ordering_key
