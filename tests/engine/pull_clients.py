"""Pull clients for tests that advance the clock."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from popgate.domain.names import ClientId
from popgate.domain.topics import ConsumeMode, Policy
from popgate.engine.lease.pop_request import Leased, Presence
from popgate.engine.pull.assigning import HeartbeatAnswer
from popgate.engine.pull.pulling import PullOrder
from support.engines import World, bodies

AnswerT = TypeVar("AnswerT")

BOTH = (ConsumeMode.POP, ConsumeMode.PULL)
SESSION_SECONDS = 10.0
STEP_SECONDS = 0.4
QUEUES = 4


class Client:
    """A client that follows its assignment, and settles nothing by itself."""

    def __init__(self, world: World, name: str = "a", topic: str = "p") -> None:
        self.world = world
        self.name = ClientId(name)
        self.topic = topic
        self.told: HeartbeatAnswer | None = None

    @property
    def queues(self) -> list[int]:
        return [] if self.told is None else self.told.queues

    @property
    def generation(self) -> int:
        assert self.told is not None
        return self.told.generation

    async def asks(self, supports: Sequence[ConsumeMode] = BOTH) -> HeartbeatAnswer:
        shown = None if self.told is None else self.told.generation
        self.told = await self.world.engine.pulls.heard(self.topic, "default", self.name, supports, shown)
        return self.told

    async def leaves(self) -> None:
        await self.world.engine.pulls.left(self.topic, "default", self.name)

    async def pull(
        self, count: int = 10, *, queue: int = 0, wait: float = 0.0, after: Leased | None = None
    ) -> list[Leased]:
        """Pull, advancing time if needed."""
        return await meanwhile(self.world, self.asks_for(count, queue=queue, wait=wait, after=after), wait + 5.0)

    async def asks_for(
        self, count: int = 10, *, queue: int = 0, wait: float = 0.0, after: Leased | None = None
    ) -> list[Leased]:
        order = PullOrder(
            client_id=self.name,
            generation=self.generation,
            max_messages=count,
            wait_seconds=wait,
            after=None if after is None else after.receipt_handle,
        )
        return await self.world.engine.pulls.pull(self.topic, "default", queue, order, Presence())

    async def pull_all(self, count: int, *, queue: int = 0, after: Leased | None = None) -> list[Leased]:
        """Pull exactly that many, which may come in several answers."""
        found: list[Leased] = []
        while len(found) < count:
            more = await self.pull(count - len(found), queue=queue, after=after, wait=1)
            assert more, f"{bodies(found)} came, and no more"
            found += more
            after = found[-1]
        return found

    async def commit(self, one: Leased) -> int:
        return await self.world.engine.pulls.commit(
            self.topic, "default", one.queue, self.name, self.generation, one.receipt_handle
        )


async def into_pull_mode(world: World, topic: str = "p", queues: int = 1, policy: Policy | None = None) -> None:
    await world.create(topic, queues=queues, policy=policy)
    await world.engine.changes.switch(topic, "default", ConsumeMode.PULL, 0.0)
    while world.served(topic).spec.mode is not ConsumeMode.PULL:  # nothing is leased
        await world.let_pass(0.1)


async def passes(world: World, seconds: float) -> None:
    """Advance time in steps too small to look like a sleeping process."""
    while seconds > 0:
        await world.let_pass(min(STEP_SECONDS, seconds))
        seconds -= STEP_SECONDS


async def meanwhile(world: World, work: Awaitable[AnswerT], seconds: float = 3.0) -> AnswerT:
    """Return the result of ``work``, which may wait for time to pass."""
    working = asyncio.ensure_future(work)
    for _ in range(int(seconds / STEP_SECONDS)):
        await world.settle_down(2)
        if working.done():
            break
        await world.let_pass(STEP_SECONDS)
    return await working


async def registered(world: World, *names: str, topic: str = "p") -> list[Client]:
    """Register clients; return once all queues have settled."""
    clients = [Client(world, name, topic) for name in names]
    for _ in range(4):
        for client in clients:
            await client.asks()
    return clients
