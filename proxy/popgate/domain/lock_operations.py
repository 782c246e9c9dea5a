"""Defines what a history of a lock records: the operations of its clients, and the disturbances.

Times are seconds on one machine's clock. ``lock_history`` checks a history.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

KILLED = "killed"
"""A disturbance that ends the client: it no longer holds any lock."""
AWAY = "away"
"""A disturbance that delays answers but ends no lock: part of the broker is missing."""
CUT_OFF = "requests cut off"
"""A disturbance of a client whose lock does not depend on its connections: the client loses answers but no lock."""

GrantKey = tuple[str, int, int | None]
"""The client, the slot and the token of a grant."""


class Action(StrEnum):
    ACQUIRE = "acquire"
    VERIFY = "verify"
    WRITE = "write"
    """Write to the protected resource with the grant's token. Refused if the resource has seen a higher token."""
    RELEASE = "release"
    SET_SLOTS = "set_slots"
    COUNT_HELD = "count_held"
    """Count the held slots at the end, after all clients have released their slots."""
    COUNT_FREE = "count_free"
    """Count the slots that can be acquired at the same time at the end."""


class OperationOutcome(StrEnum):
    DONE = "done"
    """Acquired; verified as held; written; released; set; counted."""
    REFUSED = "refused"
    """Not acquired in time; verified as lost; not written."""
    UNKNOWN = "unknown"
    """The call failed, or the client died before the answer: the operation may have taken effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a client and its result.

    ``completed`` is inf if there was no answer. ``slot`` and ``token`` belong to the grant. ``number`` is the number of
    slots that were set or counted. ``wait_seconds`` is the maximum wait of an acquire.
    """

    client: str
    action: Action
    outcome: OperationOutcome
    invoked: float
    completed: float = inf
    slot: int = 0
    token: int | None = None
    number: int = 0
    wait_seconds: float = 0.0

    @property
    def grant(self) -> GrantKey:
        """The grant that the operation refers to."""
        return self.client, self.slot, self.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """An event after which ``client`` can't know whether it still has its lock. An empty ``client`` means all clients.

    The event took effect between ``at`` and ``until``, or at ``at`` if ``until`` is not given.
    """

    client: str
    at: float
    what: str
    until: float = -inf

    def falls_between(self, start: float, end: float) -> bool:
        return self.at < end and max(self.at, self.until) >= start
