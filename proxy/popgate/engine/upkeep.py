"""The upkeep of one queue's records: what was settled elsewhere is looked up, what is proved is trimmed, and what ended
with its channel is forgotten."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from popgate.domain.errors import PopgateError
from popgate.domain.names import CopyId
from popgate.engine.held import HeldState
from popgate.engine.room import Room

if TYPE_CHECKING:
    from popgate.engine.queue_host import QueueHost

_log = logging.getLogger(__name__)

SETTLED_KEPT_SECONDS = 900.0
"""How long a settled record answers ``already_acked`` (design: section 2). At least as long as a publish may be
repeated as the same copy, which it then meets (``ports.dedup``)."""


class Upkeep:
    """Of ``host``."""

    def __init__(self, room: Room, host: QueueHost) -> None:
        self._room = room
        self._host = host

    async def review(self) -> None:
        """Look up what the store says of leases: another proxy may have settled them, and not lived to say so.

        Raises: StateUnavailable.
        """
        host, leases = self._host, self._room.leases
        known = {
            held.copy_id: held.lease_id
            for held in host.held.values()
            if held.state is HeldState.LEASED or held.state is HeldState.WAITING
        }
        if not known or not host.is_owned:
            return
        live = {one.copy_id: one for one in await leases.load(host.broker_queue)}
        missing = [copy_id for copy_id in known if copy_id not in live]
        settled = await leases.peek(host.broker_queue, missing) if missing else {}
        for copy_id, lease_id in known.items():
            held = host.held.get(copy_id)
            record = live[copy_id].record if copy_id in live else settled.get(copy_id)
            if held is None or record is None or not held.lease_id == lease_id == record.lease_id or held.is_under_way:
                continue  # it has changed meanwhile, and that is known here
            host.conform(held, record, live[copy_id].remaining_seconds if copy_id in live else 0.0)

    async def trim(self) -> None:
        """Forget settled records whose acks are proved. Raises: StateUnavailable."""
        host = self._host
        proved = host.channel.settled_evidence() if host.channel is not None else 0
        before = host.evidence.settled_before(proved)
        if before is not None:
            await self._room.leases.trim(
                host.broker_queue,
                settled_before=before,
                older_than_seconds=max(SETTLED_KEPT_SECONDS, self._room.options.dedup_seconds),
            )

    def forget(self, transient: Sequence[CopyId]) -> None:
        """Drop the records of unidentified messages whose deliveries have ended."""
        if transient:
            self._room.background.spawn(self._forget(transient), name=f"forget {self._host.broker_queue}")

    async def _forget(self, copy_ids: Sequence[CopyId]) -> None:
        try:
            await self._room.leases.forget(self._host.broker_queue, copy_ids)
        except PopgateError as error:
            _log.warning("records of ended deliveries stay until the next claim", extra={"error": error.detail})
