"""Opens the queues of one subscription, and reopens queues whose channels were lost.

This module decides when to try to open a queue, and reports why no queue can be consumed. The queue hosts open and
consume the queues.

Each queue is opened by a separate task, so that a queue that hangs does not delay the others. There is always a pause
between the starts of two attempts to open a queue, no matter how many pops need its messages, and how fast its channel
is lost. The first pause is short, because a connection to another broker node opens within milliseconds. Each further
pause is twice as long, up to a maximum.
"""

import asyncio
from collections.abc import Sequence

from popgate.domain.errors import PopgateError, QueueGone, queue_gone_detail
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.effects import QueueEvents
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.runtime.deadlines import NEVER

OPEN_RETRY_SECONDS_MIN, OPEN_RETRY_SECONDS_MAX = 0.05, 0.5
PARKED_GRACE_SECONDS = 5.0
"""Seconds for which parked pops survive an outage of the broker. Pops that arrive during the outage get 503 at once."""


class ChannelOpener:
    """Opens the queues of ``hosts`` while clients ask for messages."""

    def __init__(
        self, context: EngineContext, hosts: Sequence[QueueHost], events: QueueEvents, lacking: LackingQueues
    ) -> None:
        self.timer = NEVER
        self._context = context
        self._hosts = hosts
        self._events = events
        self._unopened = lacking.unopened
        self._running: dict[QueueHost, asyncio.Task[None]] = {}
        self._errors: dict[QueueHost, PopgateError] = {}
        self._not_before: dict[QueueHost, float] = {}
        self._pauses: dict[QueueHost, float] = {}
        self._failing_since = NEVER
        self._closed = False

    def open(self) -> None:
        """Start to consume each queue that this proxy owns but does not consume: at once, or after a pause."""
        if self._closed:
            return
        now = self._context.clock.monotonic()
        soonest = NEVER
        for number in sorted(self._unopened):
            host = self._hosts[number]
            if host.channel is not None or not host.is_owned:
                self._unopened.discard(number)
                continue
            if host.listener is not None or host in self._running:
                continue
            not_before = self._not_before.get(host, now)
            if not_before > now:
                soonest = min(soonest, not_before)
                continue
            self._not_before[host] = now + self._pause(host, now - not_before)
            task = self._context.background.spawn(self._open(host), name=f"open {host.broker_queue}")
            if task is not None:
                self._running[host] = task
        if soonest < self.timer:
            self._context.deadlines.schedule(soonest, self)

    def _pause(self, host: QueueHost, rested_seconds: float) -> float:
        """Return the seconds between the start of the present attempt and the earliest start of the next one.

        ``rested_seconds``: the seconds between the end of the last pause and the present attempt.
        """
        is_head = rested_seconds > OPEN_RETRY_SECONDS_MAX
        seconds = OPEN_RETRY_SECONDS_MIN if is_head else 2 * self._pauses.get(host, OPEN_RETRY_SECONDS_MIN / 2)
        self._pauses[host] = min(seconds, OPEN_RETRY_SECONDS_MAX)
        return self._pauses[host]

    def due(self, now: float) -> float | None:
        """Open the queues whose pause is over, if there is demand."""
        if self._events.has_demand():
            self.open()
        return None

    def reconsider(self) -> None:
        """Try at once to open all queues, because the cause of earlier failures may be gone.

        An attempt that is running may have started before that. If it fails, it is repeated at once, too.
        """
        self._errors.clear()
        self._not_before.clear()
        self._pauses.clear()
        self._failing_since = NEVER
        for host in self._hosts:
            host.found()
        if self._events.has_demand():
            self.open()

    def closed_on_purpose(self) -> None:
        """Open the queues without a pause, because popgate closed them only in order to reopen them."""
        self._not_before.clear()
        if self._events.has_demand():
            self.open()

    def given_away(self, host: QueueHost) -> None:
        """Forget the attempts to open a queue that this proxy no longer owns."""
        self._errors.pop(host, None)
        self._not_before.pop(host, None)
        self._pauses.pop(host, None)

    async def attempted(self, timeout_seconds: float) -> None:
        """Wait until all attempts in progress have ended, but for at most ``timeout_seconds``."""
        if self._running:
            await asyncio.wait(list(self._running.values()), timeout=timeout_seconds)

    def close(self) -> None:
        """Stop opening queues. Idempotent."""
        self._closed = True
        self._context.deadlines.cancel(self)

    def is_hopeless(self) -> bool:
        """Whether no queue is open or being opened."""
        return not self._running and all(host.channel is None for host in self._hosts)

    def error_of(self, host: QueueHost) -> PopgateError | None:
        """Return the error of the last attempt to open a queue, or None if it has not failed."""
        return self._errors.get(host)

    def raise_if_unservable(self) -> None:
        """If a queue was deleted, or if no queue can be opened, raise the error that explains why.

        Raises: QueueGone if a queue was deleted; otherwise the error of a failed attempt.
        """
        gone = [host.broker_queue for host in self._hosts if host.queue_gone] if self._context.missing_queues else []
        if gone:
            raise QueueGone(queue_gone_detail(gone[0]))
        if self._errors and not self._closed and all(host.channel is None for host in self._hosts):
            raise next(iter(self._errors.values())).with_traceback(None)  # it is raised often: keep its traceback short

    async def _open(self, host: QueueHost) -> None:
        try:
            await host.open()
            self._errors.pop(host, None)
        except PopgateError as error:
            if host.is_owned:
                self._errors[host] = error
        finally:
            self._running.pop(host, None)
        if self._closed:
            await host.close()
            return
        self._judge()
        if host.listener is None and host.is_owned and self._events.has_demand():
            self.open()

    def _judge(self) -> None:
        owned = [host for host in self._hosts if host.is_owned]
        if not all(host in self._errors and host.channel is None for host in owned) or not owned:
            self._failing_since = NEVER
            return
        now = self._context.clock.monotonic()
        self._failing_since = min(self._failing_since, now)
        if now - self._failing_since >= PARKED_GRACE_SECONDS or all(host.queue_gone for host in owned):
            self._events.given_up()
