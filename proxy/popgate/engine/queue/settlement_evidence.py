"""Decides when a settled record may be deleted: once later deliveries prove that the broker applied the ack.

Pure. Works on one queue, over its channels. If a settled id were forgotten while its message is still at the broker,
the message would be handed out again, so every rule here errs towards keeping (decision 5).

Theory of operation. A record settled at time t may be deleted when the acks of all records settled before t are proved.
Acks are sent on a channel in one order and records are settled in another, so the bound is the oldest settlement whose
ack is not proved. When a channel ends, its unproved acks may be lost: their messages are delivered again ahead of all
newer ones, are found settled by their records, and are acked again. Once the next channel has proved as many acks as
messages could come back, each of those has been seen; until then nothing is proved.
"""

from collections import deque

from popgate.domain.names import CopyId

RETURNED_MAX_AFTER_RESTART = 65_535
"""Maximum number of deliveries that a former process may have left unsettled. They come back before all newer ones."""

_NEVER = float("-inf")


class SettlementEvidence:
    """Turns proved acks into a time of the store: messages whose records were settled earlier have left the broker."""

    def __init__(self) -> None:
        self._unproved: deque[tuple[int, float]] = deque()
        """Acks sent on the present channel: (number of acks sent until then, time of the settlement)."""
        self._sent = 0
        self._proved_until = _NEVER
        self._owed = RETURNED_MAX_AFTER_RESTART
        """Number of acks that have to be proved before any record may be deleted."""
        self._owed_until = _NEVER
        self.detached: dict[CopyId, float] = {}
        """Messages settled in the store but not on this proxy's channel, by time. They are acked when they come
        back."""

    def sent(self, count: int, settled_at: float) -> None:
        """Note that ``count`` acks were sent on the channel, for records settled no earlier than ``settled_at``."""
        self._sent += count
        self._unproved.append((self._sent, settled_at))

    def sent_for_nothing(self, count: int) -> None:
        """Note that ``count`` acks without a record were sent on the channel, such as those of repeated copies."""
        self._sent += count

    def channel_ended(self, proved_acks: int, buffered_count: int) -> None:
        """Note that the channel has ended. Its unsettled messages come back first: once that many acks are proved, all
        of them have been seen.

        The number left by an earlier channel shrinks by the acks of this one. If newer messages came as well, all
        messages of the earlier channel have come, and those that are left are among the buffered and the unproved ones.
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
