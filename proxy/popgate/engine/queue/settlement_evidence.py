"""Decides when a settled record may be deleted: once later deliveries prove that the broker applied the ack.

Pure. Covers one queue, over all its channels. If a record were deleted while its message is still at the broker, the
message would be handed out again. So if there is any doubt, the record is retained (decision 5).

Theory of operation. A record settled at time t may be deleted when the acks of all records settled before t are proved.
Acks are not sent in the order of settlement. So only records settled before the oldest settlement with an unproved ack
may be deleted. When a channel ends, the broker may not have applied the unproved acks. It then delivers these messages
again, ahead of all newer messages. popgate finds that their records are settled, and acks the messages again. When the
next channel has proved as many acks as messages could be delivered again, all of these messages have been acked. Before
that, no record may be deleted.
"""

from collections import deque

from popgate.domain.names import CopyId

RETURNED_MAX_AFTER_RESTART = 65_535
"""Maximum number of deliveries that an earlier process may have left unsettled. The broker delivers them again before
all newer messages."""

_NEVER = float("-inf")


class SettlementEvidence:
    """Computes from proved acks the time of the store before which all settled messages have left the broker."""

    def __init__(self) -> None:
        self._unproved: deque[tuple[int, float]] = deque()
        """Unproved acks of the present channel. Each entry: (number of acks sent up to and including these, time of
        settlement)."""
        self._sent = 0
        self._proved_until = _NEVER
        self._owed = RETURNED_MAX_AFTER_RESTART
        """Number of acks that have to be proved before any record may be deleted."""
        self._owed_until = _NEVER
        self.detached: dict[CopyId, float] = {}
        """Messages that are settled in the store but not acked, with their settlement times. popgate acks them when the
        broker delivers them."""

    def sent(self, count: int, settled_at: float) -> None:
        """Record ``count`` acks that were sent on the channel, for messages settled no earlier than ``settled_at``."""
        self._sent += count
        self._unproved.append((self._sent, settled_at))

    def sent_for_nothing(self, count: int) -> None:
        """Record ``count`` acks of messages without a record that were sent on the channel, such as repeated copies."""
        self._sent += count

    def channel_ended(self, proved_acks: int, buffered_count: int) -> None:
        """Record the end of the channel, and compute how many acks the next channel must prove.

        Until then, no record may be deleted. The broker delivers the unsettled messages of the ended channel first on
        the next channel. So all of them have been handled when the next channel has proved as many acks.

        If an earlier channel left unsettled messages, their number is reduced by the acks that the ended channel has
        proved. If newer messages also arrived on the ended channel, all messages of the earlier channel had arrived
        before. Those that are still unsettled are then included in the buffered messages and the unproved acks of the
        ended channel.
        """
        self._advance(proved_acks)
        self._owed = max(self._owed - proved_acks, self._sent - proved_acks + buffered_count)
        self._owed_until = max([self._owed_until, *(settled_at for _, settled_at in self._unproved)])
        self._unproved.clear()
        self._sent = 0

    def settled_before(self, proved_acks: int) -> float | None:
        """Return the store's time before which every settled record may be deleted, or None if none may be deleted."""
        self._advance(proved_acks)
        if self._owed:
            return None
        unproved = min((settled_at for _, settled_at in self._unproved), default=self._proved_until)
        detached = min(self.detached.values(), default=self._proved_until)
        bound = min(self._proved_until, unproved, detached)
        return None if bound == _NEVER else bound

    def _advance(self, proved_acks: int) -> None:
        if self._owed and proved_acks >= self._owed:
            self._proved_until = max(self._proved_until, self._owed_until)
            self._owed = 0
        while self._unproved and self._unproved[0][0] <= proved_acks:
            self._proved_until = max(self._proved_until, self._unproved.popleft()[1])
