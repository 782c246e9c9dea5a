"""Decides when a settled record may be deleted: once later deliveries prove that the broker applied the ack.

Pure. Works on one queue, over all its channels. If a record were deleted while its message is still at the broker, the
message would be handed out again. So in doubt, every rule retains the record (decision 5).

Theory of operation. A record settled at time t may be deleted when the acks of all records settled before t are proved.
Acks are not sent in the order of settlement, so the limit is the oldest settlement whose ack is not proved. When a
channel ends, its unproved acks may be lost. The broker then delivers their messages again ahead of all newer ones.
popgate finds their records settled, and acks the messages again. When the next channel has proved as many acks as
messages could return, all of these messages have been handled. Before that, no record may be deleted.
"""

from collections import deque

from popgate.domain.names import CopyId

RETURNED_MAX_AFTER_RESTART = 65_535
"""Maximum number of deliveries that an earlier process may have left unsettled. They return before all newer ones."""

_NEVER = float("-inf")


class SettlementEvidence:
    """Turns proved acks into a time of the store. Messages that were settled before it have left the broker."""

    def __init__(self) -> None:
        self._unproved: deque[tuple[int, float]] = deque()
        """Unproved acks of the present channel: (number of acks sent up to and including these, time of settlement)."""
        self._sent = 0
        self._proved_until = _NEVER
        self._owed = RETURNED_MAX_AFTER_RESTART
        """Number of acks that have to be proved before any record may be deleted."""
        self._owed_until = _NEVER
        self.detached: dict[CopyId, float] = {}
        """Messages that are settled in the store but not acked, with their settlement times. They are acked when the
        broker delivers them."""

    def sent(self, count: int, settled_at: float) -> None:
        """Note that ``count`` acks were sent on the channel, for records settled no earlier than ``settled_at``."""
        self._sent += count
        self._unproved.append((self._sent, settled_at))

    def sent_for_nothing(self, count: int) -> None:
        """Note that ``count`` acks without a record were sent on the channel, such as those of repeated copies."""
        self._sent += count

    def channel_ended(self, proved_acks: int, buffered_count: int) -> None:
        """Note that the channel has ended. Its unsettled messages are delivered first on the next channel, so they have
        all been handled when that many acks are proved.

        The number that an earlier channel left is reduced by this channel's proved acks. If newer messages arrived as
        well, all messages of the earlier channel have arrived. The unsettled ones of them are then included in this
        channel's buffered messages and unproved acks.
        """
        self._advance(proved_acks)
        self._owed = max(self._owed - proved_acks, self._sent - proved_acks + buffered_count)
        self._owed_until = max([self._owed_until, *(settled_at for _, settled_at in self._unproved)])
        self._unproved.clear()
        self._sent = 0

    def settled_before(self, proved_acks: int) -> float | None:
        """Return the store's time before which every settled record may be deleted, or None if nothing is proved."""
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
