"""All proxies of a run, by slots: each slot has one process at a time, which is restarted under a new name."""

import asyncio
from collections import Counter
from itertools import count

from popgate.domain.names import BrokerQueue, InstanceId
from simulator.proxy import Proxy, Servers

START_AGAIN_SECONDS = 0.5


class SimulatedCluster:
    """``proxies``: all since the start of the run. ``slots``: the proxy in each slot, None if it is empty."""

    def __init__(self, servers: Servers, slot_count: int) -> None:
        self.proxies: dict[InstanceId, Proxy] = {}
        self.slots: list[Proxy | None] = [None] * slot_count
        self._servers = servers
        self._starts = count(1)

    def up(self) -> list[Proxy]:
        """Return the proxies that listen, paused ones included."""
        return [proxy for proxy in self.slots if proxy is not None and proxy.is_up]

    async def start(self, slot: int) -> Proxy:
        """Start a proxy in a slot, and retry if it can't start, until it is up or killed."""
        while True:
            proxy = self.slots[slot] = Proxy(f"{chr(ord('a') + slot)}{next(self._starts)}", self._servers)
            self.proxies[proxy.me] = proxy
            proxy.process.spawn(proxy.start(), "start")
            while not proxy.is_up and not proxy.process.is_dead:  # noqa: ASYNC110  # it is another process
                await asyncio.sleep(0.01)
            if proxy.is_up or self.slots[slot] is not proxy:
                return proxy
            await asyncio.sleep(START_AGAIN_SECONDS)

    def bury(self) -> None:
        for proxy in self.proxies.values():
            proxy.process.bury()

    def unowned(self, queues: list[BrokerQueue]) -> str:
        """Return what is wrong with the ownership of queues, as all running proxies see it; empty if it is right."""
        for proxy in self.up():
            view = proxy.ownership.view
            if sorted(view.members) != sorted(one.me for one in self.up()):
                return f"{proxy.me} sees the members {sorted(view.members)}"
            held = Counter(view.owners.get(queue) for queue in queues)
            if None in held:
                return f"in {proxy.me}'s view {held[None]} queues have no owner"
            served = sorted(proxy.engine.hosting.served())
            if served != sorted(view.owned_by(proxy.me)):
                return f"{proxy.me} serves {served}, and owns {sorted(view.owned_by(proxy.me))}"
            shares = [held[member] for member in view.members]
            if max(shares) - min(shares) > 1:
                return f"the queues are shared unevenly: {shares}"
        return ""
