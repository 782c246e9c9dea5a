"""Answers repeated pops. A client that repeats a pop with its attempt id gets the same messages and receipt handles."""

from functools import partial

from popgate.domain.errors import StateUnavailable
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, is_transient
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.context.routing import while_owners_change
from popgate.engine.lease.body_retrieval import BodyRetrieval
from popgate.engine.lease.granting import Granter
from popgate.engine.lease.pop_request import Leased
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.host import QueueHost
from popgate.ports.leases import AttemptLease
from popgate.ports.peers import LearnedRecord


class RepeatedAttempts:
    """Answers repeated pops of one subscription."""

    def __init__(self, context: EngineContext, group: ServedGroup, granter: Granter, retrieval: BodyRetrieval) -> None:
        self._context = context
        self._group = group
        self._granter = granter
        self._retrieval = retrieval

    async def repeated(self, attempt_id: str) -> list[Leased] | None:
        """Return the leases of an earlier pop with this attempt id. Fetch missing bodies from the broker.

        Return None if the earlier pop has no valid leases. Raises: StateUnavailable, PeerUnavailable. Both errors are
        also raised if the bodies do not arrive in time.
        """
        return await while_owners_change(partial(self._repeated, attempt_id))

    async def _repeated(self, attempt_id: str) -> list[Leased] | None:
        leases = await self._context.leases.find_attempt(self._group.name, attempt_id)
        if not leases:
            return None
        wall = self._context.clock.wall()
        by_queue = {host.broker_queue: host for host in self._group.hosts}
        wanted: list[tuple[QueueHost, BufferedMessage, AttemptLease]] = []
        elsewhere: list[tuple[QueueHost, AttemptLease]] = []
        for lease in leases:
            host = by_queue.get(lease.queue)
            if host is None:
                continue
            if host.is_others(lease.record):
                elsewhere.append((host, lease))
                continue
            if is_transient(lease.copy_id) and host.find(lease.copy_id) is None:
                continue  # the lease of an unidentified message ended with its channel
            buffered = host.learn(lease.copy_id, lease.record, lease.remaining_seconds)
            if buffered is not None:
                wanted.append((host, buffered, lease))
        if not await self._retrieval.bring_back([buffered for _, buffered, _ in wanted]):
            raise StateUnavailable("the messages of this attempt are on their way back from the broker")
        found: dict[tuple[BrokerQueue, CopyId], Message | None] = {}
        while left := [LearnedRecord(*lease) for _, lease in elsewhere if (lease.queue, lease.copy_id) not in found]:
            found |= await self._context.router.fetch(self._group.name, left)
        if any(host.has_changed_hands(buffered) for host, buffered, _ in wanted):
            raise StateUnavailable("a queue of this attempt has just changed its owner")
        repeated = [
            self._granter.leased(
                host.queue, buffered.copy_id, buffered, buffered.message, wall + lease.remaining_seconds
            )
            for host, buffered, lease in wanted
            if buffered.message is not None and buffered.lease_id == lease.record.lease_id
        ]
        for host, lease in elsewhere:
            message = found.get((lease.queue, lease.copy_id))
            if message is not None:
                until = wall + lease.remaining_seconds
                repeated.append(self._granter.leased(host.queue, lease.copy_id, lease.record, message, until))
        return repeated
