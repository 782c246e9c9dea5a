"""The limit of concurrent leases of a subscription, on a real Redis, with several proxies that grant them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from itertools import count

import pytest

from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.redis.lease_groups import RedisLeaseGroups
from popgate.adapters.redis.leases import RedisLeaseStore
from popgate.adapters.redis.limits import RedisLimits
from popgate.domain.errors import StateUnavailable
from popgate.domain.lease import GrantStatus, SettleAction, SettleStatus
from popgate.domain.lease_group import GroupKey
from popgate.domain.names import (
    TRANSIENT_PREFIX,
    BrokerQueue,
    CopyId,
    GroupName,
    InstanceId,
    LeaseId,
    StreamName,
    Subscription,
    TopicName,
)
from popgate.ports.leases import GrantEntry, GrantRequest, GroupPart, LoadedRecord, SettleEntry
from popgate.ports.limits import Limit, Vacancy
from support.redis import RedisServer

SUBSCRIPTION = Subscription(TopicName("t"), GroupName("g"))
QUEUES = Q1, Q2 = BrokerQueue("q1"), BrokerQueue("q2")
A, B = InstanceId("a"), InstanceId("b")
GRANTED, FULL, HELD = GrantStatus.GRANTED, GrantStatus.FULL, GrantStatus.HELD
PATIENCE_SECONDS = 20.0


class Owners:
    """Proxies that grant leases of one subscription, each for its own copies."""

    def __init__(self, server: RedisServer) -> None:
        self.redis = RedisConnection(parse_address(server.url()), secrets.token_hex(4))
        self.store = RedisLeaseStore(self.redis)
        self.limits = RedisLimits(self.redis)
        self.queues: Sequence[BrokerQueue] = QUEUES
        self.epochs: dict[BrokerQueue, int] = {}
        self._numbers = count(1)

    async def claim(self) -> None:
        for queue in self.queues:
            self.epochs[queue] = await self.store.claim(queue)

    def limit(self, most: int, member: InstanceId = A) -> Limit:
        return Limit(SUBSCRIPTION, self.queues, most, member)

    def copies(self, number: int) -> list[CopyId]:
        return [CopyId(f"{next(self._numbers):032x}") for _ in range(number)]

    def request(
        self, queue: BrokerQueue, copies: Sequence[CopyId], seconds: float = 30.0, group: GroupPart | None = None
    ) -> GrantRequest:
        return GrantRequest(
            subscription=SUBSCRIPTION,
            lease_id=LeaseId(f"l{next(self._numbers)}"),
            entries=[GrantEntry(queue, self.epochs[queue], copy_id, 0) for copy_id in copies],
            invisibility_seconds=seconds,
            max_deliveries=None,
            mode_generation=1,
            group=group,
        )

    async def give(
        self, queue: BrokerQueue, number: int, most: int, member: InstanceId = A, seconds: float = 30.0
    ) -> tuple[list[SettleEntry], Vacancy]:
        """Lease new copies; return the acks of those granted, and the remaining allowance."""
        request = self.request(queue, self.copies(number), seconds)
        answers, vacancy = await self.limits.grant(request, self.limit(most, member))
        assert {answer.status for answer in answers} <= {GRANTED, FULL}
        given = [
            SettleEntry(queue, entry.copy_id, request.lease_id, SettleAction.ACK)
            for entry, answer in zip(request.entries, answers, strict=True)
            if answer.status is GRANTED
        ]
        return given, vacancy

    async def left(self, most: int, member: InstanceId = A, *, waits: bool = False) -> Vacancy:
        return await self.limits.vacancy(self.limit(most, member), waits=waits)

    async def settle(self, entries: Sequence[SettleEntry]) -> None:
        answers = await self.store.settle(entries)
        assert {answer.status for answer in answers} == {SettleStatus.DONE}


@pytest.fixture
async def owners(redis_server: RedisServer) -> AsyncIterator[Owners]:
    owners = Owners(redis_server)
    await owners.claim()
    yield owners
    await owners.redis.close()


async def test_all_owners_together_give_no_more_than_the_limit(owners: Owners) -> None:
    first, vacancy = await owners.give(Q1, 3, most=5, member=A)
    assert (len(first), vacancy) == (3, Vacancy(2, is_full=False))
    second, vacancy = await owners.give(Q2, 3, most=5, member=B)
    assert (len(second), vacancy) == (2, Vacancy(0, is_full=True))
    none, vacancy = await owners.give(Q1, 1, most=5, member=A)
    assert (none, vacancy) == ([], Vacancy(0, is_full=True))


async def test_what_has_no_room_is_the_end_of_a_batch_and_stays_as_it_was(owners: Owners) -> None:
    copies = owners.copies(3)
    answers, _ = await owners.limits.grant(owners.request(Q1, copies), owners.limit(1))
    assert [answer.status for answer in answers] == [GRANTED, FULL, FULL]
    assert [one.copy_id for one in await owners.store.load(Q1)] == copies[:1]
    answers, _ = await owners.limits.grant(owners.request(Q1, copies), owners.limit(2))
    assert [answer.status for answer in answers] == [HELD, GRANTED, FULL]


@pytest.mark.parametrize(
    "action", [SettleAction.ACK, SettleAction.RELEASE, SettleAction.WITHDRAW, SettleAction.MOVE], ids=lambda one: one
)
async def test_a_lease_that_ends_makes_room_whoever_ends_it(owners: Owners, action: SettleAction) -> None:
    """The settlement does not mention the limit: any proxy can make it, even one without a limit."""
    given, _ = await owners.give(Q1, 2, most=2)
    await owners.settle([given[0]._replace(action=action, seconds=600.0, target=Q2, target_copy_id=CopyId("x"))])
    assert await owners.left(2) == Vacancy(1, is_full=False)


async def test_a_lease_makes_room_at_its_end_and_an_extension_puts_that_off(owners: Owners) -> None:
    long, _ = await owners.give(Q1, 1, most=2, seconds=0.3)
    short, _ = await owners.give(Q2, 1, most=2, seconds=0.3)
    await owners.settle([long[0]._replace(action=SettleAction.EXTEND, seconds=60.0)])
    assert await owners.left(2) == Vacancy(0, is_full=True)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await owners.left(2)).left == 0:  # noqa: ASYNC110 - it is to ask
            await asyncio.sleep(0.01)
    assert await owners.left(2) == Vacancy(1, is_full=False)
    await owners.settle([short[0]._replace(action=SettleAction.EXTEND, seconds=60.0)])
    assert (await owners.left(2)).is_full, "it was extended before anybody else got the message"


async def test_leases_that_were_given_before_there_was_a_limit_count(owners: Owners) -> None:
    unlimited = owners.request(Q1, owners.copies(1_500), 60.0)
    await owners.store.grant(unlimited)
    await owners.store.grant(owners.request(Q2, owners.copies(1), 0.001))
    assert await owners.left(1_502) == Vacancy(2, is_full=False)
    assert await owners.give(Q2, 1, most=1_500) == ([], Vacancy(0, is_full=True))
    entries = [SettleEntry(Q1, one.copy_id, unlimited.lease_id, SettleAction.ACK) for one in unlimited.entries]
    await owners.settle(entries[:500])
    assert await owners.left(1_502) == Vacancy(502, is_full=False)


async def test_leases_that_are_given_beside_the_limit_count(owners: Owners) -> None:
    """Such as those of an administrator, and of a proxy that does not know the limit yet."""
    await owners.left(2)
    await owners.store.grant(owners.request(Q1, owners.copies(3)))
    assert await owners.left(2) == Vacancy(0, is_full=True)
    assert await owners.left(4) == Vacancy(1, is_full=False)


async def test_members_of_a_lease_group_count(owners: Owners) -> None:
    key, builder = GroupKey(SUBSCRIPTION, StreamName("s"), 1), "builder"
    await RedisLeaseGroups(owners.redis).begin(key, lease_id=LeaseId("group"), builder=builder, slices=1)
    request = owners.request(Q1, owners.copies(3), group=GroupPart(key, builder))
    answers, vacancy = await owners.limits.grant(request, owners.limit(2))
    assert [answer.status for answer in answers] == [GRANTED, GRANTED, FULL]
    assert vacancy == Vacancy(0, is_full=True)
    found = await RedisLeaseGroups(owners.redis).find(key)
    assert found is not None
    assert found.message_count == 2


async def test_leases_that_end_with_a_channel_or_their_queue_make_room(owners: Owners) -> None:
    transient = [CopyId(f"{TRANSIENT_PREFIX}{number}") for number in range(3)]
    await owners.limits.grant(owners.request(Q1, transient), owners.limit(5))
    await owners.give(Q2, 1, most=5)
    assert (await owners.left(5)).left == 1
    await owners.store.forget(Q1, transient[:1])
    assert (await owners.left(5)).left == 2
    await owners.store.claim(Q1)
    assert (await owners.left(5)).left == 4
    await owners.store.drop_queue(Q2)
    assert (await owners.left(5)).left == 5


async def test_another_number_of_queues_is_counted_anew(owners: Owners) -> None:
    await owners.give(Q1, 1, most=5)
    await owners.give(Q2, 1, most=5)
    owners.queues = [Q1]
    assert (await owners.left(5)).left == 3, "what was leased of a queue that is gone ends in its time"
    owners.queues = [Q1, Q2, BrokerQueue("q3")]
    await owners.claim()
    await owners.store.grant(owners.request(BrokerQueue("q3"), owners.copies(1)))
    assert (await owners.left(5)).left == 2
    owners.queues = [BrokerQueue(f"adopted{number}") for number in range(3)]
    await owners.claim()
    await owners.give(owners.queues[1], 1, most=5)
    assert (await owners.left(5)).left == 1, "as many as before, and others"


# -- who has its turn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2])
async def test_each_of_two_owners_has_its_turn_however_eager_the_other_is(owners: Owners, most: int) -> None:
    """A proxy with leases settles them and leases again in one step, so that no other gets in between; a proxy
    without leases asks now and then, as waiting proxies do.
    """
    turns: list[InstanceId] = []

    async def work(member: InstanceId, queue: BrokerQueue) -> None:
        leases: list[SettleEntry] = []
        while len(turns) < 6:
            if not leases:
                await asyncio.sleep(0.05)
                await owners.left(most, member, waits=True)
            async with asyncio.TaskGroup() as tasks:
                if leases:
                    tasks.create_task(owners.settle(leases))
                again = tasks.create_task(owners.give(queue, most, most, member))
            leases, _ = again.result()
            if leases and turns[-1:] != [member]:
                turns.append(member)

    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(work(A, Q1), work(B, Q2))


async def test_who_stands_in_line_gets_what_is_left_first_until_it_asks_no_more(owners: Owners) -> None:
    given, _ = await owners.give(Q1, 1, most=1, member=A)
    assert (await owners.left(1, B, waits=True)).is_full
    async with asyncio.timeout(PATIENCE_SECONDS):
        await owners.settle(given)
        vacancy = Vacancy(1, is_full=False)
        while given:  # its turn continues for a short time
            await owners.left(1, B, waits=True)
            given, vacancy = await owners.give(Q1, 1, most=1, member=A)
            await asyncio.sleep(0.01)
            if given:
                await owners.settle(given)
        assert vacancy == Vacancy(0, is_full=False), "it is another one's turn"
        assert await owners.left(1, B) == Vacancy(1, is_full=False)
        while (await owners.left(1, A)).left == 0:  # noqa: ASYNC110 - it is to ask
            await asyncio.sleep(0.01)
    given, _ = await owners.give(Q1, 1, most=1, member=A)
    assert len(given) == 1, "B asks no more"


async def test_who_only_looks_stands_in_no_line(owners: Owners) -> None:
    given, _ = await owners.give(Q1, 1, most=1, member=A)
    async with asyncio.timeout(PATIENCE_SECONDS):
        for _ in range(30):
            assert (await owners.left(1, B)).is_full
            await owners.settle(given)
            given, _ = await owners.give(Q1, 1, most=1, member=A)
            assert len(given) == 1
            await asyncio.sleep(0.01)


# -- what is kept -----------------------------------------------------------------------------------------------------


async def test_nothing_is_given_before_all_owners_have_written_back_what_a_loss_of_data_took(owners: Owners) -> None:
    given, _ = await owners.give(Q1, 2, most=3)
    records = [LoadedRecord(one.copy_id, one.record, one.remaining_seconds) for one in await owners.store.load(Q1)]
    await lose_data(owners)
    with pytest.raises(StateUnavailable):
        await owners.left(3)
    owners.epochs[Q2] = await owners.store.restore(Q2, [], above=owners.epochs[Q2])
    assert await owners.give(Q2, 2, most=3, member=B) == ([], Vacancy(0, is_full=False))
    owners.epochs[Q1] = await owners.store.restore(Q1, records, above=owners.epochs[Q1])
    got, vacancy = await owners.give(Q2, 2, most=3, member=B)
    assert (len(got), vacancy) == (1, Vacancy(0, is_full=True))
    await owners.settle(given)
    assert (await owners.left(3)).left == 2


async def test_what_has_no_limit_any_more_is_not_counted_and_leaves_nothing(owners: Owners) -> None:
    await owners.give(Q1, 2, most=3)
    await owners.left(0, B, waits=True)
    before = await names(owners)
    await owners.limits.keep([SUBSCRIPTION])
    assert await names(owners) == before
    await owners.limits.keep([])
    left = await names(owners)
    assert not {"limits", "limited", "counted", "counting", "out:t/g", "refused:t/g"} & left
    assert before - left == {"limits", "limited", "counted", "out:t/g", "refused:t/g"}
    await owners.store.grant(owners.request(Q2, owners.copies(1)))
    assert await names(owners) - left == {"live:q2"}
    assert (await owners.left(5)).left == 2, "all are counted once there is a limit again"


async def names(owners: Owners) -> set[str]:
    prefix = owners.redis.prefix
    return {name.decode().removeprefix(prefix) for name in await owners.redis.command("KEYS", f"{prefix}*")}


async def lose_data(owners: Owners) -> None:
    prefix = owners.redis.prefix
    await owners.redis.command("DEL", *await owners.redis.command("KEYS", f"{prefix}*"))
