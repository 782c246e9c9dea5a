"""Pulls of one queue against a plain model, in any order of events: a seed repeats its run."""

import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

from engine.pull_clients import AnswerT, Client, into_pull_mode, meanwhile, passes
from popgate.domain.errors import RetryLater, StateUnavailable
from popgate.engine.lease.pop_request import Leased
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import World, body_of, open_world

pytestmark = pytest.mark.usefixtures("no_company")

SEEDS, SEEDS_FULL = 5, 150
STEPS = 60
TRIES = 20
FAULTS = ("leases.grant", "leases.settle.ack", "leases.settle.release", "leases.peek", "assignments.write")


class Run:
    """One queue, the messages sent to it, and two clients, one of which has the queue."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._sent: list[str] = []
        """In the order of the queue, without rejected messages."""
        self._done = 0
        """Number of messages, from the first on, that are committed."""
        self._seen: list[Leased] = []
        """What the holder has seen and not committed, in order."""
        self._next = 0
        self._clients = [Client(world, name) for name in "ab"]
        self._holder: Client | None = None

    async def begin(self) -> None:
        await self._ask()

    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        often = [self._publish, self._pull, self._pull_on, self._commit, self._pull, self._commit]
        return [*often, self._reject, self._restart, self._leave, self._die, self._lose_channel, self._fault]

    async def finish(self) -> None:
        """Check that every message sent comes once more, and nothing else."""
        self._world.faults.heal()
        await self._restart()
        while self._done < len(self._sent):
            before = self._done
            await self._pull()
            await self._commit_through(len(self._seen))
            assert self._done > before, f"{self._sent[before]} does not come"
        assert not await self._pulled(None, 10)

    async def _publish(self) -> None:
        bodies = [f"{self._next + number:05}" for number in range(self._chance.randint(1, 6))]
        self._next += len(bodies)
        await self._world.publish("p", *bodies)
        self._sent += bodies

    async def _pull(self) -> None:
        """Pull from the first uncommitted message."""
        got = await self._pulled(None, self._chance.randint(1, 8))
        seen = [body_of(one.message) for one in got]
        assert seen == self._sent[self._done : self._done + len(seen)]
        assert seen or self._done == len(self._sent)
        if len(got) > len(self._seen):
            self._seen = got

    async def _pull_on(self) -> None:
        """Pull what follows the messages already seen."""
        if self._seen:
            got = await self._pulled(self._seen[-1], self._chance.randint(1, 8))
            seen = [body_of(one.message) for one in got]
            first = self._done + len(self._seen)
            assert seen == self._sent[first : first + len(seen)]
            self._seen += got

    async def _commit(self) -> None:
        if self._seen:
            await self._commit_through(self._chance.randint(1, len(self._seen)))

    async def _commit_through(self, count: int) -> None:
        if count:
            holder = self._holder
            assert holder is not None
            await self._surely(lambda: holder.commit(self._seen[count - 1]), by=holder)
            del self._seen[:count]
            self._done += count

    async def _reject(self) -> None:
        if self._seen:
            one = self._chance.randrange(len(self._seen))
            lease = self._seen[one]
            rejecting = partial(self._world.settle, Verb.REJECT, "p", [lease])
            while (await self._surely(rejecting, by=self._holder)) == ["unavailable"]:
                await passes(self._world, 0.4)
            del self._seen[one], self._sent[self._done + one]

    async def _restart(self) -> None:
        """Restart the holder, which loses everything it had."""
        assert self._holder is not None
        self._holder.told = None
        await self._ask()

    async def _leave(self) -> None:
        holder = self._holder
        assert holder is not None
        await self._surely(holder.leaves)
        await self._ask(but=holder)

    async def _die(self) -> None:
        """Keep the holder silent for longer than its session lasts."""
        holder = self._holder
        assert holder is not None
        for _ in range(15):
            await passes(self._world, 1.0)
            await self._ask(but=holder, whatever=True)
        await self._ask(but=holder)

    async def _lose_channel(self) -> None:
        queue = self._world.queue("p")
        if queue in self._world.broker.channels:
            await self._world.broker.lose(queue)

    async def _fault(self) -> None:
        call, after = self._chance.choice(FAULTS), self._chance.random() < 0.5
        self._world.faults.fail(call, StateUnavailable("away"), after=after, times=self._chance.randint(1, 2))

    async def _ask(self, but: Client | None = None, *, whatever: bool = False) -> None:
        """Let all clients but the silent one ask, until one of them has the queue."""
        holders: list[Client] = []
        for _ in range(TRIES):
            asking = [client for client in self._clients if client is not but]
            for client in asking:
                await self._surely(client.asks)
            holders = [client for client in asking if client.queues]
            assert len(holders) <= 1
            if holders or whatever:
                break
            await passes(self._world, 1.0)
        if whatever and not holders:
            return
        (self._holder,) = holders
        if but is not None and not whatever:
            but.told = None
        self._seen = []

    async def _pulled(self, after: Leased | None, count: int) -> list[Leased]:
        holder = self._holder
        assert holder is not None
        return await self._surely(lambda: holder.pull(count, wait=1.0, after=after), by=holder)

    async def _surely(self, work: Callable[[], Awaitable[AnswerT]], by: Client | None = None) -> AnswerT:
        """Repeat the request until it is answered; its client sends heartbeats meanwhile."""
        for _ in range(TRIES):
            try:
                if by is not None:
                    await by.asks()
                return await meanwhile(self._world, work())
            except RetryLater:
                await passes(self._world, 0.4)
        return await work()


async def test_what_is_pulled_is_what_is_not_committed_in_order_whatever_happens(
    folder: Path, seed: int, full_run: bool
) -> None:
    for number in range(SEEDS_FULL if full_run else SEEDS):
        one = f"{seed}-{number}"
        chance = random.Random(one)
        async with open_world(folder / one, clock=ManualClock()) as world:
            await into_pull_mode(world)
            run = Run(world, chance)
            try:
                await run.begin()
                for _ in range(STEPS):
                    await chance.choice(run.steps())()
                await run.finish()
            except Exception as error:
                error.add_note(f"the run of {one}")
                raise
