"""A consumer's pull mode: its session, and a worker for each queue that it is assigned.

Theory of operation. One loop keeps the session: it asks for the assignment periodically, which is also the heartbeat. A
queue that is new in the answer gets a worker. A queue that is missing from it is released: its worker lets the running
handler end, commits, and ends. Until all such workers have ended, the loop sends the previous generation; the new one
confirms the release, and the server then gives the queue to another client.

    assigned --another mode, or a stop--> releasing all queues --workers ended--> left
                                             |
                                             +--drain_seconds--> workers abandoned --> left

Heartbeats continue while handlers end or commits are pending. If heartbeats have failed for so long that other clients
may have the queues, no handler is started. A handler that runs longer than `lease_seconds_max` counts as hung: the
client leaves, so that others get its queues, and registers again when the handler has ended.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from popgate_client.assignments import Assignment
from popgate_client.calling import Handler, HandlerCalls
from popgate_client.counters import Counters
from popgate_client.errors import GroupNotFound, PopgateError, RetryLater, ServerFault, TopicNotFound, WrongMode
from popgate_client.facts import FactLogger, cause_of
from popgate_client.handling import GroupPolicy, RetryDelays
from popgate_client.message import Message, SettleEntry
from popgate_client.queue_worker import QueueWorker, WorkerContext
from popgate_client.retrying import Backoff

logger = FactLogger(__name__)

PULLS_MAX = 64
"""Maximum number of pulls that wait at once. With more queues they take turns, and each waits only `TURN_SECONDS`."""
TURN_SECONDS = 1.0
HEARTBEATS = 3
"""Minimum length of a session in heartbeat intervals."""
LEAVE_SECONDS = 2.0
REFUSED_SECONDS_MAX = 1.0
FLUSH_SECONDS = 2.0
"""Seconds that a stop waits for the answers to the last commits."""
PULL = "pull"


class PullerCalls(Protocol):
    """The calls of one consumer, under its client id; each raises PopgateError."""

    def assignment(self, supports: Sequence[str], generation: int | None) -> Awaitable[Assignment]: ...

    def pull(
        self, queue: int, generation: int, max_messages: int, wait_seconds: float, after: str | None
    ) -> Awaitable[list[Message]]: ...

    def commit(self, queue: int, generation: int, receipt_handle: str) -> Awaitable[int]: ...

    def reject(self, entry: SettleEntry) -> Awaitable[str]: ...

    def policy(self) -> Awaitable[GroupPolicy]: ...

    def leave(self) -> Awaitable[None]: ...


class Puller:
    """Pulls, handles and commits while the group is in pull mode; may run several times, one run after another."""

    def __init__(
        self,
        calls: PullerCalls,
        handler: Handler,
        *,
        concurrency: int,
        wait_seconds: float,
        drain_seconds: float,
        handling_seconds_max: float,
        delays: RetryDelays | None,
        counters: Counters,
        chance: random.Random,
        noted: Callable[[str], None],
    ) -> None:
        self._calls = calls
        self._handler = HandlerCalls(handler, concurrency=concurrency)
        self._wait_seconds = wait_seconds
        self._drain_seconds = drain_seconds
        self._handling_seconds_max = handling_seconds_max
        self._counters = counters
        self._noted = noted
        self._backoff, self._refused_backoff = Backoff(chance), Backoff(chance)
        places = asyncio.Semaphore(concurrency)
        self._context = WorkerContext(
            calls=self, handler=self._handler, places=places, delays=delays, counters=counters, chance=chance
        )
        self._pulls = asyncio.Semaphore(PULLS_MAX)
        self._workers: dict[int, QueueWorker] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._keeping: asyncio.Task[PopgateError | None] | None = None
        self._woken = asyncio.Event()
        self._alive = asyncio.Event()
        self._heard_at = 0.0
        self._session_seconds = 0.0
        self._ending = False
        self._ends_at: float | None = None
        self._is_registered = self._was_refused = self._is_stopping = False
        self.queues: tuple[int, ...] = ()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run workers in this task group from now on."""
        self._tasks = tasks

    async def run(self, told: Assignment, supports: Sequence[str]) -> PopgateError | None:
        """Work on this assignment and its successors until the mode changes or the consumer must look again. Return the
        error with which the server rejects the client permanently. After a cancellation `finish` does the rest."""
        assert self._tasks is not None, "it is run after its start"
        self._ending, self._ends_at = False, None
        self._heard(told, asyncio.get_running_loop().time())
        self._keeping = self._tasks.create_task(self._keep(told, supports), name="popgate-session")
        await asyncio.wait([self._keeping])
        return self._keeping.result()

    async def finish(self, seconds: float) -> None:
        """Release all queues, wait up to `seconds` for the running handlers, and leave. A second call has no effect."""
        if self._keeping is not None and not self._keeping.done():
            self._is_stopping = True
            self._end(seconds)
            await asyncio.wait([self._keeping])

    def close(self) -> None:
        """Let each thread end when its handler ends. Does not wait."""
        self._handler.close()

    # -- the session ----------------------------------------------------------------------------------------------

    async def _keep(self, told: Assignment, supports: Sequence[str]) -> PopgateError | None:
        clock = asyncio.get_running_loop().time
        shown, pause, refusal = told.generation, told.heartbeat_seconds, None
        while True:
            self._arrange(told)
            if self._ending and all(map(self._is_hung, self._workers.values())):
                break
            if not self._leaving(told):
                shown = told.generation
            await self._rest(pause)
            if self._is_stopping and not any(worker.handling_since for worker in self._workers.values()):
                self._end(FLUSH_SECONDS)  # only commits are left
            if self._was_refused:  # the queue is being reassigned: don't ask in a tight loop
                self._was_refused = False
                await asyncio.sleep(self._refused_backoff.next_seconds(lease_seconds=REFUSED_SECONDS_MAX * 6))
            else:
                self._refused_backoff.reset()
            if not self._ending and any(map(self._is_hung, self._workers.values())):
                logger.error("a handler hangs: the client leaves until it has ended", extra={"queues": self.queues})
                self._end(None)
            if self._ends_at is not None and clock() >= self._ends_at:
                await self._abandon()
                continue
            if self._ending and not self._workers:
                continue
            asked_at = clock()
            try:
                async with asyncio.timeout(self._seconds_left(max(1.0, self._session_seconds))):
                    # Queues released during the pause may go to other clients now.
                    told = await self._calls.assignment(supports, shown if self._leaving(told) else told.generation)
            except (PopgateError, TimeoutError) as error:
                pause = self._failed(error)
                if isinstance(error, PopgateError) and not _passes(error) and not self._ending:
                    refusal = error
                    self._end(self._drain_seconds)
                continue
            self._backoff.reset()
            self._heard(told, asked_at)
            pause = told.heartbeat_seconds
        await self.leave()
        while self._workers:  # their handlers hang
            await self._rest(self._drain_seconds)
            if self._ends_at is not None and clock() >= self._ends_at:
                await self._abandon()
        return refusal

    def _heard(self, told: Assignment, asked_at: float) -> None:
        self._session_seconds = max(self._session_seconds, told.heartbeat_seconds * HEARTBEATS)
        self._heard_at = asked_at
        self._is_registered = True
        self._alive.set()
        self._follow(told.mode)

    def _follow(self, mode: str | None) -> None:
        if mode is None:
            return
        if not self._ending:
            self._noted(mode)
        if mode == PULL or (self._ending and self._ends_at is not None):
            return
        # While the group drains, the server sets the time limit; after the drain nothing can be committed.
        self._end(None if mode == "draining" else self._drain_seconds)

    def _failed(self, error: PopgateError | TimeoutError) -> float:
        if isinstance(error, WrongMode):
            self._follow(error.mode)
            return 1.0
        self._counters.calls_failed += 1
        logger.warning("a heartbeat failed and will be repeated", extra={"cause": cause_of(error)})
        asked_for = error.retry_after_seconds if isinstance(error, RetryLater) else 0.0
        return self._backoff.next_seconds(asked_for, lease_seconds=self._session_seconds)

    def _end(self, seconds: float | None) -> None:
        """Release all queues; abandon their workers after `seconds`."""
        self._ending = True
        if seconds is not None:
            ends_at = asyncio.get_running_loop().time() + seconds
            self._ends_at = ends_at if self._ends_at is None else min(ends_at, self._ends_at)
        for worker in self._workers.values():
            worker.let_go()
        self._woken.set()

    async def _abandon(self) -> None:
        for worker in self._workers.values():
            worker.abandon()
        running = list(self._running.values())
        if running:
            await asyncio.wait(running, timeout=FLUSH_SECONDS)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
            self._handler.renew()

    async def leave(self) -> None:
        """End the session; uncommitted messages go to other clients. A second call has no effect."""
        for worker in self._workers.values():
            worker.lose()
        self.queues = ()
        if not self._is_registered:
            return
        self._is_registered = False
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await self._calls.leave()
        except (PopgateError, TimeoutError) as error:  # the session then ends without heartbeats
            logger.info("the client could not leave", extra={"cause": cause_of(error)})

    async def _rest(self, seconds: float) -> None:
        """Wait until the next heartbeat, until a worker has ended, or until all must end."""
        seconds = self._seconds_left(seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    def _seconds_left(self, at_most: float) -> float:
        if self._ends_at is None:
            return at_most
        return min(at_most, max(0.0, self._ends_at - asyncio.get_running_loop().time()))

    # -- the queues -----------------------------------------------------------------------------------------------

    def _arrange(self, told: Assignment) -> None:
        """Start a worker for each assigned queue without one, and end those of all other queues."""
        queues = () if self._ending else told.queues
        if queues != self.queues:
            logger.info("the assigned queues changed", extra={"queues": queues, "generation": told.generation})
            self.queues = queues
        for queue, worker in self._workers.items():
            worker.generation = told.generation
            if queue not in queues:
                worker.let_go()
        for queue in queues:
            if queue not in self._workers:
                self._start(QueueWorker(queue, told.generation, self._context))

    def _start(self, worker: QueueWorker) -> None:
        assert self._tasks is not None, "it is run after its start"
        task = self._tasks.create_task(worker.run(), name=f"popgate-worker-{worker.queue}")
        self._workers[worker.queue] = worker
        self._running[worker.queue] = task

        def ended(_: asyncio.Task[None]) -> None:
            del self._workers[worker.queue], self._running[worker.queue]
            self._was_refused = self._was_refused or worker.was_refused
            self._woken.set()

        task.add_done_callback(ended)

    def _leaving(self, told: Assignment) -> bool:
        """Whether a worker still runs for a queue that must be released."""
        return any(queue not in told.queues for queue in self._workers)

    def _is_hung(self, worker: QueueWorker) -> bool:
        since = worker.handling_since
        return since is not None and asyncio.get_running_loop().time() > since + self._handling_seconds_max

    # -- the calls of the workers ---------------------------------------------------------------------------------

    async def pull(self, queue: int, generation: int, max_messages: int, after: str | None) -> list[Message]:
        wait_seconds = self._wait_seconds if len(self._workers) <= PULLS_MAX else min(self._wait_seconds, TURN_SECONDS)
        async with self._pulls:
            return await self._calls.pull(queue, generation, max_messages, wait_seconds, after)

    async def commit(self, queue: int, generation: int, receipt_handle: str) -> int:
        return await self._calls.commit(queue, generation, receipt_handle)

    async def reject(self, entry: SettleEntry) -> str:
        return await self._calls.reject(entry)

    async def policy(self) -> GroupPolicy:
        return await self._calls.policy()

    async def known_to_live(self) -> None:
        if asyncio.get_running_loop().time() > self._heard_at + self._session_seconds:
            if self._alive.is_set():
                logger.warning("the session may have ended, because heartbeats failed too long: no handler is started")
            self._alive.clear()
            await self._alive.wait()


def _passes(error: PopgateError) -> bool:
    """Whether the same request may succeed later, or the error itself says what to do."""
    return isinstance(error, RetryLater | ServerFault | WrongMode | TopicNotFound | GroupNotFound)
