"""Estimates how long messages wait at the other owners of one subscription's queues, to forward fewer pops.

Theory of operation. A forwarded pop costs more than twice as much as a pop that finds its messages on this proxy. It is
needed if messages wait at another owner for longer than here. An owner reports the wait of the messages that it hands
out to a forwarded pop, but only while its own clients take messages, too: then no message starves there. This module
stores since when those messages waited. As time passes without a further report, this proxy's first message becomes
younger in comparison, until the other owner seems to be behind, and a pop asks again. So a message at another owner
waits at most ``BEHIND_SECONDS`` longer than it would if the owner's backlog were known.
"""

from popgate.domain.names import InstanceId

BEHIND_SECONDS = 0.25
"""Seconds by which the messages of another owner may have waited longer before pops are forwarded to it."""
POPPED_HERE_SECONDS = 1.0
"""Seconds after a pop of its own client during which a proxy reports the wait of its messages."""


class OtherBacklogs:
    """The waits that the other owners have reported. Times are monotonic."""

    def __init__(self) -> None:
        self._since: dict[InstanceId, float] = {}

    def heard(self, member: InstanceId, waited_seconds: float | None, now: float) -> None:
        """Store how long the messages had waited that ``member`` has just handed out, or None if it is unknown."""
        if waited_seconds is None:
            self._since.pop(member, None)
        else:
            self._since[member] = now - waited_seconds

    def is_behind(self, member: InstanceId, here_since: float | None) -> bool:
        """Whether messages may wait at ``member`` for longer than on this proxy.

        ``here_since``: since when this proxy's first message has waited, or None if there is none or it is unknown.
        """
        since = self._since.get(member)
        return since is None or here_since is None or since + BEHIND_SECONDS < here_since
