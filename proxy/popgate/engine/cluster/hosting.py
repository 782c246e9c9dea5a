"""Serves, hands over and drops queues as the cluster decides. Implements the queue-host port."""

import asyncio
import logging
from collections.abc import Collection

from popgate.domain.errors import StateUnavailable
from popgate.domain.names import BrokerQueue
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.record_upkeep import review
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.queue_hosts import QueueHosts

_log = logging.getLogger(__name__)

REVIEW_AFTER_SECONDS = (0.0, 0.3, 1.0, 4.0)
"""Seconds before each search in the store for settlements that a departed proxy did not report. A proxy that shuts down
settles leases until its connections are closed, but at the end it can no longer report them to the owners of the
queues. So one search is not enough."""


class Hosting:
    """Serves the queues of ``topics`` that the cluster assigns to this proxy."""

    def __init__(self, context: EngineContext, topics: Topics) -> None:
        self._context = context
        self._topics = topics

    def queues(self) -> Collection[BrokerQueue]:
        return [queue for served in self._topics.served.values() for queue in served.layout.queues]

    def served(self) -> Collection[BrokerQueue]:
        return [
            host.broker_queue
            for served in self._topics.served.values()
            for host in served.hosts
            if host.is_owned and host.epoch
        ]

    def lost(self) -> Collection[BrokerQueue]:
        return [
            host.broker_queue
            for served in self._topics.served.values()
            for host in served.hosts
            if host.is_owned and host.claim.is_lost
        ]

    async def take(self, queue: BrokerQueue) -> None:
        found = self._find(queue)
        if found is not None:
            served, host = found
            await served.take(host)

    async def hand_over(self, queue: BrokerQueue) -> None:
        found = self._find(queue)
        if found is not None:
            served, host = found
            await served.hand_over(host)

    def lose(self, queue: BrokerQueue) -> None:
        found = self._find(queue)
        if found is not None:
            served, host = found
            served.lose(host)

    def data_lost(self) -> None:
        for served in self._topics.served.values():
            for host in served.hosts:
                host.claim.data_lost()

    def review(self) -> None:
        self._context.background.spawn(self._review(), name="look up what was settled")

    async def _review(self) -> None:
        for seconds in REVIEW_AFTER_SECONDS:
            await asyncio.sleep(seconds)
            hosts = [host for served in self._topics.served.values() for host in served.hosts]
            try:
                for host in hosts:
                    await review(self._context, host)
            except StateUnavailable as error:
                _log.warning("settlements of a proxy that is gone are found later", extra={"reason": error.detail})

    def _find(self, queue: BrokerQueue) -> tuple[ServedSubscription, QueueHost] | None:
        for served in self._topics.served.values():
            if queue in served.layout.queues:
                return served, served.hosts[served.layout.queues.index(queue)]
        return None


_conforms: type[QueueHosts] = Hosting
