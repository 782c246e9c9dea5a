"""popgate looks only at the queues that could give more messages, and forgets none of them.

A state machine does all that opens, closes, fills, throttles and moves queues, with little memory. After each step,
``every_queue`` does for all other queues what popgate did for each queue before it had lists: nothing may happen. In
the end, every message must arrive.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Awaitable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine.every_queue import faults_of, watched
from engine.patience import away, patiently
from popgate.domain.errors import PopgateError, StateUnavailable
from popgate.domain.topics import ConsumeMode
from popgate.engine.lease.pop_request import Leased
from popgate.engine.queue.host import QueueHost
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, start_world, stop_world

T = TypeVar("T")

QUEUES = {"t": 2, "u": 4}
BUDGET_BYTES = 40_000
LONG_SECONDS, BRIEF_SECONDS, IDLE_SECONDS = 600.0, 5.0, 20.0
WAITING_MAX = 3
MEMORY = Path("/dev/shm")

TOPICS = st.sampled_from(sorted(QUEUES))
NUMBERS = st.integers(0, 11)
SIZES = st.lists(st.sampled_from([50, 500, 1_500, 3_000, 9_000]), min_size=1, max_size=12)


class LackingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="popgate-machine-", dir=MEMORY if MEMORY.is_dir() else None))
        self.runner = asyncio.Runner()
        self.stack = ExitStack()
        self.faults = self.stack.enter_context(watched())
        self.world: World | None = None
        self.published = 0
        self.expected: dict[str, set[str]] = {topic: set() for topic in QUEUES}
        self.leased: list[tuple[str, Leased]] = []
        self.waiting: list[tuple[str, asyncio.Task[list[Leased]]]] = []
        self.is_away: set[QueueHost] = set()

    @property
    def living(self) -> World:
        assert self.world is not None
        return self.world

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def work_and_rest() -> T:
            result = await work
            await self.living.settle_down()
            return result

        return self.runner.run(work_and_rest())

    def hosts(self, topic: str) -> Sequence[QueueHost]:
        return self.living.served(topic).hosts

    def host(self, topic: str, number: int) -> QueueHost:
        return self.hosts(topic)[number % QUEUES[topic]]

    @initialize(anonymous=st.sampled_from([False, False, True]))
    def start(self, anonymous: bool) -> None:
        async def begin() -> None:
            self.world = await start_world(
                self.folder,
                clock=ManualClock(),
                anonymous=anonymous,
                buffer_bytes_max=BUDGET_BYTES,
                idle_return_seconds=IDLE_SECONDS,
            )
            for topic, queues in QUEUES.items():
                await self.world.create(topic, queues=queues)

        self.runner.run(begin())

    # ------------------------------------------------------------ what clients do

    @rule(topic=TOPICS, sizes=SIZES)
    def publish(self, topic: str, sizes: list[int]) -> None:
        new = [f"{self.published + number} ".ljust(size, "x") for number, size in enumerate(sizes)]
        self.published += len(sizes)
        statuses = self.run(self.living.publish(topic, *new))
        self.expected[topic] |= {body for body, status in zip(new, statuses, strict=True) if status == "published"}

    @rule(topic=TOPICS, sizes=SIZES)
    def lease_all(self, topic: str, sizes: list[int]) -> None:
        """Lease for long, until pops find nothing and have raised the prefetch."""
        self.publish(topic, sizes)
        for _ in range(3):
            self.pop(topic, count=30, is_brief=False, waits=False)

    @rule(topic=TOPICS, count=st.sampled_from([1, 4, 30]), is_brief=st.booleans(), waits=st.booleans())
    def pop(self, topic: str, count: int, is_brief: bool, waits: bool) -> None:
        if waits and len(self.waiting) >= WAITING_MAX:
            return
        seconds = BRIEF_SECONDS if is_brief else LONG_SECONDS
        popping = self.living.pop(topic, count=count, invisibility=seconds, wait=15.0 if waits else 0.0)

        async def begin() -> None:
            self.waiting.append((topic, asyncio.ensure_future(popping)))

        self.run(begin())
        self._collect()

    def _collect(self) -> None:
        """Note what the pops that are done have leased."""
        for topic, popping in list(self.waiting):
            if popping.done():
                self.waiting.remove((topic, popping))
                with suppress(PopgateError):
                    self.leased += [(topic, one) for one in popping.result()]

    @rule(pick=NUMBERS, verb=st.sampled_from([Verb.ACK, Verb.ACK, Verb.RELEASE]), many=st.booleans())
    def settle(self, pick: int, verb: Verb, many: bool) -> None:
        if self.leased:
            place = pick % len(self.leased)
            for topic, one in [self.leased.pop(place) for _ in range(min(10 if many else 1, len(self.leased) - place))]:
                self.run(self._settle(verb, topic, one))

    async def _settle(self, verb: Verb, topic: str, one: Leased) -> None:
        with suppress(PopgateError):
            if await self.living.settle(verb, topic, [one]) == ["acked"]:
                self.expected[topic] -= set(bodies([one]))

    @rule(topic=TOPICS, sizes=SIZES, keeps=st.booleans())
    def keep(self, topic: str, sizes: list[int], keeps: bool) -> None:
        """Lease messages. Then keep their bodies in memory, as a lease group does whose slices are read, or stop it."""
        self.lease_all(topic, sizes)
        self._keep(topic, keeps=keeps)

    def _keep(self, topic: str, *, keeps: bool) -> None:
        for host in self.hosts(topic):
            for message in host.messages():
                (host.state.memory.keep if keeps else host.state.memory.unkeep)(message)

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 21.0]))
    def let_pass(self, seconds: float) -> None:
        self.run(self.living.let_pass(seconds))
        self._collect()

    # ------------------------------------------------------------ what else happens

    @rule(topic=TOPICS, number=NUMBERS)
    def lose_channel(self, topic: str, number: int) -> None:
        queue = self.living.queue(topic, number % QUEUES[topic])
        if queue in self.living.broker.channels:
            self.run(self.living.broker.lose(queue))

    @rule(times=st.integers(1, 4), call=st.sampled_from(["broker.consume", "channel.resize", "leases.claim"]))
    def fail(self, times: int, call: str) -> None:
        error = StateUnavailable("away", retry_after_seconds=0.001) if call == "leases.claim" else away()
        self.living.faults.fail(call, error, times=times)

    @rule(topic=TOPICS, number=NUMBERS)
    def overtake(self, topic: str, number: int) -> None:
        """Claim a queue as another proxy would. The engine notices it later, and claims the queue again."""
        self.run(self._attempt(self.living.leases.wrapped.claim(self.host(topic, number).broker_queue)))

    @rule(topic=TOPICS, number=NUMBERS, is_told=st.booleans())
    def lose_queue(self, topic: str, number: int, is_told: bool) -> None:
        """Give a queue to another proxy, before it takes it or because it has taken it."""
        host, served = self.host(topic, number), self.living.served(topic)
        self.is_away.add(host)

        async def give() -> None:
            if is_told:
                await served.hand_over(host)
            else:
                served.lose(host)

        self.run(give())

    @rule()
    def take_queues(self) -> None:
        for topic in QUEUES:
            for host in self.hosts(topic):
                if host in self.is_away:
                    self.run(self._attempt(self.living.served(topic).take(host)))
        self.is_away = {host for host in self.is_away if not host.is_owned}

    async def _attempt(self, work: Awaitable[object]) -> None:
        with suppress(PopgateError):
            await work

    @rule(topic=TOPICS, paused=st.booleans())
    def pause(self, topic: str, paused: bool) -> None:
        self.run(self.living.engine.changes.pause_group(topic, "default", paused=paused))

    @rule(topic=TOPICS, mode=st.sampled_from([ConsumeMode.POP, ConsumeMode.PULL]))
    def switch(self, topic: str, mode: ConsumeMode) -> None:
        self.run(self._attempt(self.living.engine.changes.switch(topic, "default", mode, 0.0)))

    @rule(topic=TOPICS, is_declared=st.booleans())
    def delete(self, topic: str, is_declared: bool) -> None:
        """Delete the queues as an administrator may do."""
        self.expected[topic].clear()
        self.run(self.living.broker.wrapped.delete_group(self.living.served(topic).layout))
        if is_declared:
            self.declare(topic)

    @rule(topic=TOPICS)
    def declare(self, topic: str) -> None:
        self.run(self._attempt(self.living.engine.changes.put_group(topic, "default", None)))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def no_queue_is_forgotten(self) -> None:
        if self.world is None:
            return

        async def look() -> None:  # in the event loop, because a resize would begin there
            for topic in QUEUES:
                served = self.living.served(topic)
                served.group.constrained()
                self.faults.extend(faults_of(served.hosts, vars(served.group)["_lacking"]))

        self.runner.run(look())
        assert not self.faults
        assert not self.living.failures

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self._drain()
                self.runner.run(stop_world(self.world))
            assert not self.faults
        finally:
            self.stack.close()
            self.runner.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _drain(self) -> None:
        self.living.faults.heal()
        self.take_queues()
        for topic in QUEUES:
            self.declare(topic)
            self.switch(topic, ConsumeMode.POP)
            self.pause(topic, paused=False)
            self._keep(topic, keeps=False)
        for _ in range(3):
            self.run(self.living.let_pass(LONG_SECONDS))
        self._collect()
        for topic in QUEUES:
            while self.expected[topic]:
                found = self.run(self._pop_patiently(topic))
                assert found, f"{len(self.expected[topic])} messages of {topic} do not arrive"
                for one in found:
                    self.run(self._settle(Verb.ACK, topic, one))

    async def _pop_patiently(self, topic: str) -> list[Leased]:
        popping = self.living.pop(topic, count=30, wait=20.0, invisibility=LONG_SECONDS)
        return await patiently(self.living, asyncio.ensure_future(popping))


def test_no_queue_that_could_give_messages_is_forgotten(*, full_run: bool) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    examples = 800 if full_run else 40
    run_state_machine_as_test(
        LackingMachine,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
