"""Pops that a proxy forwards to another owner of the subscription's queues."""

import asyncio
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from engine.patience import LEASE_SECONDS, host_of
from popgate.domain.names import InstanceId, Layout, Subscription
from popgate.engine.cluster.other_backlogs import POPPED_HERE_SECONDS
from popgate.engine.cluster.remote_pops import PeerPop
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.subscription.collecting import COLLECT_SECONDS
from popgate.ports.peers import Available
from popgate.runtime.clocks import ManualClock
from support.engines import World, bodies, crash, eventually, filtered, open_world

PLAIN = ""


class OtherProxy:
    """The only other owner. The test gives its answers: to the pops with each color as a filter, and to those without.

    ``forwarded``: the number of pops that have been forwarded, by color.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.forwarded: Counter[str] = Counter()
        self._answers: defaultdict[str, asyncio.Queue[PeerPop[str]]] = defaultdict(asyncio.Queue)

    async def pop(
        self, color: str, presence: Presence, *, wait: float = 0.0, attempt: str | None = None
    ) -> list[Leased] | str:
        async def forward(_: InstanceId) -> PeerPop[str]:
            self.forwarded[color] += 1
            return await self._answers[color].get()

        request = PopRequest(
            wait_seconds=wait, attempt_id=attempt, selection=filtered({"color": [color]} if color else None)
        )
        return await self._world.engine.pop_anywhere("t", "default", request, presence, forward)

    def answer(self, color: str, answer: str, arrivals: int | None) -> None:
        self._answers[color].put_nowait(PeerPop(answer, arrivals))


@pytest.fixture
def other(world: World, monkeypatch: pytest.MonkeyPatch) -> OtherProxy:
    def others(_: Layout) -> list[InstanceId]:
        return [InstanceId("other")]

    monkeypatch.setattr(world.context.router, "others", others)
    return OtherProxy(world)


async def test_few_pops_with_filters_are_forwarded_at_a_time_and_no_other_pop_waits_for_them(
    world: World, other: OtherProxy
) -> None:
    colors = [f"color {number}" for number in range(50)]
    choosy = [asyncio.ensure_future(other.pop(color, Presence())) for color in colors]
    await eventually(lambda: other.forwarded.total() > 0)
    plain = asyncio.ensure_future(other.pop(PLAIN, Presence()))
    await eventually(lambda: other.forwarded[PLAIN] == 1)
    await world.settle_down()
    assert other.forwarded.total() == 8 + 1
    other.answer(PLAIN, "nothing there", 0)
    for color in colors:
        other.answer(color, "nothing there", 0)
    assert await asyncio.gather(*choosy, plain) == [[]] * 51


async def test_a_client_that_leaves_while_its_pop_is_forwarded_leaves_no_parked_pop(
    world: World, other: OtherProxy
) -> None:
    presence = Presence()
    popping = asyncio.ensure_future(other.pop(PLAIN, presence, wait=30.0))
    await eventually(lambda: other.forwarded[PLAIN] == 1)
    presence.leave()
    await world.settle_down()
    assert popping.done(), "it was parked for a client that has left"
    assert await popping == []


async def test_a_pop_that_is_repeated_while_it_is_forwarded_is_not_parked_before_the_repeat(
    world: World, other: OtherProxy
) -> None:
    first = asyncio.ensure_future(other.pop(PLAIN, Presence(), wait=30.0, attempt="a"))
    await eventually(lambda: other.forwarded[PLAIN] == 1)
    second = asyncio.ensure_future(other.pop(PLAIN, Presence(), wait=30.0, attempt="a"))
    await world.settle_down()
    other.answer(PLAIN, "nothing there", 0)
    await world.settle_down()
    assert first.done(), "the repeat waits for its end"
    other.answer(PLAIN, "a message", None)
    assert (await first, await second) == ([], "a message")


async def test_an_answer_that_a_later_one_has_overtaken_hides_no_message(world: World, other: OtherProxy) -> None:
    plain = asyncio.ensure_future(other.pop(PLAIN, Presence(), wait=30.0))
    leaving = Presence()
    choosy = asyncio.ensure_future(other.pop("red", leaving, wait=30.0))
    await eventually(lambda: other.forwarded == {PLAIN: 1, "red": 1})
    other.answer("red", "nothing there", 2)
    await eventually(lambda: world.served("t").parked_pops == 1)
    other.answer(PLAIN, "nothing there", 1)
    await world.settle_down()
    assert other.forwarded[PLAIN] == 2, "the second message came after the other proxy had looked for this pop"
    other.answer(PLAIN, "the second message", None)
    assert await plain == "the second message"
    leaving.leave()
    assert await choosy == []


async def test_another_proxy_that_has_pops_is_told_of_a_message_behind_leased_ones_that_fill_the_prefetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, other, told = ManualClock(), InstanceId("other"), list[InstanceId]()
    async with open_world(tmp_path / "before", clock=clock) as world:
        await world.create("t")
        await world.publish("t", *(f"m{number}" for number in range(13)))
        leased = 0
        while leased < 12:
            leased += len(await world.pop("t", count=12 - leased, wait=20, invisibility=LEASE_SECONDS))
        await crash(world, tmp_path / "before", tmp_path / "after")
    async with open_world(tmp_path / "after", clock=clock) as world:

        def tell(to: InstanceId, _: Subscription) -> None:
            told.append(to)

        monkeypatch.setattr(world.context.router, "notify_available", tell)
        assert not world.served("t").wanted_by(other, 30.0, 0)
        await eventually(lambda: len(host_of(world).messages()) == 13)
        await world.let_pass(COLLECT_SECONDS)
        assert told == [other]
        assert world.broker.channels[world.queue("t")].prefetches[0] < 12, "the leased messages fill the first prefetch"
        assert bodies(await world.pop("t")) == ["m12"]


@pytest.mark.parametrize(("waited", "forwarded"), [(None, 5), (60.0, 5), (0.0, 1)])
async def test_pops_leave_a_backlog_here_only_if_messages_may_wait_for_longer_elsewhere(
    world: World, other: OtherProxy, waited: float | None, forwarded: int
) -> None:
    await world.create("u", queues=2)
    served = world.served("u")
    served.hosts[1].claim.is_owned = False
    await world.publish("u", *(f"m{number}" for number in range(40)))
    await world.let_pass(5.0)
    count = 0

    async def forward(_: InstanceId) -> PeerPop[str]:
        nonlocal count
        count += 1
        return PeerPop("a message from elsewhere", None, waited)

    for number in range(11):
        assert await world.engine.pop_anywhere("u", "default", PopRequest(), Presence(), forward)
        if number == 0:
            await world.engine.peering.answer(InstanceId("other"), Available(subscription=served.name))
    assert count == forwarded


async def test_a_proxy_reports_the_wait_of_its_messages_while_its_own_clients_take_some(
    world: World, other: OtherProxy
) -> None:
    await world.publish("t", "first", "second")
    await world.let_pass(5.0)
    (first,) = await world.pop("t")
    peering = world.engine.peering
    assert peering.waited_seconds("t", "default", first.message) is None, "another proxy's client has popped it"
    found = await other.pop(PLAIN, Presence())
    assert isinstance(found, list)
    assert bodies(found) == ["second"]
    assert peering.waited_seconds("t", "default", first.message) == pytest.approx(5.0)
    assert peering.waited_seconds("t", "default", first.message._replace(published_at=0.0)) is None
    await world.let_pass(POPPED_HERE_SECONDS + 0.1)
    assert peering.waited_seconds("t", "default", first.message) is None, "no client of its own takes messages now"
