"""Lists, shows, redrives and purges the dead letters of one subscription for an administrator.

Theory of operation. A walk is one pass over the dead-letter queue, on its own channel (``dead_walk``). The queue is
consumed only while a walk is open, and only one walk is open at a time. Requests and redrives take turns at the queue
(``dead_turns``). Pops and settlements of clients never wait for a turn. A redrive takes a turn for each batch, so a
list request between two batches is answered at once. That list request closes the redrive's walk, and the redrive then
continues with a new walk from the front of the queue. When a walk closes, the dead letters that it did not settle
return to their old places. After a list request, the walk stays open for some seconds, so that a request for the next
page can continue it.

While a redrive runs, the store contains a mark beside the records of the dead letters. If the process is killed, the
mark stays in the store. The next process that owns the dead letters then reads the whole queue and finishes the moves
that were begun. It does not resume the redrive.

In a cluster, the owner of the subscription's first queue also owns the dead letters, from ``start`` to ``stop``. If
another proxy becomes the owner of the first queue, a running redrive is cancelled.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from math import inf

from popgate.domain.errors import (
    Conflict,
    DeadLetterNotFound,
    PopgateError,
    QueueGone,
    RedriveNotFound,
    RetryLater,
)
from popgate.domain.lease import SettleAction
from popgate.domain.names import CopyId, LeaseId
from popgate.domain.topics import TopicSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_moves import DeadMoves, Purged, Route, refused
from popgate.engine.dead_letters.dead_pages import Page, PageBuilder, PageRequest
from popgate.engine.dead_letters.dead_turns import DeadTurns, shutting_down
from popgate.engine.dead_letters.dead_walk import READ_COUNT, Letter
from popgate.engine.dead_letters.redriving import (
    LetterChoice,
    Redrive,
    RedriveOrder,
    RedriveProgress,
    RedriveState,
    first_batch,
)
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.publish.publishing import PublisherGate
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry
from popgate.runtime.deadlines import NEVER

_log = logging.getLogger(__name__)

KEPT_SECONDS = 5.0
"""Seconds for which the walk of a list request stays open, in case the client requests the next page."""
PAUSE_KEPT_SECONDS = 300.0
"""Maximum pause between two batches of a redrive, in seconds, during which its walk stays open."""
PURGE_SECONDS = 20.0
"""Seconds after which a purge stops, even if dead letters are left. The client must then repeat the request."""
CANCEL_SECONDS = 5.0
STOP_SECONDS = 0.2
RETRY_SECONDS = 1.0
RETRY_SECONDS_MAX = 60.0
MARK_PREFIX = "redrive-"
"""Prefix of the copy ids under which the store contains marks. No dead letter has a copy id with this prefix."""


class DeadLetters:
    """Serves an administrator's requests for the dead letters of one subscription on this proxy."""

    def __init__(
        self,
        context: EngineContext,
        group: ServedGroup,
        gate: PublisherGate,
    ) -> None:
        self.timer = NEVER
        self.redrive_now: Redrive | None = None
        """The running redrive, or the latest one."""
        self._context = context
        self._group = group
        self._layout = group.layout
        self._moves = DeadMoves(context, group, gate)
        self._turns = DeadTurns(context, self._layout)
        self._listed_to: CopyId | None = None
        self._working: asyncio.Task[None] | None = None
        self._sweeping: asyncio.Task[None] | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Become the owner of the dead letters, and finish interrupted moves in the background. Idempotent.

        Raises: StateUnavailable.
        """
        self._turns.begin()
        left = await self._context.leases.load(self._layout.dead)
        if left:
            marks = {one.copy_id: one.record.lease_id for one in left if one.copy_id.startswith(MARK_PREFIX)}
            self._sweep_soon(marks)

    async def stop(self) -> None:
        """Stop owning the dead letters, and close the open walk. Idempotent.

        A running redrive ends after its present batch. If the batch takes longer than ``STOP_SECONDS``, the redrive is
        cancelled in the middle of the batch.
        """
        self._turns.closed = True
        self._context.deadlines.cancel(self)
        if self.redrive_now is not None:
            self.redrive_now.cancelled.set()
        tasks = {task for task in (self._working, self._sweeping) if task is not None and not task.done()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=STOP_SECONDS)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        if self._turns.closed:  # ``start`` was not called during the wait
            await self._turns.close_walk(in_order=False)
            self._turns.epoch = 0

    @property
    def is_open(self) -> bool:
        """Whether this proxy owns the dead letters. It may own the first queue shortly before this becomes True."""
        return not self._turns.closed

    @property
    def held_count(self) -> int:
        """The number of dead letters that the broker does not count as ready, because a walk has them unsettled."""
        return self._turns.held_count

    @property
    def is_sweeping(self) -> bool:
        """Whether this proxy is finishing moves of dead letters that were interrupted."""
        return self._sweeping is not None and not self._sweeping.done()

    # -- looking --------------------------------------------------------------------------------------------------

    async def page(self, request: PageRequest) -> Page:
        """Return the requested page of dead letters in the queue's order, without changing the queue.

        If the dead letter ``request.after`` no longer exists, the page begins with messages that were dead-lettered
        later. Raises: BrokerUnavailable, StateUnavailable, QueueGone; Conflict if another program consumes the queue.
        """
        async with self._turns.taken():
            goes_on = self._turns.has_walk(self) and request.after == self._listed_to is not None
            if not goes_on:
                await self._turns.close_walk()
            walk = await self._turns.walk_of(self)
            builder = PageBuilder(walk, request, self._context.clock, is_there=goes_on or request.after is None)
            page = await builder.run()
            if page.next is None or not builder.is_there:
                await self._turns.close_walk()
            else:
                self._listed_to = page.next
                self._context.deadlines.schedule(self._context.clock.monotonic() + KEPT_SECONDS, self)
        if any(shown.letter.is_half_moved for shown in page.letters):
            self._sweep_soon({})
        return page

    async def find(self, copy_id: CopyId) -> Letter:
        """Return one dead letter with its whole body. Raises: DeadLetterNotFound, and the errors of ``page``."""
        letters, _ = await self.search(lambda letter: letter.copy_id == copy_id, count_max=1)
        if not letters:
            raise DeadLetterNotFound(f"there is no dead letter {copy_id!r} here; it may have been redriven or purged")
        return letters[0]

    async def search(
        self, is_wanted: Callable[[Letter], bool], *, count_max: int, seconds: float = inf
    ) -> tuple[list[Letter], bool]:
        """Return the first wanted dead letters, and whether the search was complete. Raises the errors of ``page``."""
        return await self._turns.search(is_wanted, count_max=count_max, seconds=seconds)

    # -- purge ----------------------------------------------------------------------------------------------------

    async def purge(self, choice: LetterChoice) -> Purged:
        """Delete the dead letters in the queue that ``choice`` selects. Raises the errors of ``page``."""
        deadline = self._context.clock.monotonic() + PURGE_SECONDS
        purged, complete = 0, True
        async with self._turns.taken(closes=True):
            walk = await self._turns.walk_of(choice)
            ids_left = None if choice.ids is None else set(choice.ids)
            while letters := await walk.read(READ_COUNT):
                chosen = [letter for letter in letters if choice.takes(letter)]
                purged += await self._moves.drop(walk, chosen, self._turns.epoch)
                if ids_left is not None:
                    ids_left.difference_update(letter.copy_id for letter in chosen)
                    if not ids_left:
                        break
                if purged and self._context.clock.monotonic() > deadline:  # a repeat begins at the front: make progress
                    complete = False
                    break
            await walk.flush()
            return Purged(purged, walk.dead, complete)

    # -- redrive --------------------------------------------------------------------------------------------------

    def redrive(self, order: RedriveOrder, target: TopicSpec | None) -> Redrive:
        """Start a redrive in the background.

        ``target``: the topic to which the dead letters are published; None: each returns to its own subscription.
        Raises: Conflict while another redrive runs; RetryLater.
        """
        self._turns.check_open()
        running = self.redrive_now
        if running is not None and running.is_running:
            raise Conflict(
                f"redrive {running.id} of these dead letters is running ({running.moved} moved); wait for its end, or "
                "cancel it with DELETE"
            )
        redrive = Redrive(self._context.mint_copy_id(), order, self._context.clock.wall())
        route = self._moves.home if target is None else self._moves.to_topic(target)
        self._working = self._context.background.spawn(
            self._redrive(redrive, route), name=f"redrive {self._group.name.topic}:{self._group.name.group}"
        )
        if self._working is None:
            raise shutting_down()
        self.redrive_now = redrive
        return redrive

    def latest_redrive(self) -> Redrive:
        """Return the running redrive, or the latest one.

        Raises: RedriveNotFound if this proxy has started no redrive; RetryLater if it does not own the dead letters.
        """
        self._turns.check_open()
        if self.redrive_now is None:
            raise RedriveNotFound(
                f"no redrive of {self._group.name.topic}:{self._group.name.group} since the proxy that owns its "
                "dead letters started; an earlier one has ended: start it again"
            )
        return self.redrive_now

    async def cancel(self) -> Redrive:
        """End the running redrive after its present batch. Wait at most ``CANCEL_SECONDS`` for the end. Idempotent.

        Raises: RedriveNotFound, RetryLater.
        """
        redrive = self.latest_redrive()
        if redrive.is_running:
            redrive.state = RedriveState.CANCELLING
            redrive.cancelled.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANCEL_SECONDS):
                    await redrive.ended.wait()
        return redrive

    # -- the work in the background -------------------------------------------------------------------------------

    async def _redrive(self, redrive: Redrive, route: Route) -> None:
        state = RedriveState.CANCELLED
        try:
            state = await self._redrive_all(redrive, route)
        except PopgateError as error:  # not RetryLater: ``_redrive_all`` handles RetryLater by trying again
            redrive.trouble, state = error.detail, RedriveState.FAILED
        finally:
            try:
                async with self._turns.turn:
                    if self._turns.has_walk(redrive):
                        await self._turns.close_walk()
            finally:  # ``stop`` may cancel the close. Without ``end``, the redrive would prevent every later one
                if self._turns.closed and state is RedriveState.CANCELLED and redrive.state is RedriveState.RUNNING:
                    redrive.trouble = "its proxy was stopped, or the queue moved away; start it again for the rest"
                redrive.end(state, self._context.clock.wall())

    async def _redrive_all(self, redrive: Redrive, route: Route) -> RedriveState:
        progress = RedriveProgress(redrive, route)
        began = self._context.clock.monotonic()
        lease_id: LeaseId | None = None
        while not redrive.cancelled.is_set():
            try:
                async with self._turns.taken():
                    if lease_id is None:
                        lease_id = await self._mark(redrive)
                    is_over = await self._redrive_batch(progress)
                if is_over:
                    break
                pause = redrive.pause_seconds(self._context.clock.monotonic() - began)
                if pause > PAUSE_KEPT_SECONDS:
                    async with self._turns.turn:
                        await self._turns.close_walk()
            except RetryLater as error:
                redrive.trouble = error.detail
                pause = max(error.retry_after_seconds, RETRY_SECONDS)
            await _wait(redrive.cancelled, pause)
        if lease_id is not None:
            await self._unmark({CopyId(MARK_PREFIX + redrive.id): lease_id})
        if redrive.cancelled.is_set():
            return RedriveState.CANCELLED
        return RedriveState.FAILED if redrive.is_hopeless else RedriveState.DONE

    async def _redrive_batch(self, progress: RedriveProgress) -> bool:
        """Move the next batch of dead letters. Return whether the redrive has nothing left to do."""
        redrive = progress.redrive
        count = redrive.batch_count()
        if not count or redrive.is_hopeless:
            return True
        walk = await self._turns.walk_of(redrive)
        if walk is not progress.walk:  # the redrive's former walk was closed: begin again at the front of the queue
            progress.begin(walk)
        if not progress.pending:
            letters = await walk.read(count if redrive.order.choice.is_all else READ_COUNT)
            if not letters:
                return True
            progress.pending = redrive.chosen(letters)
        batch = first_batch(progress.pending, count)
        progress.pending = progress.pending[len(batch) :]
        if batch:
            moved = await self._moves.redrive(walk, batch, progress.route, self._turns.epoch)
            redrive.done(moved)
            if moved.unknown:
                raise RetryLater(f"not confirmed by the broker; it is tried again: {moved.why}")
        return False

    async def _mark(self, redrive: Redrive) -> LeaseId:
        """Write the mark to the store. A later process learns from the mark that a redrive was running."""
        await self._turns.claim()
        lease_id = self._context.mint_lease_id()
        entry = GrantEntry(self._layout.dead, self._turns.epoch, CopyId(MARK_PREFIX + redrive.id), 0)
        (answer,) = await self._context.leases.grant(
            GrantRequest(
                subscription=self._group.name,
                lease_id=lease_id,
                entries=[entry],
                invisibility_seconds=0.0,
                max_deliveries=None,
                mode_generation=self._group.spec.mode_generation,
            )
        )
        if answer.record is None:
            raise refused(answer.status, self._layout)
        return lease_id

    async def _unmark(self, marks: dict[CopyId, LeaseId]) -> None:
        dead = self._layout.dead
        entries = [SettleEntry(dead, copy_id, lease_id, SettleAction.ACK) for copy_id, lease_id in marks.items()]
        try:
            if entries:
                await self._context.leases.settle(entries)
        except RetryLater as error:
            _log.warning("the queue will be checked at the next start", extra={"queue": dead, "error": error.detail})

    def _sweep_soon(self, marks: dict[CopyId, LeaseId]) -> None:
        is_busy = self.redrive_now is not None and self.redrive_now.is_running
        if self._turns.closed or is_busy or self.is_sweeping:
            return
        self._sweeping = self._context.background.spawn(self._sweep(marks), name=f"sweep {self._layout.dead}")

    async def _sweep(self, marks: dict[CopyId, LeaseId]) -> None:
        """Finish the moves that were begun: read the whole queue, repeatedly if needed, then delete ``marks``."""
        pause = RETRY_SECONDS
        while not self._turns.closed:
            try:
                if await self._sweep_once():
                    await self._unmark(marks)
                    return
            except QueueGone:
                return
            except PopgateError as error:
                _log.warning(
                    "unfinished redrives are tried again", extra={"queue": self._layout.dead, "error": error.detail}
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    async def _sweep_once(self) -> bool:
        """Read the queue once, and finish moves that were begun. Return False if the outcome of a move is unknown."""
        decided = True
        async with self._turns.taken(closes=True):
            walk = await self._turns.walk_of(self._sweep)
            while letters := await walk.read(READ_COUNT):
                moved = await self._moves.finish(walk, letters)
                decided &= not moved.unknown
            await walk.flush()
        return decided

    def due(self, now: float) -> float | None:
        """Close the walk of a list request in the background, because the next page was not requested in time."""
        if self._turns.has_walk(self):
            self._context.background.spawn(self._close_listing(), name=f"close {self._layout.dead}")
        return None

    async def _close_listing(self) -> None:
        async with self._turns.turn:
            if self._turns.has_walk(self) and self.timer == NEVER:
                await self._turns.close_walk()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until ``event`` is set, or ``seconds`` have passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
