"""Maintains the lease records of one queue: finds settlements by other proxies, and deletes old settled records."""

from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import RECOVERABLE
from popgate.engine.queue.host import QueueHost

SETTLED_KEPT_SECONDS = 900.0
"""Minimum seconds for which a settled record is retained, so that a repeated ack gets ``already_acked`` (decision 5).
``trim`` retains it for ``dedup_seconds`` if that is longer, because a repeated publish of the same copy must find it
(``ports.dedup``)."""


async def review(context: EngineContext, host: QueueHost) -> None:
    """Update the leases of a queue from the store.

    Another proxy may have settled some of them, and stopped before it reported this to the owner of the queue. Raises:
    StateUnavailable.
    """
    known = {message.copy_id: message.lease_id for message in host.messages() if message.state in RECOVERABLE}
    if not known or not host.is_owned:
        return
    live = {one.copy_id: one for one in await context.leases.load(host.broker_queue)}
    missing = [copy_id for copy_id in known if copy_id not in live]
    settled = await context.leases.peek(host.broker_queue, missing) if missing else {}
    for copy_id, lease_id in known.items():
        message = host.find(copy_id)
        record = live[copy_id].record if copy_id in live else settled.get(copy_id)
        if message is None or record is None or message.is_undecided:
            continue
        if message.lease_id == lease_id == record.lease_id:  # otherwise the message has a newer state here
            host.conform(message, record, live[copy_id].remaining_seconds if copy_id in live else 0.0)


async def trim(context: EngineContext, host: QueueHost) -> None:
    """Delete old settled records if the broker has provably applied their acks. Raises: StateUnavailable."""
    proved = host.channel.settled_evidence() if host.channel is not None else 0
    before = host.state.evidence.settled_before(proved)
    if before is not None:
        await context.leases.trim(
            host.broker_queue,
            settled_before=before,
            older_than_seconds=max(SETTLED_KEPT_SECONDS, context.options.dedup_seconds),
        )
