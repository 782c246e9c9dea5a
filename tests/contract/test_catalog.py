"""The contract of the catalog, over every adapter; an adapter joins by a function to open it."""

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from contract.store_openers import OpenerOf, store_opener
from popgate.adapters.redis.address import parse_address
from popgate.adapters.redis.catalog import RedisCatalog
from popgate.adapters.redis.change_signals import listen_for_changes
from popgate.adapters.redis.claims import RedisClaims
from popgate.adapters.redis.connection import RedisConnection
from popgate.adapters.spec_json import group_json
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.domain.errors import Conflict, StateUnavailable
from popgate.domain.names import BrokerQueue, GroupName, Subscription, TopicName
from popgate.domain.topics import ConsumeMode, Drain, GroupSpec, Policy, RetryPolicy, TopicSpec
from popgate.ports.catalog import Catalog
from popgate.runtime.background import Background
from support.redis import RedisServer

ORDERS, BILLS = TopicName("orders"), TopicName("bills")
PLAIN = TopicSpec(topic=ORDERS, queue_count=4)
ADOPTED = TopicSpec(
    topic=BILLS,
    queue_count=2,
    adopted=(BrokerQueue("billing.in"), BrokerQueue("ünïcode / odd")),
    unique_message_ids=True,
)
DEFAULTS = GroupSpec(subscription=Subscription(ORDERS, GroupName("default")))
TUNED = GroupSpec(
    subscription=Subscription(BILLS, GroupName("audit")),
    policy=Policy(
        invisibility_seconds=12.5,
        max_deliveries=None,
        retry=RetryPolicy(initial_seconds=0.1, multiplier=3.0, max_seconds=90.0),
        min_replicas=0,
    ),
    mode=ConsumeMode.PULL,
    mode_generation=7,
    lease_generation=5,
)
DRAINING = replace(
    DEFAULTS,
    mode=ConsumeMode.DRAINING,
    mode_generation=2,
    drain=Drain(to=ConsumeMode.PULL, ends_at=1_700_000_000.25),
)


def test_a_group_without_a_count_of_replicas_is_stored_as_older_releases_read_it() -> None:
    assert "min_replicas" not in group_json(DEFAULTS)
    assert '"min_replicas":0' in group_json(TUNED)


DATABASE = 2
Opener = OpenerOf[Catalog]


@pytest.fixture(params=["sqlite", "redis", "simulated"])
def opener(request: pytest.FixtureRequest) -> Opener:
    return store_opener(request, SqliteCatalog, RedisCatalog, redis_database=DATABASE)


async def test_what_was_put_is_there_after_a_restart(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        for topic in (PLAIN, ADOPTED):
            await catalog.put_topic(topic)
        for group in (DEFAULTS, TUNED):
            assert await catalog.change_group(None, group)
    async with opener(tmp_path) as catalog:
        assert sorted(await catalog.topics(), key=lambda spec: spec.topic) == [ADOPTED, PLAIN]
        assert sorted(await catalog.groups(), key=lambda spec: spec.subscription) == [TUNED, DEFAULTS]


async def test_put_replaces(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        await catalog.put_topic(ADOPTED)
        assert await catalog.change_group(None, TUNED)
        plain = TopicSpec(topic=BILLS, queue_count=1)
        default = GroupSpec(subscription=TUNED.subscription)
        await catalog.put_topic(plain)
        assert await catalog.change_group(TUNED, default)
        assert await catalog.topics() == [plain]
        assert await catalog.groups() == [default]


async def test_a_group_is_changed_only_where_what_was_read_still_stands(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        name = DEFAULTS.subscription
        await catalog.put_topic(PLAIN)
        assert await catalog.group(name) is None
        assert not await catalog.change_group(DEFAULTS, DRAINING)
        assert await catalog.change_group(None, DEFAULTS)
        assert not await catalog.change_group(None, DRAINING)
        version = await catalog.version()
        paused = replace(DEFAULTS, policy=Policy(paused=True))
        assert await catalog.change_group(DEFAULTS, DRAINING)
        assert not await catalog.change_group(DEFAULTS, paused)
        assert await catalog.group(name) == DRAINING
        assert await catalog.version() > version
    async with opener(tmp_path) as catalog:
        assert await catalog.groups() == [DRAINING]
        version = await catalog.version()
        assert not await catalog.change_group(DEFAULTS, paused)
        assert await catalog.version() == version


async def test_of_many_who_change_a_group_at_once_one_does(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        assert await catalog.change_group(None, DEFAULTS)
        wanted = [replace(DEFAULTS, mode_generation=2 + number) for number in range(10)]
        changed = await asyncio.gather(*(catalog.change_group(DEFAULTS, spec) for spec in wanted))
        (version,) = filter(None, changed)
        assert await catalog.group(DEFAULTS.subscription) == wanted[changed.index(version)]
        assert await catalog.version() == version


async def test_what_was_decided_from_an_earlier_version_is_not_written(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        earlier = await catalog.version()
        version = await catalog.put_topic(PLAIN, earlier)
        assert version == await catalog.version() > earlier
        assert not await catalog.put_topic(replace(PLAIN, queue_count=1), earlier)
        assert not await catalog.put_topic(ADOPTED, earlier)
        assert not await catalog.change_group(None, DEFAULTS, earlier)
        assert (await catalog.topics(), await catalog.groups()) == ([PLAIN], [])
        assert await catalog.version() == version
        assert await catalog.change_group(None, DEFAULTS, version) == await catalog.version() > version
        assert await catalog.groups() == [DEFAULTS]


async def test_the_time_goes_on(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        now = await catalog.now()
        assert 0 <= await catalog.now() - now < 60


async def test_deleting_a_topic_deletes_its_groups_and_no_others(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        for topic in (PLAIN, ADOPTED):
            await catalog.put_topic(topic)
        for group in (DEFAULTS, TUNED):
            assert await catalog.change_group(None, group)
        await catalog.delete_topic(ORDERS)
        await catalog.delete_topic(ORDERS)
        assert await catalog.topics() == [ADOPTED]
        assert await catalog.groups() == [TUNED]


async def test_deleting_a_group_leaves_its_topic(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        await catalog.put_topic(PLAIN)
        assert await catalog.change_group(None, DEFAULTS)
        await catalog.delete_group(DEFAULTS.subscription)
        await catalog.delete_group(DEFAULTS.subscription)
        assert await catalog.topics() == [PLAIN]
        assert await catalog.groups() == []


async def test_an_empty_catalog_is_empty(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        assert await catalog.topics() == []
        assert await catalog.groups() == []


async def test_each_change_makes_a_new_version_and_nothing_else_does(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        versions = [await catalog.version()]
        for change in (
            catalog.put_topic(PLAIN),
            catalog.change_group(None, DEFAULTS),
            catalog.change_group(DEFAULTS, DRAINING),
            catalog.delete_group(DEFAULTS.subscription),
            catalog.delete_topic(ORDERS),
        ):
            await change
            versions.append(await catalog.version())
        assert versions == sorted(set(versions))
        assert await catalog.topics() == []
        assert await catalog.version() == versions[-1]


async def test_who_hears_nothing_waits(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        await catalog.put_topic(PLAIN)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await catalog.changed()


async def test_changes_are_heard_by_all_who_listen(redis_server: RedisServer, tmp_path: Path) -> None:
    connections = [RedisConnection(parse_address(redis_server.url(DATABASE)), tmp_path.name) for _ in range(2)]
    mine, theirs = catalogs = [RedisCatalog(connection) for connection in connections]
    claims = RedisClaims(connections[1])
    background = Background()
    background.spawn(listen_for_changes(connections[0], mine.signal), name="hear")
    background.spawn(
        listen_for_changes(connections[1], theirs.signal, claims.signal), name="hear on one connection with another"
    )
    try:
        async with asyncio.timeout(5):
            await asyncio.gather(claims.changed(), *(catalog.changed() for catalog in catalogs))  # before they listened
            for change in (
                mine.put_topic(PLAIN),
                theirs.change_group(None, DEFAULTS),
                mine.delete_group(DEFAULTS.subscription),
                theirs.delete_topic(ORDERS),
            ):
                await change
                await asyncio.gather(*(catalog.changed() for catalog in catalogs))
                assert await mine.version() == await theirs.version()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await claims.changed()
    finally:
        await background.stop()
        for connection in connections:
            await connection.close()


async def test_a_version_does_not_come_again_when_the_data_were_lost(redis_server: RedisServer, tmp_path: Path) -> None:
    connection = RedisConnection(parse_address(redis_server.url(DATABASE)), tmp_path.name)
    catalog = RedisCatalog(connection)
    try:
        await catalog.put_topic(PLAIN)
        known = await catalog.version()
        await connection.command("FLUSHDB")
        assert await catalog.version() == 0
        with pytest.raises(StateUnavailable, match="lost its data"):
            await catalog.put_topic(PLAIN)
        await catalog.put_topic(PLAIN)
        assert await catalog.version() > known
    finally:
        await connection.close()


# ---------------------------------------------------------------- entries of another program


BAD_TOPICS = {
    "large": '{"queue_count":257}',
    "huge": '{"queue_count":1000000,"adopted":[],"unique_message_ids":false}',
    "none": '{"queue_count":0}',
    "negative": '{"queue_count":-1}',
    "text": '{"queue_count":"4"}',
    "missing": "{}",
    "adopts-many": '{"queue_count":1,"adopted":[' + ",".join(f'"q{number}"' for number in range(257)) + "]}",
    "adopts-own": '{"queue_count":1,"adopted":["popgate:orders:default:0"]}',
    "adopts-twice": '{"queue_count":2,"adopted":["q","q"]}',
    "no-json": "{",
    "deep": "[" * 100_000,
    'no name"\n': '{"queue_count":1}',
    "x" * 65: '{"queue_count":1}',
}
BAD_GROUPS = {
    "number": "5",
    "eternal": '{"policy":{"invisibility_seconds":1e300}}',
    "negative": '{"policy":{"max_lease_seconds":-1}}',
    "no-deliveries": '{"policy":{"max_deliveries":0}}',
    "growing": '{"policy":{"retry":{"multiplier":1e9}}}',
    "replicas": '{"policy":{"min_replicas":1000000}}',
    "no-mode": '{"mode":"nosuch"}',
    "late": '{"mode_generation":9007199254740993}',
    "half-drain": '{"mode":"draining"}',
    "drain": '{"drain":{"to":"pull","ends_at":1}}',
    "no group": "{}",
}


async def write_raw(catalog: Catalog, topic: str, group: str | None, text: str) -> None:
    """Write an entry as another program would."""
    if isinstance(catalog, RedisCatalog):
        redis = catalog._redis  # pyright: ignore[reportPrivateUsage]
        name, field = ("topics", topic) if group is None else ("topic_groups", f"{topic}/{group}")
        await redis.run("put_spec", name, field, text)
        return
    assert isinstance(catalog, SqliteCatalog)
    table, row = ("topic", (topic, text)) if group is None else ("topic_group", (topic, group, text))
    places = ", ".join("?" * len(row))
    await catalog._write(  # pyright: ignore[reportPrivateUsage]
        lambda connection: connection.execute(f"REPLACE INTO {table} VALUES ({places})", row)
    )


async def test_entries_beyond_the_bounds_of_requests_are_left_out_and_logged_once(
    opener: Opener, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opener(tmp_path) as catalog:
        await catalog.put_topic(PLAIN)
        assert await catalog.change_group(None, DEFAULTS)
        for name, text in BAD_TOPICS.items():
            await write_raw(catalog, name, None, text)
        for name, text in BAD_GROUPS.items():
            await write_raw(catalog, ORDERS, name, text)
        for topic in ("huge", "nowhere"):
            await write_raw(catalog, topic, "default", "{}")
        for _ in range(3):
            assert await catalog.topics() == [PLAIN]
            assert await catalog.groups() == [DEFAULTS]
    entries = [vars(record)["entry"] for record in caplog.records if record.levelno == logging.WARNING]
    wanted = [f"topic {name}" for name in BAD_TOPICS] + [f"group {name} of topic orders" for name in BAD_GROUPS]
    wanted += [f"group default of topic {topic}" for topic in ("huge", "nowhere")]
    assert sorted(entries) == sorted(wanted)


async def test_an_entry_that_can_not_be_read_is_named_and_never_replaced(opener: Opener, tmp_path: Path) -> None:
    """It may be one of a newer popgate, and its queues may have messages."""
    huge, text = TopicSpec(topic=TopicName("huge"), queue_count=1), '{"queue_count":1000000}'
    async with opener(tmp_path) as catalog:
        await catalog.put_topic(PLAIN)
        await write_raw(catalog, *DEFAULTS.subscription, '{"policy":{"max_deliveries":0}}')
        await write_raw(catalog, huge.topic, None, text)
        await write_raw(catalog, huge.topic, "default", "{}")
        assert (await catalog.topics(), await catalog.groups()) == ([PLAIN], [])
        left = Subscription(huge.topic, GroupName("default"))
        assert catalog.unreadable() == (frozenset({huge.topic}), frozenset({left, DEFAULTS.subscription}))
        assert await catalog.group(DEFAULTS.subscription) is None
        with pytest.raises(Conflict, match="can't be read"):
            await catalog.change_group(None, DEFAULTS)
        with pytest.raises(Conflict, match="queue_count"):
            await catalog.put_topic(huge)
        assert (await catalog.topics(), await catalog.groups()) == ([PLAIN], [])
        await catalog.delete_group(DEFAULTS.subscription)
        assert await catalog.change_group(None, DEFAULTS)
        await catalog.delete_topic(huge.topic)
        await catalog.put_topic(huge)
        assert {spec.topic for spec in await catalog.topics()} == {PLAIN.topic, huge.topic}


async def test_fields_that_a_newer_popgate_has_written_are_ignored(opener: Opener, tmp_path: Path) -> None:
    async with opener(tmp_path) as catalog:
        await write_raw(catalog, PLAIN.topic, None, f'{{"queue_count":{PLAIN.queue_count},"colour":"red"}}')
        await write_raw(catalog, *DEFAULTS.subscription, '{"policy":{"retry":{"jitter":1},"nosuch":2},"shape":3}')
        assert (await catalog.topics(), await catalog.groups()) == ([PLAIN], [DEFAULTS])


async def test_an_entry_that_is_no_text_hides_no_other(redis_server: RedisServer, tmp_path: Path) -> None:
    connection = RedisConnection(parse_address(redis_server.url(DATABASE)), tmp_path.name)
    catalog = RedisCatalog(connection)
    try:
        await catalog.put_topic(PLAIN)
        await connection.command("HSET", f"{connection.prefix}topics", b"\xff", '{"queue_count":1}')
        await connection.command("HSET", f"{connection.prefix}topics", "x", b"\xff")
        assert await catalog.topics() == [PLAIN]
        assert catalog.unreadable().topics == {"x"}
        with pytest.raises(Conflict, match="can't be read"):
            await catalog.put_topic(replace(PLAIN, topic=TopicName("x")))
    finally:
        await connection.close()
