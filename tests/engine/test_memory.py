"""Memory runs short: bodies of leased messages are dropped and fetched again, and buffered messages return to the
broker.

The clock stands still unless a test advances it, so a parked pop ends only with messages: if one starves, or waits for
memory that is never freed, its test never ends.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from string import ascii_letters

import pytest

from popgate.domain.message import Message
from popgate.domain.topics import Policy, RetryPolicy
from popgate.engine.lease.pop_request import Leased
from popgate.engine.publish.publishing import NewMessage
from popgate.engine.queue.buffered import MessageState
from popgate.engine.queue.flow import Flow
from popgate.engine.settle.orders import Verb
from popgate.runtime.clocks import ManualClock
from support.engines import PATIENCE_SECONDS, World, crash, open_world, start_world, stop_world

KIB = 1024
BUDGET = 512 * KIB
BODY = 32 * KIB
MUCH = 64 * 1024 * KIB
"""A budget that drops nothing."""
LEASE_SECONDS = 30.0
LONG_SECONDS = 600.0


# ---------------------------------------------------------------- what a body that was dropped is good for


async def test_a_message_whose_body_was_dropped_comes_again_after_its_lease_expires(folder: Path) -> None:
    async with small_world(folder) as world:
        leased = await lease_more_than_fits(world)
        await world.let_pass(LEASE_SECONDS)
        await expect_again(world, leased)


async def test_a_message_whose_body_was_dropped_comes_again_after_a_release(folder: Path) -> None:
    async with small_world(folder) as world:
        leased = await lease_more_than_fits(world)
        assert await world.settle(Verb.RELEASE, "t", leased, seconds=0.0) == ["released"] * len(leased)
        await expect_again(world, leased)


async def test_a_message_whose_body_was_dropped_comes_again_after_a_release_with_a_delay(folder: Path) -> None:
    async with small_world(folder) as world:
        leased = await lease_more_than_fits(world)
        assert await world.settle(Verb.RELEASE, "t", leased, seconds=10.0) == ["released"] * len(leased)
        await world.let_pass(9.0)
        assert await world.pop("t") == []
        await world.let_pass(1.0)
        await expect_again(world, leased)


@pytest.mark.parametrize("released", [False, True])
async def test_a_message_whose_body_was_dropped_comes_again_after_a_retry_back_off(
    folder: Path, released: bool
) -> None:
    async with small_world(folder, policy=Policy(retry=RetryPolicy(initial_seconds=10.0))) as world:
        leased = await lease_more_than_fits(world)
        if released:
            assert await world.settle(Verb.RELEASE, "t", leased) == ["released"] * len(leased)
        else:
            await world.let_pass(LEASE_SECONDS)
        await world.let_pass(9.0)
        assert await world.pop("t") == []
        await world.let_pass(1.0)
        await expect_again(world, leased)


async def test_a_message_whose_body_was_dropped_is_dead_lettered_whole_after_its_last_lease(folder: Path) -> None:
    async with small_world(folder, policy=Policy(max_deliveries=1)) as world:
        leased = await lease_more_than_fits(world)
        await world.let_pass(LEASE_SECONDS)
        assert await world.pop("t") == []
        await expect_dead(world, leased)
        await expect_nothing_left(world)


async def test_a_rejected_message_whose_body_was_dropped_is_dead_lettered_whole(folder: Path) -> None:
    async with small_world(folder) as world:
        leased = await lease_more_than_fits(world)
        for one in leased:
            assert await world.settle(Verb.REJECT, "t", [one], reason="bad") == ["rejected"]
        await expect_dead(world, leased)
        await expect_nothing_left(world)


async def test_an_unidentified_message_is_dead_lettered_whole_where_memory_is_short(folder: Path) -> None:
    """Its body is never dropped, because fetching it again would end its lease."""
    async with open_world(folder / "data", clock=ManualClock(), anonymous=True, buffer_bytes_max=BUDGET) as world:
        await world.create("t")
        await publish(world, range(12))
        leased = await lease(world, 12)
        assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"] * 12
        await expect_dead(world, leased)


async def test_more_rejections_at_once_than_fit_into_the_budget_are_all_dead_lettered(folder: Path) -> None:
    async with small_world(folder) as world:
        leased = await lease_more_than_fits(world)
        assert await world.settle(Verb.REJECT, "t", leased) == ["rejected"] * len(leased)
        await expect_dead(world, leased)
        await expect_nothing_left(world)


async def test_a_rejection_does_not_wait_for_memory_that_ready_messages_fill(folder: Path) -> None:
    async with small_world(folder) as world:
        (one,) = await lease_before_a_full_buffer(world)
        assert await world.settle(Verb.REJECT, "t", [one]) == ["rejected"]
        await expect_dead(world, [one])
        assert numbers(await lease(world, 39)) == list(range(65, 104)), "nor do the pops behind it"


@pytest.mark.parametrize("crashed", [False, True])
async def test_a_repeated_pop_gets_its_messages_whole_though_their_bodies_were_dropped(
    folder: Path, crashed: bool
) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock, buffer_bytes_max=BUDGET)
    await world.create("t")
    first = await lease_by_attempt(world, "a")
    await lease(world, 4)
    if crashed:
        await crash(world, folder / "data", folder / "copy")
        world = await start_world(folder / "copy", clock=clock, buffer_bytes_max=BUDGET)
    again = await world.pop("t", count=9, wait=20, attempt="a")
    assert numbers(again) == numbers(first)
    assert [one.receipt_handle for one in again] == [one.receipt_handle for one in first]
    assert [one.delivery_count for one in again] == [1] * len(first)
    assert await world.settle(Verb.ACK, "t", again) == ["acked"] * len(first)
    await stop_world(world)
    assert not world.failures


async def test_a_repeated_pop_that_outlives_a_channel_gets_all_of_its_messages(folder: Path) -> None:
    async with small_world(folder) as world:
        first = await lease_by_attempt(world, "a")
        again = asyncio.ensure_future(world.pop("t", count=9, wait=20, attempt="a"))
        (host,) = world.served("t").hosts
        while not host.state.memory.wanted:
            assert not again.done(), "nothing was missing"
            await asyncio.sleep(0)
        await world.broker.lose(world.queue("t"))
        await world.let_pass(1.0)  # the pause before the queue is opened again
        assert numbers(await again) == numbers(first)


async def test_a_repeated_pop_does_not_wait_for_memory_that_ready_messages_fill(folder: Path) -> None:
    async with small_world(folder) as world:
        first = await lease_before_a_full_buffer(world, attempt="a")
        again = await world.pop("t", attempt="a")
        assert numbers(again) == numbers(first)
        assert [one.receipt_handle for one in again] == [one.receipt_handle for one in first]
        assert numbers(await lease(world, 39)) == list(range(65, 104)), "nor do the pops behind it"


async def test_a_repeated_pop_leaves_room_for_the_pops_behind_it(folder: Path) -> None:
    async with small_world(folder) as world:
        first = await lease_by_attempt(world, "a")
        again = await world.pop("t", count=9, wait=20, attempt="a")
        assert numbers(again) == numbers(first)
        behind = await lease(world, 16)
        assert numbers(behind) == list(range(24, 40))


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize("budget", [BUDGET, MUCH])
async def test_more_leases_than_the_first_window_after_a_restart_do_not_starve_what_is_behind(
    folder: Path, budget: int
) -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock, buffer_bytes_max=budget)
    await world.create("t")
    await publish(world, range(43), size=100)
    leased = await lease(world, 40, invisibility=LONG_SECONDS)
    await crash(world, folder / "data", folder / "copy")
    async with open_world(folder / "copy", clock=clock, buffer_bytes_max=budget) as risen:
        behind = await lease(risen, 3)
        assert numbers(behind) == [40, 41, 42]
        assert risen.broker.channels[risen.queue("t")].prefetches[0] < len(leased), "the test needs more leases"
        assert await risen.settle(Verb.ACK, "t", [*leased, *behind]) == ["acked"] * 43
        await expect_nothing_left(risen)


async def test_leases_larger_than_the_budget_pass_through_it_after_a_restart(folder: Path, peak: "Peak") -> None:
    clock = ManualClock()
    world = await start_world(folder / "data", clock=clock, buffer_bytes_max=MUCH)
    await world.create("t")
    await publish(world, range(50))
    leased = await lease(world, 40, invisibility=LONG_SECONDS)
    assert sum(len(one.message.body) for one in leased) > 2 * BUDGET
    await crash(world, folder / "data", folder / "copy")
    peak.forget()
    async with open_world(folder / "copy", clock=clock, buffer_bytes_max=BUDGET) as risen:
        behind = await lease(risen, 10, invisibility=LONG_SECONDS)
        assert numbers(behind) == list(range(40, 50))
        await risen.let_pass(LONG_SECONDS)
        again = [*await lease(risen, 25), *await lease(risen, 25)]
        assert sorted(numbers(again)) == list(range(50))
        assert {one.delivery_count for one in again} == {2}
        assert await risen.settle(Verb.ACK, "t", again) == ["acked"] * 50
        await expect_nothing_left(risen)
        assert peak.bytes <= 2 * BUDGET, "the budget, and one window of bodies, which is within the budget too"


# ---------------------------------------------------------------- the budget


async def test_a_message_larger_than_the_whole_budget_is_popped_and_acked(folder: Path) -> None:
    async with small_world(folder) as world:
        sizes = [KIB, 2 * BUDGET, KIB, 3 * BUDGET, 3 * BUDGET, KIB]
        for number, size in enumerate(sizes):
            await publish(world, [number], size=size)
        leased = await lease(world, len(sizes))
        assert numbers(leased) == list(range(len(sizes)))
        await world.let_pass(LEASE_SECONDS)
        await expect_again(world, leased)


async def test_large_messages_that_a_window_for_small_ones_let_in_go_back_and_come_again_in_order(
    folder: Path, peak: "Peak"
) -> None:
    async with small_world(folder) as world:
        first = await lease_before_a_full_buffer(world)
        assert peak.bytes > BUDGET, "otherwise nothing had to go back"
        assert held_bytes(world) <= BUDGET
        leased = [*first, *await lease(world, 39)]
        assert numbers(leased) == list(range(64, 104))
        assert await world.settle(Verb.ACK, "t", leased) == ["acked"] * 40
        await expect_nothing_left(world)


@pytest.mark.parametrize("full", [False, True])
async def test_when_nobody_asks_all_bodies_go_back_and_come_again_in_order(folder: Path, full: bool) -> None:
    async with small_world(folder) as world:
        if full:
            leased = await lease_before_a_full_buffer(world, invisibility=LONG_SECONDS)
        else:
            await publish(world, range(40))
            leased = await lease(world, 12, invisibility=LONG_SECONDS)
        await world.settle_down()
        assert MessageState.READY in {held.state for held in world.served("t").hosts[0].messages()}
        stored = (await world.engine.status("t", "default")).ready
        await world.let_pass(29.0)
        assert held_bytes(world) > 0
        await world.let_pass(1.0)
        assert held_bytes(world) == 0
        (depth,) = await world.broker.depth([world.queue("t")])
        assert depth.ready == stored + len(leased)
        assert depth.consumers == 0
        following = await lease(world, stored, invisibility=LONG_SECONDS)
        last = numbers(leased)[-1]
        assert numbers(following) == list(range(last + 1, last + 1 + stored))
        assert {one.delivery_count for one in following} == {1}
        everything = [*leased, *following]
        assert await world.settle(Verb.ACK, "t", everything) == ["acked"] * len(everything)
        await expect_nothing_left(world)


async def test_a_queue_whose_share_shrinks_below_its_leases_still_serves_pops(folder: Path) -> None:
    async with small_world(folder) as world:
        await publish(world, range(60))
        before = await lease(world, 10)
        await world.create("u", queues=7)
        await publish(world, range(7), size=100, topic="u")
        await lease(world, 7, topic="u")
        behind = await lease(world, 50)
        assert numbers([*before, *behind]) == list(range(60))


async def test_a_window_is_widened_when_its_credit_is_used_up_and_not_before(folder: Path) -> None:
    async with open_world(folder / "data", clock=ManualClock(), buffer_bytes_max=MUCH) as world:
        await world.create("t")
        prefetches = world.broker.channels
        await publish(world, range(3), size=100)
        assert len(await lease(world, 3, invisibility=LONG_SECONDS)) == 3
        waiting = asyncio.ensure_future(world.pop("t", wait=20))
        await world.settle_down()
        (first,) = prefetches[world.queue("t")].prefetches
        await publish(world, range(3, first + 9), size=100)
        assert len(await waiting) == 1
        assert len(await lease(world, first + 5, invisibility=LONG_SECONDS)) == first + 5
        assert prefetches[world.queue("t")].prefetches[1] > first


async def test_queues_of_one_topic_share_the_budget(folder: Path) -> None:
    async with small_world(folder, queues=4) as world:
        await publish(world, range(64))
        leased = await lease(world, 64)
        assert sorted(numbers(leased)) == list(range(64))
        assert 0 < held_bytes(world) <= BUDGET // 2, "no queue keeps leased bodies beyond half of its share"
        await world.let_pass(LEASE_SECONDS)
        await expect_again(world, leased)


@pytest.mark.parametrize("queues", [1, 4])
async def test_a_backlog_of_twenty_budgets_is_drained_once_and_within_the_budget(
    folder: Path, peak: "Peak", seed: int, queues: int
) -> None:
    """Four clients ack, release at once or later, and let expire; the seed alone decides about each hand-out.

    The bound is twice the budget: each queue may exceed its share by one window, and a window holds at most a share of
    bodies of recent sizes, which adapt to large ones immediately and to small ones slowly.
    """
    chance = random.Random(seed)
    sizes: list[int] = []
    while sum(sizes) < 20 * BUDGET:
        sizes.append(chance.randint(100, 2 * BODY))
    async with small_world(folder, queues=queues) as world:
        for number, size in enumerate(sizes):
            await publish(world, [number], size=size)
        ledger = Ledger(world, len(sizes))
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as group:
            clients = [group.create_task(ledger.work(random.Random(f"{seed} {name}"))) for name in range(4)]
            while not all(client.done() for client in clients):
                await world.let_pass(0.5)
        assert ledger.acked == set(range(len(sizes)))
        assert ledger.again > 0
        await expect_nothing_left(world)
    assert BUDGET // 2 < peak.bytes <= 2 * BUDGET


class Ledger:
    """Records what clients got and did. A duplicate or uncounted hand-out fails its client."""

    def __init__(self, world: World, total: int) -> None:
        self.acked: set[int] = set()
        self.again = 0
        self._world = world
        self._total = total
        self._counts = dict.fromkeys(range(total), 0)
        self._leased_until: dict[int, float] = {}

    async def work(self, chance: random.Random) -> None:
        """Run a client that pops until everything is acked."""
        while len(self.acked) < self._total:
            for one in await self._world.pop("t", count=chance.randint(1, 8), wait=5, invisibility=20):
                await self._handle(one)

    async def _handle(self, one: Leased) -> None:
        number = number_of(one.message)
        assert number not in self.acked
        assert self._leased_until.get(number, 0.0) <= self._world.clock.wall()
        self._counts[number] += 1
        assert one.delivery_count == self._counts[number]
        self.again += one.delivery_count > 1
        fate = random.Random(f"{number} {one.delivery_count}").random()
        if fate < 0.6 or one.delivery_count == 6:
            assert await self._world.settle(Verb.ACK, "t", [one]) == ["acked"]
            self.acked.add(number)
        elif fate < 0.8:
            delay = 0.0 if fate < 0.7 else 3.0
            self._leased_until[number] = self._world.clock.wall() + delay
            assert await self._world.settle(Verb.RELEASE, "t", [one], seconds=delay) == ["released"]
        else:
            self._leased_until[number] = one.invisible_until


# ---------------------------------------------------------------- how


class Peak:
    """The most bytes of bodies that were held at a time, over all queues."""

    def __init__(self) -> None:
        self.bytes = 0
        self._supplies: set[Flow] = set()

    def look(self, supply: Flow) -> None:
        self._supplies.add(supply)
        self.bytes = max(self.bytes, sum(each.held_bytes for each in self._supplies))

    def forget(self) -> None:
        self.bytes = 0
        self._supplies.clear()


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> Peak:
    """Update the peak whenever a body arrives, because memory grows only then."""
    watch, took = Peak(), Flow.took

    def took_and_looked(supply: Flow, tag: int, size: int) -> None:
        took(supply, tag, size)
        watch.look(supply)

    monkeypatch.setattr(Flow, "took", took_and_looked)
    return watch


@asynccontextmanager
async def small_world(folder: Path, *, queues: int = 1, policy: Policy | None = None) -> AsyncGenerator[World]:
    """A topic `t`, and a budget of sixteen bodies of the usual size."""
    async with open_world(folder / "data", clock=ManualClock(), buffer_bytes_max=BUDGET) as world:
        await world.create("t", queues=queues, policy=policy)
        yield world


def body(number: int, size: int) -> bytes:
    """Return a body that contains its number and length, and differs from all others throughout."""
    return f"{number}/{size}/".encode().ljust(size, ascii_letters[number % len(ascii_letters)].encode())


def number_of(message: Message) -> int:
    """Return the message's number. Raises: AssertionError if its body is not the published one."""
    number, size, _ = message.body.split(b"/")
    assert message.body == body(int(number), int(size))
    assert message.message_id == f"m{int(number)}"
    return int(number)


def numbers(leased: Iterable[Leased]) -> list[int]:
    return [number_of(one.message) for one in leased]


async def publish(world: World, which: Iterable[int], *, size: int = BODY, topic: str = "t") -> None:
    new = [NewMessage(body(number, size), {}, message_id=f"m{number}") for number in which]
    assert {result.status for result in await world.engine.publish(topic, new)} == {"published"}


async def lease(world: World, total: int, *, topic: str = "t", invisibility: float | None = None) -> list[Leased]:
    """Lease exactly that many messages, by successive parked pops."""
    leased: list[Leased] = []
    while len(leased) < total:
        popped = await world.pop(topic, count=total - len(leased), wait=20, invisibility=invisibility)
        assert popped, "no time has passed, so a parked pop has no reason to give up"
        leased += popped
    return leased


async def lease_more_than_fits(world: World) -> list[Leased]:
    """Lease messages with twice the budget's bytes, for LEASE_SECONDS; the bodies of most of them were dropped."""
    await publish(world, range(32))
    leased = await lease(world, 32)
    assert numbers(leased) == list(range(32))
    assert sum(is_dropped(world, one) for one in leased) > 16
    assert held_bytes(world) <= BUDGET // 2
    return leased


async def lease_by_attempt(world: World, attempt: str) -> list[Leased]:
    """Lease messages 20 to 23 by one pop, three quarters of the budget: half of their bodies were dropped.

    Messages of the same size are behind them.
    """
    await publish(world, range(20), size=100)
    small = await lease(world, 20)  # so that the window is wide enough
    assert await world.settle(Verb.ACK, "t", small) == ["acked"] * 20
    await publish(world, range(20, 24), size=3 * BODY)
    await world.settle_down()
    leased = await world.pop("t", count=9, attempt=attempt, invisibility=LONG_SECONDS)
    assert numbers(leased) == [20, 21, 22, 23]
    assert [is_dropped(world, one) for one in leased] == [True, True, False, False]
    await publish(world, range(24, 40), size=3 * BODY)
    return leased


async def lease_before_a_full_buffer(
    world: World, *, attempt: str | None = None, invisibility: float | None = None
) -> list[Leased]:
    """Make one lease whose body was dropped, before ready messages that fill most of the budget: the broker has to
    stop.

    A window made for small messages admits more large ones than fit.
    """
    await publish(world, range(64), size=100)
    await publish(world, range(64, 104))
    small = await lease(world, 64)
    assert await world.settle(Verb.ACK, "t", small) == ["acked"] * 64
    leased = await world.pop("t", wait=20, attempt=attempt, invisibility=invisibility)
    assert numbers(leased) == [64]
    await world.settle_down()
    assert world.broker.channels[world.queue("t")].prefetches[-1] == 0
    assert is_dropped(world, leased[0])
    assert held_bytes(world) > BUDGET // 2
    return leased


def is_dropped(world: World, one: Leased) -> bool:
    """Tell whether there is a live lease without its body."""
    held = world.served("t").hosts[one.queue].state.messages[one.message.copy_id]
    assert held.state is MessageState.LEASED
    return held.message is None


def held_bytes(world: World) -> int:
    return sum(gauges.buffer_bytes for gauges in world.engine.gauges())


async def expect_again(world: World, leased: Sequence[Leased]) -> None:
    """Expect all of them to be visible again, each once, and nothing else."""
    again = await lease(world, len(leased))
    assert sorted(numbers(again)) == sorted(numbers(leased))
    assert [one.delivery_count for one in again] == [2] * len(leased)
    assert await world.settle(Verb.ACK, "t", again) == ["acked"] * len(leased)
    await expect_nothing_left(world)


async def expect_dead(world: World, leased: Sequence[Leased]) -> None:
    """Expect exactly these to become dead letters."""
    await world.settle_down()
    letters = await world.dead_letters("t")
    assert sorted(map(number_of, letters)) == sorted(numbers(leased))
    assert {letter.headers["x-popgate-delivery-count"] for letter in letters} == {1}


async def expect_nothing_left(world: World) -> None:
    """Expect nothing for a pop, in memory, or at the broker once all acks are written."""
    assert await world.pop("t") == []
    await world.settle_down()
    assert held_bytes(world) == 0
    served = world.served("t")
    await served.stop()
    assert [depth.ready for depth in await world.broker.depth(served.layout.queues)] == [0] * len(served.hosts)
