"""An admin who keeps switching the consume mode during a run, through any proxy, and retries failed requests.

Every drain is long enough for all leases, so a switch breaks no promise, and the audit can ignore it. There are no pull
clients: while the mode is pull, no client gets anything.
"""

import asyncio
import random
from collections.abc import Callable, Sequence

from popgate.domain.errors import PopgateError
from popgate.domain.topics import ConsumeMode
from simulator.network import Answered, Network
from simulator.proxy import Proxy
from support.audit import Audit

SHARE = 0.4
"""Share of all runs that switch modes."""
PAUSE_SECONDS = 1.0, 9.0
DRAIN_SECONDS = 600.0
"""Drain time in seconds; longer than any run."""
ANSWER_SECONDS = 20.0
END_SECONDS, LOOK_SECONDS = 60.0, 0.5


class Switches:
    """The switches of one run, which may have none. ``up``: the proxies that listen at the moment."""

    def __init__(
        self,
        topic: str,
        group: str,
        up: Callable[[], Sequence[Proxy]],
        network: Network,
        audit: Audit,
        chance: random.Random,
    ) -> None:
        self.count = 0
        self._topic = topic
        self._group = group
        self._up = up
        self._network = network
        self._audit = audit
        self._chance = chance
        self._are_done = chance.random() < SHARE

    async def disturb(self, seconds: float) -> None:
        """Switch modes for that long."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while self._are_done and (rest := until - loop.time()) > 0:
            await asyncio.sleep(min(rest, self._chance.uniform(*PAUSE_SECONDS)))
            await self._ask(self._chance.choice((ConsumeMode.PULL, ConsumeMode.POP)))

    async def end(self) -> None:
        """Return once all proxies serve pops. Raises: TimeoutError."""
        if not self._are_done:
            return
        async with asyncio.timeout(END_SECONDS):
            while not await self._ask(ConsumeMode.POP) or self._modes() != {ConsumeMode.POP}:  # noqa: ASYNC110  # in other processes
                await asyncio.sleep(LOOK_SECONDS)

    def _modes(self) -> set[ConsumeMode]:
        return {proxy.engine.topics.subscription(self._topic, self._group).spec.mode for proxy in self._up()}

    async def _ask(self, mode: ConsumeMode) -> bool:
        """Tell whether the request was answered."""
        up = self._up()
        if not up:
            return False
        proxy = self._chance.choice(up)

        async def work() -> Answered[None]:
            await proxy.engine.changes.switch(self._topic, self._group, mode, DRAIN_SECONDS)
            return Answered(None)

        self._audit.mark(f"a switch to {mode} through {proxy.me}")
        try:
            await self._network.exchange(proxy.process, work, seconds=ANSWER_SECONDS, leave=lambda: None)
        except (PopgateError, OSError):
            return False
        self.count += 1
        return True
