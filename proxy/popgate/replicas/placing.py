"""Protects the keeper from a faulty placement plug-in: from errors, wrong answers, and calls that never end."""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from popgate.domain.replica_placement import spread
from popgate.domain.replicas import Placement, ReplicaNode, ReplicaQueue

_log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
THINKING_SECONDS_MAX = 3.0
"""Initial and maximum time budget of the plug-in, in seconds. Each call reduces the budget by its duration. The limit
ensures that the keeper can plan for hundreds of queues before the next check is due."""
THINKING_SHARE = 0.1
"""Share of the elapsed time that is added to the time budget of the plug-in."""
NAMES_MAX = 1_000
"""Maximum number of names that are read from an answer of the plug-in, because the answer may be an endless
iterable."""


class GuardedPlacement:
    """Calls the plug-in ``place``. If the plug-in fails or has used up its time, uses the built-in placement instead.

    If a call of ``place`` does not end within ``ANSWER_SECONDS``, ``place`` is never called again. ``failures`` is the
    number of failed calls.
    """

    def __init__(self, place: Placement, name: str) -> None:
        self._place = place
        self._name = name
        self._given_up = False
        self._thinking_left_seconds = THINKING_SECONDS_MAX
        self._asked_at = time.monotonic()
        self._is_slow = False
        self.failures = 0

    def __call__(
        self, replica_queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]
    ) -> Sequence[str]:
        if self._given_up or not self._has_time():
            return spread(replica_queue, members, nodes)
        names, reason = self._answer(replica_queue, tuple(members), tuple(nodes))
        self._thinking_left_seconds -= time.monotonic() - self._asked_at
        if names is not None:
            return names
        self.failures += 1
        _log.error("a placement plug-in has failed", extra={"placement": self._name, "reason": reason})
        return spread(replica_queue, members, nodes)

    def _answer(
        self, replica_queue: ReplicaQueue, members: Sequence[ReplicaNode], nodes: Sequence[ReplicaNode]
    ) -> tuple[list[str] | None, str]:
        """Call the plug-in. Return the names in its answer, or None and the reason why the call failed."""
        answers: queue.SimpleQueue[tuple[list[str] | None, str]] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put((_names(self._place(replica_queue, members, nodes)), ""))
            except BaseException as error:  # a plug-in may also raise SystemExit
                answers.put((None, _told(error)))

        # A daemon thread does not delay the exit of the process if the plug-in hangs.
        threading.Thread(target=ask, name=f"popgate placement {self._name}", daemon=True).start()
        try:
            return answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            self._given_up = True
            return None, f"no answer within {ANSWER_SECONDS:g} s; it is not asked again"

    def _has_time(self) -> bool:
        """Return whether the plug-in has time left.

        If the result is True, the caller must call the plug-in immediately, because the duration of the call is
        measured from now.
        """
        now = time.monotonic()
        earned = (now - self._asked_at) * THINKING_SHARE
        self._thinking_left_seconds = min(THINKING_SECONDS_MAX, self._thinking_left_seconds + earned)
        self._asked_at = now
        is_slow = self._thinking_left_seconds <= 0
        if is_slow and not self._is_slow:
            _log.warning("a placement plug-in is slow: the built-in one is used", extra={"placement": self._name})
        self._is_slow = is_slow
        return not is_slow


def _names(answer: Any) -> list[str]:
    """Return the node names in an answer of the plug-in. Raises: TypeError if the answer does not consist of names."""
    found: list[object] = [] if isinstance(answer, str) else list(itertools.islice(answer, NAMES_MAX))
    names = [name for name in found if isinstance(name, str)]
    if isinstance(answer, str) or len(names) < len(found):
        raise TypeError(f"it must give names of nodes, the best first, not {answer!r}")
    return names


def _told(error: BaseException) -> str:
    try:
        return repr(error)
    except Exception:  # the plug-in's exception may have a faulty ``__repr__``
        return type(error).__name__


_conforms: Placement = GuardedPlacement(spread, "spread")
