"""Remembers which clients had the leases that have expired, until their messages are leased again.

The end of a lease needs no write to its record (``expired_leases``), and the record does not name the client, because
each grant would then write the name. So the next grant records the expired attempt, and takes the client's name from
here. A lease that another owner of the queue has granted, or this proxy before a restart, is not known.
"""

from collections.abc import Iterable, Mapping

from popgate.domain.attempts import AttemptEnd, Cause, described
from popgate.domain.names import CopyId, LeaseId
from popgate.engine.queue.buffered import BufferedMessage

REMEMBERED_MAX = 4_096
"""Maximum number of messages of one group whose last clients are remembered: the latest ones."""
REMEMBERED_SECONDS = 3_600.0
"""Seconds for which a client is remembered. A message that is settled meanwhile is never leased again."""


class ExpiredClients:
    """The clients of expired leases, by message. A false value has none, so that a grant can skip it."""

    def __init__(self) -> None:
        self._clients: dict[CopyId, tuple[LeaseId, str, float]] = {}

    def __len__(self) -> int:
        return len(self._clients)

    def note(self, buffered: BufferedMessage, now: float) -> None:
        """Remember the client of a lease that has expired. ``now`` is monotonic."""
        clients = self._clients
        clients.pop(buffered.copy_id, None)
        if buffered.client:
            clients[buffered.copy_id] = buffered.lease_id, buffered.client, now
        while clients:
            oldest = next(iter(clients))
            if len(clients) <= REMEMBERED_MAX and clients[oldest][2] > now - REMEMBERED_SECONDS:
                break
            del clients[oldest]

    def attempts(self, candidates: Iterable[BufferedMessage]) -> Mapping[LeaseId, str] | None:
        """Return by lease id how the store records the expired attempts on ``candidates``, or None if none is known."""
        found = [known for buffered in candidates if (known := self._clients.get(buffered.copy_id)) is not None]
        attempts = {lease_id: described("", AttemptEnd.EXPIRED, Cause(client=client)) for lease_id, client, _ in found}
        return attempts or None

    def client_of(self, buffered: BufferedMessage) -> str:
        """Return the client of the message's last lease, which has expired, or an empty string."""
        lease_id, client, _ = self._clients.get(buffered.copy_id, (None, "", 0.0))
        return buffered.client or (client if lease_id == buffered.lease_id else "")

    def forget(self, candidates: Iterable[BufferedMessage]) -> None:
        """Forget the clients of messages whose attempts are recorded."""
        for buffered in candidates:
            self._clients.pop(buffered.copy_id, None)
