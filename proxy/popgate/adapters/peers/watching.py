"""Watches one member, and notices a killed process long before its heartbeats are missed.

Theory of operation. One request to the member is held open. Its answer ends when the member begins to leave. If the
connection ends before the answer does, either the kernel has closed it because the process ended, or something in
between has. The next attempt shows which.

    connecting --(accepted)--> asking --(200)--> HELD --(closed without the end)--> connecting again
        |                        |                 |
        | refused, after HELD    | another         | the answer's end
        v                        v instance        v
       DIED <-------------------DIED              LEFT: no report; the member itself announces that it leaves

A member that was never held is never reported as dead, because its address may be wrong. A member that does not answer
in time may hang or be cut off. It is asked again, and its missing heartbeats show its loss. If a member that is held is
cut off silently (its host loses power), this module does not notice it at all.
"""

import asyncio
from enum import Enum, auto
from http import HTTPStatus

from popgate.adapters.peers.connection import connect
from popgate.adapters.peers.heads import watch_head
from popgate.adapters.peers.pool import address_parts
from popgate.ports.claims import Member

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.01, 0.5
"""Minimum and maximum seconds between attempts without a result. The pause doubles after each attempt."""


class _Outcome(Enum):
    LOST = auto()
    """The connection was held, and ended before the answer's end."""
    REFUSED = auto()
    ANOTHER = auto()
    """Another instance has the address."""
    LEFT = auto()
    UNKNOWN = auto()


class Watch:
    """Watches one member. Raises: ValueError if its address is invalid."""

    def __init__(self, member: Member, token: bytes) -> None:
        self._host, self._port, authority = address_parts(member.address)
        self._head = watch_head(authority, member.instance, token)
        self._was_held = False
        self._pause_seconds = PAUSE_SECONDS_MIN

    async def until_died(self) -> None:
        """Return when the member has died, as ``HttpPeers.died`` describes."""
        while True:
            match await self._hold():
                case _Outcome.LOST:
                    # If the port refuses the next attempt, its process has ended. The pause has two reasons: the port
                    # may close just after the connection, and if something in between cuts all connections, attempts
                    # must not follow each other without a pause.
                    await asyncio.sleep(PAUSE_SECONDS_MIN)
                case _Outcome.REFUSED | _Outcome.ANOTHER if self._was_held:
                    return
                case _Outcome.LEFT:
                    await asyncio.get_running_loop().create_future()  # for ever, until this task is cancelled
                case _:
                    await asyncio.sleep(self._pause_seconds)
                    self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)

    async def _hold(self) -> _Outcome:
        """Hold one connection until it ends, and return how it ended."""
        statuses: list[int] = []

        def on_head(status: int) -> None:
            statuses.append(status)
            if status == HTTPStatus.OK:
                self._was_held = True
                self._pause_seconds = PAUSE_SECONDS_MIN
                self._host = connection.peer_host  # the name's other addresses may not lead to the member

        try:
            connection = await connect(self._host, self._port, lambda _: None)
        except ConnectionRefusedError:
            return _Outcome.REFUSED
        except OSError:
            return _Outcome.UNKNOWN
        try:
            answer = await connection.exchange(self._head, on_head=on_head)
        except ConnectionError:
            return _Outcome.LOST if statuses == [HTTPStatus.OK] else _Outcome.UNKNOWN
        finally:
            connection.close()
        if answer.status == HTTPStatus.OK:
            return _Outcome.LEFT
        return _Outcome.ANOTHER if answer.status == HTTPStatus.MISDIRECTED_REQUEST else _Outcome.UNKNOWN
