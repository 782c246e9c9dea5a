"""The contract of the store of pull clients' assignments, over every adapter; an adapter joins by a function to open
it.
"""

import asyncio
from pathlib import Path

import pytest

from contract.store_openers import OpenerOf, store_opener
from popgate.adapters.assignment_json import read_assignment
from popgate.adapters.redis.assignments import RedisAssignments
from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.domain.assignment import Assignment, Holding, Session
from popgate.domain.names import ClientId, GroupName, Subscription, TopicName
from popgate.domain.topics import ConsumeMode
from popgate.ports.assignments import NOTHING_STORED, Assignments

DATABASE = 2
ORDERS = Subscription(TopicName("orders"), GroupName("default"))
BILLS = Subscription(TopicName("bills"), GroupName("default"))
A, B = ClientId("a"), ClientId("b.0-1_x")
BOTH = Assignment(
    generation=1_763_862_412_345,
    lease_generation=3,
    sessions={
        A: Session((ConsumeMode.POP, ConsumeMode.PULL), 1_763_862_412_000, 1_763_862_412_345),
        B: Session((ConsumeMode.PULL,), 1, 2),
    },
    holdings={0: Holding(A, 17), 255: Holding(A, 18, B, 19)},
)
ONE = Assignment(generation=5, lease_generation=3, sessions={B: Session((), 5, 5)})


Opener = OpenerOf[Assignments]


@pytest.fixture(params=["sqlite", "redis", "simulated"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return store_opener(request, SqliteAssignments, RedisAssignments, redis_database=DATABASE)


async def test_what_was_written_is_there_after_a_restart(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as store:
        assert await store.read(ORDERS) == NOTHING_STORED
        orders = await store.write(ORDERS, BOTH, 0)
        bills = await store.write(BILLS, ONE, 0)
    async with opener(tmp_path) as store:
        assert await store.read(ORDERS) == (orders, BOTH)
        assert await store.read(BILLS) == (bills, ONE)


async def test_only_who_knows_what_stands_replaces_it(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as store:
        first = await store.write(ORDERS, BOTH, 0)
        assert first is not None
        assert await store.write(ORDERS, ONE, 0) is None
        assert await store.write(ORDERS, ONE, first + 1) is None
        assert await store.read(ORDERS) == (first, BOTH)
        second = await store.write(ORDERS, ONE, first)
        assert second is not None
        assert second > first
        assert await store.write(ORDERS, BOTH, first) is None
        assert await store.read(ORDERS) == (second, ONE)


async def test_of_two_who_write_at_once_one_does(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as store:
        stands = 0
        for _ in range(10):
            written = await asyncio.gather(*(store.write(ORDERS, one, stands) for one in (BOTH, ONE, BOTH)))
            (stands,) = [version for version in written if version is not None]
            assert (await store.read(ORDERS)).version == stands


async def test_a_version_does_not_come_again_after_it_was_dropped(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as store:
        first = await store.write(ORDERS, BOTH, 0)
        bills = await store.write(BILLS, ONE, 0)
        for _ in range(2):
            await store.drop(ORDERS)
        assert await store.read(ORDERS) == NOTHING_STORED
        await asyncio.sleep(0.002)  # versions are milliseconds, unless there are too many
        second = await store.write(ORDERS, ONE, 0)
        assert first is not None
        assert second is not None
        assert second > first
        assert await store.read(BILLS) == (bills, ONE)


def test_what_a_newer_popgate_has_written_is_read() -> None:
    text = (
        '{"generation": 7, "lease_generation": 2, "later": true, '
        '"sessions": {"a": [["pull"], 6, 7, "later"]}, "holdings": {"3": ["a", 7, null, 0, "later"]}}'
    )
    assert read_assignment(text) == Assignment(
        generation=7,
        lease_generation=2,
        sessions={A: Session((ConsumeMode.PULL,), 6, 7)},
        holdings={3: Holding(A, 7)},
    )
