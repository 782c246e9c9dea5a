"""Detects that the process of a cluster member was killed. Missing heartbeats would show this only much later.

Theory of operation. This proxy sends the member a request whose answer ends only when the member begins to leave the
cluster. If the connection closes before the answer ends, there are two possible reasons: the kernel of the member's
host closed the connection because the process ended, or a network device closed it. The next attempt to connect shows
which of the two happened.

    connecting --(accepted)--> asking --(200)--> HELD --(closed without the end)--> connecting again
        |                        |                 |
        | refused, or another    | another         | the answer's end
        v proxy, after HELD      v instance        v
       DIED                     DIED              LEFT: no report; the member itself announces that it leaves

If the certificate at the address belongs to another proxy of the cluster, the member's process has ended, because its
socket is bound to the address as long as it lives. A certificate that does not belong to the cluster proves nothing, so
the attempt is repeated.

If the state HELD was never reached, the member is never reported as dead, because its address may be wrong. If the
member does not answer in time, it may hang or be cut off. In this case the request is sent again, and only missing
heartbeats can show that the member is lost. If the member is cut off in the state HELD without a closed connection (for
example, because its host loses power), this module does not detect this.
"""

import asyncio
import ssl
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus

from popgate.adapters.peers.connection import connect
from popgate.adapters.peers.heads import watch_head
from popgate.adapters.peers.identity import AnotherPeer, ForeignPeer
from popgate.adapters.peers.pool import address_parts
from popgate.ports.claims import Member

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.01, 0.5
"""Minimum and maximum pause in seconds after an attempt without a result. Each such attempt doubles the next pause."""


class _Outcome(Enum):
    LOST = auto()
    """The answer began, and the connection closed before the answer's end."""
    REFUSED = auto()
    ANOTHER = auto()
    """Another instance answered at the member's address."""
    LEFT = auto()
    UNKNOWN = auto()


class Watch:
    """Watches one member of the cluster. ``on_foreign`` is called when another program, or a proxy with another secret,
    is at its address. Raises: ValueError if the member's address is invalid."""

    def __init__(self, member: Member, context: ssl.SSLContext, on_foreign: Callable[[ForeignPeer], None]) -> None:
        self._host, self._port, authority = address_parts(member.address)
        self._instance, self._context, self._on_foreign = member.instance, context, on_foreign
        self._head = watch_head(authority, member.instance)
        self._was_held = False
        self._pause_seconds = PAUSE_SECONDS_MIN

    async def until_died(self) -> None:
        """Wait until the member has died, as ``HttpPeers.died`` describes."""
        while True:
            match await self._hold():
                case _Outcome.LOST:
                    # If the port refuses the next attempt, the member's process has ended. Pause before this attempt,
                    # because the port may close slightly later than the connection. The pause also prevents a busy loop
                    # if a network device closes every connection.
                    await asyncio.sleep(PAUSE_SECONDS_MIN)
                case _Outcome.REFUSED | _Outcome.ANOTHER if self._was_held:
                    return
                case _Outcome.LEFT:
                    await asyncio.get_running_loop().create_future()  # for ever, until this task is cancelled
                case _:
                    await asyncio.sleep(self._pause_seconds)
                    self._pause_seconds = min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)

    async def _hold(self) -> _Outcome:
        """Connect, send the request, wait until the answer or the connection ends, and return the outcome."""
        statuses: list[int] = []

        def on_head(status: int) -> None:
            statuses.append(status)
            if status == HTTPStatus.OK:
                self._was_held = True
                self._pause_seconds = PAUSE_SECONDS_MIN
                self._host = connection.peer_host  # other addresses of the host name may not lead to the member

        try:
            connection = await connect(self._host, self._port, self._context, self._instance, lambda _: None)
        except ConnectionRefusedError:
            return _Outcome.REFUSED
        except AnotherPeer:
            return _Outcome.ANOTHER
        except ForeignPeer as error:
            self._on_foreign(error)
            return _Outcome.UNKNOWN
        except OSError:
            return _Outcome.UNKNOWN
        try:
            answer = await connection.exchange(self._head, on_head=on_head)
        except ConnectionError as error:
            if isinstance(error, ForeignPeer):
                self._on_foreign(error)
            return _Outcome.LOST if statuses == [HTTPStatus.OK] else _Outcome.UNKNOWN
        finally:
            connection.close()
        if answer.status == HTTPStatus.OK:
            return _Outcome.LEFT
        return _Outcome.ANOTHER if answer.status == HTTPStatus.MISDIRECTED_REQUEST else _Outcome.UNKNOWN
