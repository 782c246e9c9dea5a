"""A placement by somebody else, that can break nothing: not by an error, not by nonsense, and not by never ending."""

import logging
import queue
import threading
from collections.abc import Sequence
from typing import Any

from popgate.domain.replica_placement import spread
from popgate.domain.replicas import Placement, ReplicaNode, ReplicaQueue

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0


class GuardedPlacement:
    """``place`` as long as it works; where it does not, the built-in one answers. One that does not end is not asked
    again. ``failures`` counts."""

    def __init__(self, place: Placement, name: str) -> None:
        self._place = place
        self._name = name
        self._given_up = False
        self.failures = 0

    def __call__(
        self, replica_queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]
    ) -> Sequence[str]:
        if self._given_up:
            return spread(replica_queue, members, nodes)
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(_names(self._place(replica_queue, tuple(members), tuple(nodes))))
            except BaseException as error:  # a plug-in may also exit
                answers.put(error)

        # A thread that nobody waits for at the end: one that hangs must not hold up the exit.
        threading.Thread(target=ask, name=f"popgate placement {self._name}", daemon=True).start()
        try:
            answer = answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            self._given_up = True
            answer = TimeoutError(f"no answer within {ANSWER_SECONDS:g} s; it is not asked again")
        if isinstance(answer, BaseException):
            self.failures += 1
            _log.error("a placement plug-in has failed", extra={"placement": self._name, "reason": repr(answer)})
            return spread(replica_queue, members, nodes)
        names: list[str] = answer
        return names


def _names(answer: Any) -> list[str]:
    """Raises: TypeError."""
    names = [] if isinstance(answer, str) else list(answer)
    if isinstance(answer, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"it must give names of nodes, the best first, not {answer!r}")
    return names


_conforms: Placement = GuardedPlacement(spread, "spread")
