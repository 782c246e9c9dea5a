"""One assigned queue of a consumer in pull mode: pull, handle one message after the other, commit.

Owns the pulled messages that are not committed. The order of a queue is kept, so a message that fails blocks its queue:
it is handled again in place, after a growing pause, until it succeeds or has been handled `max_deliveries` times (the
group's policy); then it is dead-lettered. Commits run in parallel with the handlers; each covers all messages handled
so far. Uncommitted messages go to the queue's next owner.

    pulling --messages--> handling --all done--> pulling ...
       |                     |
       +------let_go()-------+--the handler has ended--> committing --> over
       +---Fenced, WrongMode-+--> over, and `lease_lost` is set for the message that is being handled
"""

import asyncio
import random
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from popgate_client.calling import HandlerCalls
from popgate_client.counters import Counters
from popgate_client.errors import Fenced, PopgateError, RetryLater, ServerFault, WrongMode
from popgate_client.facts import FactLogger, cause_of
from popgate_client.handling import GroupPolicy, Reject, Retry, RetryDelays, Settlement, settlement_in_place
from popgate_client.message import LeaseFlag, Message, SettleEntry
from popgate_client.retrying import Backoff

logger = FactLogger(__name__)

BATCH_COUNT_MAX = 64
"""Maximum messages of one pull. The first pulls of a queue are small, because after a crash all pulled messages count
as delivered."""
BATCH_SECONDS = 0.5
"""Seconds to handle a batch above which batches become smaller, because pulled messages count as delivered even if they
are not handled."""
PAUSE_SECONDS_MAX = 1.0


class QueueCalls(Protocol):
    """The calls of one consumer; each raises PopgateError."""

    def pull(self, queue: int, generation: int, max_messages: int, after: str | None) -> Awaitable[list[Message]]: ...

    def commit(self, queue: int, generation: int, receipt_handle: str) -> Awaitable[int]: ...

    def reject(self, entry: SettleEntry) -> Awaitable[str]: ...

    def policy(self) -> Awaitable[GroupPolicy]: ...

    def known_to_live(self) -> Awaitable[None]:
        """Wait while the session may have ended because of missing heartbeats."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Holds what the workers of all queues share. `places` bounds the handlers that run at once."""

    calls: QueueCalls
    handler: HandlerCalls
    places: AbstractAsyncContextManager[object]
    delays: RetryDelays | None
    counters: Counters
    chance: random.Random


class QueueWorker:
    """Works on one queue until it is released. `generation` is updated with each assignment."""

    def __init__(self, queue: int, generation: int, context: WorkerContext) -> None:
        self.queue = queue
        self.generation = generation
        self.handling_since: float | None = None
        """When the running handler was called, by the event loop's clock."""
        self.was_refused = False
        """Whether the server rejected a call because the queue is not this client's."""
        self._context = context
        self._backoff = Backoff(context.chance)
        self._batch_count = 1
        self._in_hand: Message | None = None
        self._seen: str | None = None
        self._done: str | None = None
        self._committed: str | None = None
        self._uncommitted_count = 0
        self._news = asyncio.Event()
        self._leaving = False
        self._working: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Work until the queue is released or lost, and the handled messages are committed."""
        async with asyncio.TaskGroup() as tasks:
            committing = tasks.create_task(self._commit_all(), name=f"popgate-commits-{self.queue}")
            self._working = tasks.create_task(self._work(), name=f"popgate-queue-{self.queue}")
            if self._leaving:
                self._working.cancel()
            await asyncio.wait([self._working])
            self._leaving = True
            self._news.set()
            await asyncio.wait([committing])

    def let_go(self) -> None:
        """Release the queue: pull no more and start no handler; a running one may end. A second call has no effect."""
        self._leaving = True
        if self._working is not None and self.handling_since is None:
            self._working.cancel()

    def lose(self) -> None:
        """Give up the queue: commit nothing more, because its next owner gets the uncommitted messages."""
        if self._in_hand is not None and not self._in_hand.lease_lost:
            self._context.counters.leases_lost += 1
            self._in_hand.lease_lost.set()
        self._context.counters.leases_lost += self._uncommitted_count
        self._uncommitted_count = 0
        self._committed = self._done
        self.let_go()

    def abandon(self) -> None:
        """End without waiting for the handler: an `async` one is cancelled, a thread runs on."""
        self.lose()
        if self._working is not None:
            self._working.cancel()

    # -- pulling --------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        clock = asyncio.get_running_loop().time
        calls, counters = self._context.calls, self._context.counters
        while not self._leaving:
            await calls.known_to_live()
            try:
                messages = await calls.pull(self.queue, self.generation, self._batch_count, self._seen)
            except PopgateError as error:
                await self._failed(error)
                continue
            self._backoff.reset()
            counters.pulled += len(messages)
            started_at = clock()
            for message in messages:
                if not await self._handle(message):
                    return
            if messages:
                took = clock() - started_at
                wanted = self._batch_count * 2 if took < BATCH_SECONDS else self._batch_count // 2
                self._batch_count = min(max(1, wanted), BATCH_COUNT_MAX)

    async def _failed(self, error: PopgateError) -> None:
        """Wait before the next try; stop if the queue is lost."""
        if isinstance(error, Fenced | WrongMode) or not isinstance(error, RetryLater | ServerFault):
            logger.info(
                "the server rejected a call of a queue: releasing the queue",
                extra={"queue": self.queue, "cause": cause_of(error)},
            )
            self.was_refused = self._leaving = True  # handled messages may still be committed
            return
        self._context.counters.calls_failed += 1
        logger.warning("a call of a queue failed", extra={"queue": self.queue, "cause": cause_of(error)})
        asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
        await asyncio.sleep(self._backoff.next_seconds(asked_for, lease_seconds=PAUSE_SECONDS_MAX * 6))

    # -- handling -------------------------------------------------------------------------------------------------

    async def _handle(self, message: Message) -> bool:
        """Handle a message, in place, until it is done; False if the worker must stop."""
        while True:
            await self._context.calls.known_to_live()
            error = await self._attempt(message)
            if message.lease_lost:
                return False
            if error is None:
                self._context.counters.handled += 1
                self._uncommitted_count += 1
                self._seen = self._done = message.receipt_handle
                self._news.set()
                return not self._leaving
            settlement = settlement_in_place(message, error, self._context.delays, await self._policy())
            if isinstance(settlement, Settlement):
                if not await self._reject(settlement.entry):
                    return False
                return not self._leaving  # `_seen` stays: after a rejected handle, uncommitted messages would repeat
            if self._leaving:
                return False
            await asyncio.sleep(settlement)
            message = replace(message, delivery_count=message.delivery_count + 1, lease_lost=LeaseFlag())

    async def _attempt(self, message: Message) -> BaseException | None:
        """Call the handler once; return what it raised."""
        async with self._context.places:
            self._in_hand = message
            self.handling_since = asyncio.get_running_loop().time()
            try:
                await self._context.handler.call(message)
            except asyncio.CancelledError as cancelled:
                task = asyncio.current_task()
                if task is not None and task.cancelling():  # abandoned; otherwise the handler cancelled itself
                    raise
                error: BaseException = cancelled
            except (KeyboardInterrupt, GeneratorExit):  # this process is to end
                raise
            except BaseException as raised:  # a library's sys.exit or panic must not take the other queues with it
                error = raised
            else:
                return None
            finally:
                self.handling_since = self._in_hand = None
        if not isinstance(error, Retry | Reject):
            self._context.counters.failed += 1
            logger.error(
                "the handler failed",
                exc_info=error,
                extra={
                    "topic": message.topic,
                    "group": message.group,
                    "queue": message.queue,
                    "message_id": message.message_id,
                    "delivery_count": message.delivery_count,
                    "cause": type(error).__name__,
                },
            )
        return error

    async def _policy(self) -> GroupPolicy:
        """Return the group's policy. If it can't be read, no message is dead-lettered because of its delivery count."""
        try:
            return await self._context.calls.policy()
        except PopgateError as error:
            logger.warning("the group's policy could not be read", extra={"cause": cause_of(error)})
            return GroupPolicy()

    async def _reject(self, entry: SettleEntry) -> bool:
        """Dead-letter a message; False if the queue was lost before."""
        while not self._leaving:
            try:
                status = await self._context.calls.reject(entry)
            except PopgateError as error:
                await self._failed(error)
                continue
            if status == "unavailable":
                await asyncio.sleep(self._backoff.next_seconds(lease_seconds=PAUSE_SECONDS_MAX * 6))
                continue
            self._backoff.reset()
            if status != "rejected":
                self._context.counters.leases_lost += 1
                self.lose()
                return False
            self._context.counters.rejected += 1
            return True
        return False

    # -- committing -----------------------------------------------------------------------------------------------

    async def _commit_all(self) -> None:
        """Commit handled messages until the queue is released and all of them are committed, or the queue is lost."""
        backoff = Backoff(self._context.chance)
        while True:
            done, done_count = self._done, self._uncommitted_count
            if done == self._committed:
                if self._leaving and (self._working is None or self._working.done()):
                    return
                self._news.clear()
                await self._news.wait()
                continue
            assert done is not None, "what is done has a receipt"
            try:
                count = await self._context.calls.commit(self.queue, self.generation, done)
            except PopgateError as error:
                if isinstance(error, RetryLater | ServerFault):
                    self._context.counters.calls_failed += 1
                    logger.warning("a commit failed", extra={"queue": self.queue, "cause": cause_of(error)})
                    asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
                    await asyncio.sleep(backoff.next_seconds(asked_for, lease_seconds=PAUSE_SECONDS_MAX * 6))
                    continue
                logger.warning("messages were handled, but can't be committed", extra={"cause": cause_of(error)})
                self.lose()
                continue
            backoff.reset()
            self._context.counters.committed += count
            self._committed = done
            self._uncommitted_count = max(0, self._uncommitted_count - done_count)
