"""Records the workers' operations and the injected faults as one history, and acts as the protected resource.

This module does not control processes: it receives the lines that workers print, and the faults.
"""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from popgate.domain.errors import LockLost
from popgate.domain.lock_operations import AWAY, KILLED, Action, Disturbance, Operation, OperationOutcome
from popgate.locks.fence import Fence

_NUMBERS = re.compile(r"0x[0-9a-f]+|(?<=:)\d{4,5}\b")
"""Matches numbers, such as ports and addresses, that differ between otherwise equal error texts."""
ERRORS_MAX = 50
"""Maximum number of different error texts that are counted. Further error texts are ignored."""


class Record:
    """The history of one lock, from the start of the proof until now."""

    def __init__(self) -> None:
        self.disturbances: list[Disturbance] = []
        self.faults: Counter[str] = Counter()
        """Number of faults and other disturbances, by name."""
        self.errors: Counter[str] = Counter()
        self.holders: set[str] = set()
        """The clients that believe that they hold the lock, as far as the lines that they have printed show."""
        self._completed: list[Operation] = []
        self._open: dict[tuple[str, int], Operation] = {}
        self._fences: dict[int, Fence] = {}

    @property
    def count(self) -> int:
        return len(self._completed)

    @property
    def grants(self) -> int:
        return sum(one.action is Action.ACQUIRE and one.outcome is OperationOutcome.DONE for one in self._completed)

    def operations(self) -> list[Operation]:
        """Return all operations, including those without an answer."""
        return [*self._completed, *self._open.values()]

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Return the number of operations by action and outcome."""
        counted: dict[str, dict[str, int]] = {}
        for one in self.operations():
            by_outcome = counted.setdefault(one.action, {})
            by_outcome[one.outcome] = by_outcome.get(one.outcome, 0) + 1
        return counted

    def disturb(self, client: str, what: str, at: float, until: float | None = None) -> None:
        """Record that ``what`` happened to ``client`` between ``at`` and ``until``.

        An empty ``client`` stands for the broker. If ``until`` is None, the disturbance ends now.
        """
        done = time.monotonic() if until is None else until
        self.disturbances.append(Disturbance(client=client, at=at, what=what, until=done))
        if what != AWAY:
            self.faults[what] += 1
        if what == KILLED:
            self.holders.discard(client)

    def admit(self, line: Mapping[str, Any]) -> bool:
        """Return whether the protected resource accepts the write that a worker has begun. It refuses an outdated
        fencing token."""
        try:
            self._fences.setdefault(line["slot"], Fence()).admit(line["token"])
        except LockLost:
            return False
        return True

    def begun(self, process: str, line: Mapping[str, Any]) -> None:
        operation = Operation(
            client=line["client"],
            action=Action(line["action"]),
            outcome=OperationOutcome.UNKNOWN,
            invoked=line["at"],
            slot=line.get("slot", 0),
            token=line.get("token"),
            number=line.get("number", 0),
            wait_seconds=line.get("wait_seconds", 0.0),
        )
        self._open[process, line["id"]] = operation
        if operation.action is Action.RELEASE:
            self.holders.discard(operation.client)

    def ended(self, process: str, line: Mapping[str, Any]) -> None:
        begun = self._open.pop((process, line["id"]))
        operation = replace(
            begun,
            outcome=OperationOutcome(line["outcome"]),
            completed=line["at"],
            slot=line.get("slot", begun.slot),
            token=line.get("token", begun.token),
            renewed_token=line.get("renewed_token"),
            number=line.get("number", begun.number),
        )
        self._completed.append(operation)
        if operation.action is Action.ACQUIRE and operation.outcome is OperationOutcome.DONE:
            self.holders.add(operation.client)
        elif operation.outcome is not OperationOutcome.DONE:
            self.holders.discard(operation.client)
        error = _NUMBERS.sub("...", line.get("error", ""))
        if error and (error in self.errors or len(self.errors) < ERRORS_MAX):
            self.errors[error] += 1

    def slots_set(self) -> int | None:
        """Return the number of slots that was set last. Return -1 if the last change failed or was not answered, or
        None if there was no change."""
        changes = [one for one in self.operations() if one.action is Action.SET_SLOTS]
        last = max(changes, key=lambda change: change.invoked, default=None)
        if last is None:
            return None
        return last.number if last.outcome is OperationOutcome.DONE else -1

    def waits(self) -> Iterator[float]:
        """Yield the duration, in seconds, of each successful acquire with a positive ``wait_seconds``."""
        for one in self._completed:
            if one.action is Action.ACQUIRE and one.outcome is OperationOutcome.DONE and one.wait_seconds:
                yield one.completed - one.invoked
