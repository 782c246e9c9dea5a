"""When a settled record may be forgotten: once later deliveries prove that the broker applied the ack.

Pure. Works on one queue, over its channels. A settled id that is forgotten while its message is still at the broker
would be handed out again, so every rule here errs towards keeping (design: section 2, "Records live as long as ...").

Theory of operation. A record settled at time t may go when the acks of all records settled before t are proved. Acks
are given to a channel in one order and records are settled in another, so the bound is the oldest settlement whose ack
is not proved. A channel that ends takes its unproved acks with it: their messages come back ahead of all newer ones,
meet their records, and are acked again. Once the next channel has proved as many acks as messages could come back,
each of those has been seen; until then nothing is known.
"""

from collections import deque

from popgate.domain.names import CopyId

RETURNED_MAX_AFTER_RESTART = 65_535
"""A former process may have left that many deliveries unsettled; they come back ahead of all newer ones."""

_NEVER = float("-inf")


class SettlementEvidence:
    """Turns proved acks into a time of the store: every record settled before it has left the broker."""

    def __init__(self) -> None:
        self._unproved: deque[tuple[int, float]] = deque()
        """Acks given to the present channel: (how many when it was given, when it was settled)."""
        self._sent = 0
        self._proved_until = _NEVER
        self._owed = RETURNED_MAX_AFTER_RESTART
        """So many acks have to be proved before anything is known."""
        self._owed_until = _NEVER
        self.detached: dict[CopyId, float] = {}
        """Settled in the store, but the message is not on our channel: acked when it comes back."""

    def sent(self, count: int, settled_at: float) -> None:
        """``count`` acks went to the channel, for records settled no earlier than ``settled_at``."""
        self._sent += count
        self._unproved.append((self._sent, settled_at))

    def sent_for_nothing(self, count: int) -> None:
        """``count`` acks went to the channel that no record stands for, such as those of repeated copies."""
        self._sent += count

    def channel_ended(self, proved_acks: int, held: int) -> None:
        """What was unsettled comes back first: once that many acks are proved, all of it was seen.

        What an earlier channel left is less by the acks of this one, unless newer messages came as well: then all of
        it has come, and what is left of it is among the ``held`` and the unproved.
        """
        self._advance(proved_acks)
        self._owed = max(self._owed - proved_acks, self._sent - proved_acks + held)
        self._owed_until = max([self._owed_until, *(settled_at for _, settled_at in self._unproved)])
        self._unproved.clear()
        self._sent = 0

    def settled_before(self, proved_acks: int) -> float | None:
        """The store's time before which every settled record may go, or None where nothing is proved."""
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
