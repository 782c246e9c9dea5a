"""Ends the drain of one subscription when its last lease has ended, or when the maximum time of the drain is over.

The owner of the first queue watches the drain. If this proxy dies, the next owner of the first queue continues with the
data of the drain in the catalog. The records in the store decide whether leases are left. While the owner of a queue
does not answer, or has not loaded the queue's records yet, leases may be left, so the drain continues.
"""

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from popgate.domain.errors import PopgateError
from popgate.domain.lease import RecordState
from popgate.domain.topics import GroupSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.counting import leases_left
from popgate.runtime.deadlines import NEVER

_log = logging.getLogger(__name__)

LOOK_SECONDS, LOOK_SECONDS_MAX = 0.1, 2.0
"""Minimum and maximum seconds between two checks whether the drain is over. A check asks the owners of all queues, so a
slow check is repeated less often."""
LOOK_SHARE = 4
"""The pause after a check is this many times as long as the check."""


class Drained(Protocol):
    """A subscription that can be drained."""

    @property
    def group(self) -> ServedGroup: ...

    @property
    def is_closed(self) -> bool: ...

    async def take(self, host: QueueHost) -> None:
        """Load the records of a queue that this proxy owns."""
        ...


class Draining:
    """Watches the drain of ``served`` while this proxy owns its first queue.

    ``end`` ends the drain that a spec contains, for all proxies.
    """

    def __init__(self, context: EngineContext, served: Drained, end: Callable[[GroupSpec], Awaitable[None]]) -> None:
        self.timer = NEVER
        self._context = context
        self._served = served
        self._end = end
        self._is_looking = False
        self._pause_seconds = LOOK_SECONDS

    def reconsider(self) -> None:
        """Start to watch the drain, if there is one and this proxy owns the first queue of the subscription.

        Call this after a change of the consume mode or of the owner of the first queue.
        """
        if self._is_due():
            self._context.deadlines.schedule(self._context.clock.monotonic(), self)

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        self._context.deadlines.cancel(self)

    def due(self, now: float) -> float | None:
        """Start the next check of the drain, if this proxy must watch it. Return the time of the next call."""
        if not self._is_due():
            return None
        if not self._is_looking:
            self._is_looking = True
            self._context.background.spawn(self._look(), name=f"drain {self._served.group.name}")
        return now + self._pause_seconds * random.uniform(0.8, 1.2)

    def _is_due(self) -> bool:
        served = self._served
        return served.group.spec.drain is not None and served.group.hosts[0].is_owned and not served.is_closed

    async def _look(self) -> None:
        began, spec = self._context.clock.monotonic(), self._served.group.spec
        try:
            if await self._is_over(spec):
                await self._end(spec)
        except PopgateError as error:
            _log.info(
                "a drain is not over yet", extra={"subscription": self._served.group.name, "reason": error.detail}
            )
        finally:
            self._is_looking = False
            took = self._context.clock.monotonic() - began
            self._pause_seconds = min(LOOK_SECONDS_MAX, max(LOOK_SECONDS, took * LOOK_SHARE))

    async def _is_over(self, spec: GroupSpec) -> bool:
        context, served, group = self._context, self._served, self._served.group
        if spec.drain is None:
            return False
        if await context.catalog.now() >= spec.drain.ends_at:
            return True
        for host in group.hosts:
            if host.is_owned and not host.epoch:
                await served.take(host)
        if await leases_left(context, group) != 0:
            return False
        await context.leases.allow_mode(group.name, spec.mode_generation)  # no lease is added after this call
        for queue in group.layout.queues:
            for one in await context.leases.load(queue):
                if one.record.state is RecordState.LEASED and one.remaining_seconds > 0.0:
                    return False
        return True
