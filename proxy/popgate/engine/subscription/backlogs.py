"""Reads the backlogs of the queues that this proxy owns from the broker, in the background, for /metrics.

A scrape never waits for the broker: it gets the latest reading. A proxy reads only its own queues, so that the sum over
all proxies of a cluster is right. The pause between two rounds grows with the time that a round needs, so that many
queues don't load the broker and the proxy.

RabbitMQ does not tell how old the messages are that a new owner finds in its queues. So the owner reads the first
messages of such queues into memory once, as if a client had asked, and then remembers their age (``WaitingSince``).
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from popgate.domain.errors import BrokerUnavailable, PopgateError
from popgate.domain.names import Subscription
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.subscription.counting import Backlog, backlog_here
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.runtime.logs import OnceLogger

_log = logging.getLogger(__name__)

PAUSE_SECONDS_MAX = 60.0
"""Maximum seconds between two rounds, unless the minimum is longer."""
SHARE_MAX = 0.05
"""Maximum share of the time in which backlogs are read, while the pause is below its maximum."""
READ_HEADS_MAX = 4
"""Maximum number of subscriptions in one round whose first messages are read to learn their age, because each of them
opens channels."""


class Backlogs:
    """The latest reading of each subscription with queues that this proxy owns.

    ``served`` returns the subscriptions that this proxy serves.
    """

    def __init__(self, context: EngineContext, served: Callable[[], Mapping[Subscription, ServedSubscription]]) -> None:
        self._context = context
        self._served = served
        self._read: dict[Subscription, Backlog] = {}
        self._read_at = context.clock.monotonic()
        self._unread = OnceLogger(_log, "the backlog of a group can't be read: the metrics show an older one")

    def of(self, name: Subscription) -> Backlog | None:
        """Return the latest reading of a subscription; None if this proxy owns no queue of it, or has not read yet."""
        return self._read.get(name)

    @property
    def age_seconds(self) -> float:
        """Seconds since the begin of the latest complete round. It grows while the broker can't be reached."""
        return self._context.clock.monotonic() - self._read_at

    async def run(self, pause_seconds: float) -> None:
        """Read until cancelled, with pauses of at least ``pause_seconds`` between two rounds."""
        while True:
            began = self._context.clock.monotonic()
            if await self.look():
                self._read_at = began
            pause = min((self._context.clock.monotonic() - began) / SHARE_MAX, PAUSE_SECONDS_MAX)
            await asyncio.sleep(max(pause_seconds, pause) * random.uniform(1.0, 1.2))

    async def look(self) -> bool:
        """Read all backlogs once. Return whether this succeeded."""
        complete, heads_left = True, READ_HEADS_MAX
        for name, served in list(self._served().items()):
            await asyncio.sleep(0)  # the embedded store answers at once
            try:
                found = await backlog_here(self._context, served.group, served.dead_letters)
            except BrokerUnavailable:
                return False
            except PopgateError as error:
                self._unread.warn(f"{name.topic}:{name.group}", error.detail)
                complete = False
                continue
            if found is None:
                self._read.pop(name, None)
            else:
                self._read[name] = found
                if found.is_guessed and heads_left:
                    heads_left -= served.read_heads()
        for name in self._read.keys() - self._served().keys():
            del self._read[name]
        return complete
