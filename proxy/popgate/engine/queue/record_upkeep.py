"""The upkeep of one queue's lease records: what another proxy settled is looked up, and what is proved is trimmed."""

from popgate.engine.context.engine_context import EngineContext
from popgate.engine.queue.buffered import RECOVERABLE
from popgate.engine.queue.host import QueueHost

SETTLED_KEPT_SECONDS = 900.0
"""How long a settled record answers ``already_acked`` (decision 5). At least as long as a publish may be
repeated as the same copy, which then meets the record (``ports.dedup``)."""


async def review(context: EngineContext, host: QueueHost) -> None:
    """Look up what the store says of leases: another proxy may have settled them, and ended before it could say so.

    Raises: StateUnavailable.
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
        if message.lease_id == lease_id == record.lease_id:  # else it has changed meanwhile, and that is known here
            host.conform(message, record, live[copy_id].remaining_seconds if copy_id in live else 0.0)


async def trim(context: EngineContext, host: QueueHost) -> None:
    """Forget settled records whose acks the broker has proved. Raises: StateUnavailable."""
    proved = host.channel.settled_evidence() if host.channel is not None else 0
    before = host.state.evidence.settled_before(proved)
    if before is not None:
        await context.leases.trim(
            host.broker_queue,
            settled_before=before,
            older_than_seconds=max(SETTLED_KEPT_SECONDS, context.options.dedup_seconds),
        )
