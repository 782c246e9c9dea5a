"""When a settled record may be forgotten: once later deliveries prove that the broker applied the ack.

Pure. Works on one queue, over its channels. A settled id that is forgotten while its message is still at the broker
would be handed out again, so every rule here errs towards keeping (design: section 2, "Records live as long as ...").
"""

from collections import deque

from popgate.domain.names import CopyId

RETURNED_MAX_AFTER_RESTART = 65_535
"""A former process may have left that many deliveries unsettled; they come back ahead of all newer ones."""


class SettlementEvidence:
    """Turns proved acks into a time: every record settled before it has left the broker."""

    def __init__(self) -> None:
        self._checkpoints: deque[tuple[int, float]] = deque()
        self._sent = 0
        self._inherited_need = RETURNED_MAX_AFTER_RESTART
        self._inherited_until: float | None = float("-inf")  # until proved, a former owner's records keep all
        self._proved = float("-inf")
        self.detached: dict[CopyId, float] = {}
        """Settled in the store, but the message is not on our channel: acked when it comes back."""

    def sent(self, count: int, settled_at: float) -> None:
        """``count`` acks went to the channel for records settled no later than ``settled_at``."""
        self._sent += count
        if self._checkpoints and self._checkpoints[-1][1] >= settled_at:
            settled_at = self._checkpoints.pop()[1]
        self._checkpoints.append((self._sent, settled_at))

    def channel_ended(self, proved_acks: int, held: int) -> None:
        """All unsettled deliveries come back first: once that many and the unproved acks were seen, all is known."""
        self._advance(proved_acks)
        if self._checkpoints:
            self._inherited_until = max(self._checkpoints[-1][1], self._inherited_until or float("-inf"))
        pending = self._sent - proved_acks + held
        self._inherited_need = max(pending, self._inherited_need if self._inherited_until is not None else 0)
        self._checkpoints.clear()
        self._sent = 0

    def settled_before(self, proved_acks: int) -> float | None:
        """Store time before which every settled record may go, or None where nothing is proved."""
        self._advance(proved_acks)
        if self._inherited_until is not None:
            return None
        bound = min(self.detached.values(), default=float("inf"))
        proved = min(self._proved, bound)
        return None if proved == float("-inf") else proved

    def _advance(self, proved_acks: int) -> None:
        if self._inherited_until is not None and proved_acks >= self._inherited_need:
            self._proved = max(self._proved, self._inherited_until)
            self._inherited_until = None
            self._inherited_need = 0
        while self._checkpoints and self._checkpoints[0][0] <= proved_acks:
            self._proved = max(self._proved, self._checkpoints.popleft()[1])
