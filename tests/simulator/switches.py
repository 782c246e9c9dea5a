"""An admin who switches the consume mode there and back meanwhile, through any proxy, and asks again where it fails.

Every drain has time for all leases: so a switch breaks no promise, and the audit needs to know nothing of it. There are
no pull clients: while the mode is pull nobody gets anything.
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
"""Of all runs."""
PAUSE_SECONDS = 1.0, 9.0
DRAIN_SECONDS = 600.0
"""Longer than any run."""
ANSWER_SECONDS = 20.0
END_SECONDS, LOOK_SECONDS = 60.0, 0.5


class Switches:
    """Those of one run, in which there may be none. ``up``: the proxies that listen just now."""

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
        """For so long."""
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
            while not await self._ask(ConsumeMode.POP) or self._modes() != {ConsumeMode.POP}:  # noqa: ASYNC110  # of other processes
                await asyncio.sleep(LOOK_SECONDS)

    def _modes(self) -> set[ConsumeMode]:
        return {proxy.engine.topics.subscription(self._topic, self._group).spec.mode for proxy in self._up()}

    async def _ask(self, mode: ConsumeMode) -> bool:
        """Whether it was answered."""
        up = self._up()
        if not up:
            return False
        proxy = self._chance.choice(up)

        async def work() -> Answered[None]:
            await proxy.engine.topics.switch(self._topic, self._group, mode, DRAIN_SECONDS)
            return Answered(None)

        self._audit.mark(f"a switch to {mode} through {proxy.me}")
        try:
            await self._network.exchange(proxy.process, work, seconds=ANSWER_SECONDS, leave=lambda: None)
        except (PopgateError, OSError):
            return False
        self.count += 1
        return True
