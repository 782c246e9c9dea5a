"""Warns of requests that take long, while they are in progress.

Theory of operation. From time to time, ``SlowRequests`` looks at all connections, and remembers which requests are
being carried out, and since which look. So a usual request costs nothing, and also a request that never ends is logged.
A request that waits for messages or for a lock is not being carried out, nor is one whose body has not arrived, or
whose client does not read the answer. A request is reported at the earliest after ``seconds``, and again whenever its
time has doubled. One that ends before it was seen for so long is not reported.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any, NamedTuple, Protocol, cast

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from popgate.api.connection import EXTENSION, Connection
from popgate.api.request_ids import given_request_id
from popgate.api.request_log import request_facts

_log = logging.getLogger(__name__)

LOOKS = 4
"""Number of looks in ``seconds``."""
LOOK_SECONDS_MIN, LOOK_SECONDS_MAX = 0.05, 5.0
AT_ONCE_MAX = 500
"""Maximum number of connections that are looked at in one turn of the event loop."""
REPORTED_MAX = 10
"""Maximum number of requests that are reported in one look. More are only counted."""


class ServedConnection(Protocol):
    """The part of uvicorn's protocol that is looked at. ``cycle`` is the latest request."""

    @property
    def cycle(self) -> RequestResponseCycle | None: ...


class _Seen(NamedTuple):
    """A request in progress: its cycle, when it was first seen, and after how many seconds it is reported next."""

    cycle: RequestResponseCycle
    since: float
    next_report: float


class SlowRequests:
    """Looks at the connections that ``connections`` returns. ``seconds``: requests that take longer are slow."""

    def __init__(
        self,
        connections: Callable[[], Collection[Any]],
        seconds: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._connections = connections
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[ServedConnection, _Seen] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        pause = min(max(self._seconds / LOOKS, LOOK_SECONDS_MIN), LOOK_SECONDS_MAX)
        while True:
            await asyncio.sleep(pause)
            await self.look()

    async def look(self) -> None:
        """Look at all connections once, and log the requests that are slow."""
        seen: dict[ServedConnection, _Seen] = {}
        slow: list[_Seen] = []
        connections: list[ServedConnection] = [*self._connections()]
        for number, connection in enumerate(connections):
            if number % AT_ONCE_MAX == AT_ONCE_MAX - 1:
                await asyncio.sleep(0)
            cycle = connection.cycle
            if cycle is None or not is_carried_out(cycle):
                continue
            now, last = self._clock(), self._seen.get(connection)
            if last is None or last.cycle is not cycle:
                seen[connection] = _Seen(cycle, now, self._seconds)
            elif now - last.since < last.next_report:
                seen[connection] = last
            else:
                seen[connection] = last._replace(next_report=2 * (now - last.since))
                slow.append(last)
        self._seen = seen
        self._report(slow)

    def _report(self, slow: list[_Seen]) -> None:
        now = self._clock()
        slow.sort(key=lambda one: one.since)
        for one in slow[:REPORTED_MAX]:
            facts = {**request_facts(one.cycle.scope), "seconds": round(now - one.since, 1)}
            if (request_id := given_request_id(one.cycle.scope["headers"])) is not None:
                facts["request_id"] = request_id
            _log.warning("a request takes long", extra=facts)
        if len(slow) > REPORTED_MAX:
            _log.warning("further requests take long", extra={"count": len(slow) - REPORTED_MAX})


def is_carried_out(cycle: RequestResponseCycle) -> bool:
    """Return whether popgate works on a request: it has arrived, it does not wait, and no answer was begun."""
    if cycle.more_body or cycle.response_started or cycle.disconnected:
        return False
    scope = cast("Mapping[str, Any]", cycle.scope)
    connection: Connection | None = scope["extensions"].get(EXTENSION)
    presence = None if connection is None else connection.presence
    return presence is None or presence.on_leave is None
