"""Defines the records in a lock's history: the operations of the lock's clients, and the disturbances.

Times are seconds on one machine's clock. ``lock_history`` checks a history.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

KILLED = "killed"
"""A disturbance in which the client's process ends, so that the client no longer believes that it holds a lock."""
AWAY = "away"
"""A disturbance in which part of the broker is unavailable. It delays answers, but ends no lock."""
CUT_OFF = "requests cut off"
"""A disturbance in which a client loses answers, but no lock: the lock does not depend on its connections."""
TAKEN = "token taken"
"""A disturbance in which the broker takes the token from holders without ending their channels, as it does if it
considers their node lost. Such a holder learns of the loss only when it renews the lock."""

GrantKey = tuple[str, int, int | None]
"""The client, the slot and the token of a grant."""


class Action(StrEnum):
    ACQUIRE = "acquire"
    VERIFY = "verify"
    RENEW = "renew"
    WRITE = "write"
    """Write to the protected resource with the grant's token. Refused if the resource has seen a higher token."""
    RELEASE = "release"
    SET_SLOTS = "set_slots"
    COUNT_HELD = "count_held"
    """Count the held slots at the end of the history, after all clients have released their slots."""
    COUNT_FREE = "count_free"
    """Count, at the end of the history, how many slots can be acquired at the same time."""


class OperationOutcome(StrEnum):
    DONE = "done"
    """The call succeeded. For a verify or a renewal, the slot is still held."""
    REFUSED = "refused"
    """An acquire got no slot in time, a verify or a renewal found that the slot is lost, or the resource refused a
    write."""
    UNKNOWN = "unknown"
    """The call failed, or the client ended before it got the answer. The operation may have taken effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One call of a client and its result.

    ``completed`` is inf if there was no answer. ``slot`` and ``token`` identify the grant. ``renewed_token`` is the
    token that a renewal has returned. ``number`` is the number of slots that were set or counted. ``wait_seconds`` is
    the maximum wait that an acquire has requested.
    """

    client: str
    action: Action
    outcome: OperationOutcome
    invoked: float
    completed: float = inf
    slot: int = 0
    token: int | None = None
    renewed_token: int | None = None
    number: int = 0
    wait_seconds: float = 0.0

    @property
    def grant(self) -> GrantKey:
        """The grant that the operation refers to."""
        return self.client, self.slot, self.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """An event that may end a lock of ``client``, or delay or lose its answers. An empty ``client`` means all clients.

    The event took effect between ``at`` and ``until``, or at ``at`` if ``until`` is not given.
    """

    client: str
    at: float
    what: str
    until: float = -inf

    def falls_between(self, start: float, end: float) -> bool:
        return self.at < end and max(self.at, self.until) >= start


class Disturbances:
    """Finds the disturbances of each client."""

    def __init__(self, disturbances: Sequence[Disturbance]) -> None:
        self._of: defaultdict[str, list[Disturbance]] = defaultdict(list)
        self.kills: dict[str, Disturbance] = {}
        for one in disturbances:
            self._of[one.client].append(one)
            if one.what == KILLED:
                self.kills[one.client] = one

    def lost_between(self, client: str, start: float, end: float) -> bool:
        """Return whether the client may have lost a lock between ``start`` and ``end`` without noticing."""
        return any(one.what not in (AWAY, CUT_OFF) and one.falls_between(start, end) for one in self._about(client))

    def late_between(self, client: str, start: float, end: float) -> bool:
        """Return whether the client's answers may have been delayed or lost between ``start`` and ``end``."""
        return any(one.falls_between(start, end) for one in self._about(client))

    def taken_between(self, start: float, end: float) -> bool:
        """Return whether the broker may have taken tokens from unaware holders between ``start`` and ``end``."""
        return any(one.what == TAKEN and one.falls_between(start, end) for one in self._about(""))

    def _about(self, client: str) -> Iterator[Disturbance]:
        yield from self._of.get("", ())
        yield from self._of.get(client, ())
