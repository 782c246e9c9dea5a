"""A real engine over real adapters, with its clock and its faults under the test's control.

This module owns how an engine is assembled for tests and how it crashes; the tests own the expected behaviour.
"""

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.filters import FilterValue, header_filter
from popgate.domain.identity import IdentityKeys
from popgate.domain.message import HeaderValue, Message
from popgate.domain.names import BrokerQueue, CopyId, GroupName, Layout, Subscription, TopicName
from popgate.domain.topics import Policy
from popgate.engine.context.engine_context import EngineContext, EngineOptions, make_context
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.lease.selection import ANY, FilteredSelection, Selection
from popgate.engine.publish.publishing import NewMessage, Published
from popgate.engine.settle.orders import SettleOrder, SettleResult, Verb
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.broker import Broker, Delivery
from popgate.ports.journal import EventKind, JournalSubject
from popgate.ports.leases import LeaseStore
from popgate.runtime.background import Background
from popgate.runtime.clocks import ManualClock, SystemClock
from support.faulty import Faults, FaultyAssignments, FaultyBroker, FaultyDedupStore, FaultyLeaseStore

DATABASE_FILE = "popgate.db"
SECRET = b"a secret of the tests alone"
PATIENCE_SECONDS = 20.0
"""Seconds that any step may take before a test fails."""
PREFETCH_MAX = 65_535

_instances = count(1)


def filtered(wanted: Mapping[str, Sequence[FilterValue]] | None) -> Selection:
    """Return the selection of a pop with this filter; None for a pop without a filter."""
    return ANY if wanted is None else FilteredSelection(header_filter(wanted))


class Event(NamedTuple):
    kind: EventKind
    subscription: Subscription
    message_id: str
    delivery_count: int
    detail: str = ""


class ListJournal:
    """A journal that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(
        self,
        kind: EventKind,
        subscription: Subscription,
        subjects: Sequence[JournalSubject],
        at: float,
        *,
        details: Sequence[str] = (),
        new_copy_ids: Sequence[CopyId] = (),
        groups: Sequence[GroupName] = (),
    ) -> None:
        for subject, detail in zip(subjects, details or [""] * len(subjects), strict=True):
            message_id = subject.message.message_id if subject.message is not None else ""
            self.events.append(Event(kind, subscription, message_id, subject.delivery_count, detail))

    def note(
        self,
        kind: EventKind,
        topic: TopicName,
        at: float,
        *,
        group: GroupName | None = None,
        queue_index: int | None = None,
        detail: str = "",
    ) -> None:
        pass

    def details(self, kind: EventKind) -> list[str]:
        return [event.detail for event in self.events if event.kind is kind]

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.events)


class World:
    """An engine with all its adapters. Messages are identified by their bodies."""

    def __init__(
        self,
        *,
        clock: ManualClock | SystemClock,
        database: Database,
        broker: FaultyBroker,
        leases: FaultyLeaseStore,
        faults: Faults,
        engine: Engine,
        context: EngineContext,
        journal: ListJournal,
        failures: list[BaseException],
    ) -> None:
        self.clock = clock
        self.database = database
        self.broker = broker
        self.leases = leases
        self.faults = faults
        self.engine = engine
        self.context = context
        self.journal = journal
        self.failures = failures
        """Exceptions of background tasks and event loop callbacks; each is a bug."""

    # ------------------------------------------------------------ what a client does

    async def publish(
        self,
        topic: str,
        *bodies: str,
        ordering_key: str | None = None,
        headers: Mapping[str, HeaderValue] | None = None,
        delay: float = 0.0,
        ttl: float | None = None,
    ) -> list[str]:
        """Publish, all or an error; return the statuses."""
        new = [
            NewMessage(
                body.encode(),
                headers or {},
                message_id=body,
                ordering_key=ordering_key,
                delay_seconds=delay,
                ttl_seconds=ttl,
            )
            for body in bodies
        ]
        return [result.status for result in await self.engine.publish(topic, new)]

    async def publish_once(self, topic: str, body: str, dedup_id: str | None = None) -> Published:
        """Publish one message with a dedup_id; its body is the id unless another one is given."""
        (result,) = await self.engine.publish(topic, [NewMessage(body.encode(), {}, dedup_id=dedup_id or body)])
        return result

    async def pop(
        self,
        topic: str,
        group: str = "default",
        *,
        count: int = 1,
        wait: float = 0.0,
        invisibility: float | None = None,
        attempt: str | None = None,
        presence: Presence | None = None,
        only: Mapping[str, Sequence[FilterValue]] | None = None,
    ) -> list[Leased]:
        request = PopRequest(
            max_messages=count,
            wait_seconds=wait,
            invisibility_seconds=invisibility,
            attempt_id=attempt,
            selection=filtered(only),
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await self.engine.pop(topic, group, request, presence or Presence())

    async def settle(
        self,
        verb: Verb,
        topic: str,
        leased: Sequence[Leased],
        group: str = "default",
        *,
        seconds: float | None = None,
        reason: str = "",
    ) -> list[str]:
        """Settle leases; return the statuses."""
        orders = [SettleOrder(one.receipt_handle, seconds, reason) for one in leased]
        return [result.status for result in await self.engine.settle(topic, group, verb, orders)]

    async def settle_handles(
        self, verb: Verb, topic: str, group: str, handles: Sequence[str], *, seconds: float | None = None
    ) -> list[SettleResult]:
        return await self.engine.settle(topic, group, verb, [SettleOrder(handle, seconds) for handle in handles])

    async def create(
        self, topic: str, *, queues: int = 1, group: str = "default", policy: Policy | None = None
    ) -> None:
        """Create a topic with one group."""
        await self.engine.changes.put_topic(topic, queues=queues, adopt=None)
        await self.engine.changes.put_group(topic, group, policy)

    # ------------------------------------------------------------ what a test looks at

    def served(self, topic: str, group: str = "default") -> ServedSubscription:
        return self.engine.topics.subscription(topic, group)

    def queue(self, topic: str, index: int = 0, group: str = "default") -> BrokerQueue:
        return self.served(topic, group).layout.queues[index]

    async def dead_letters(self, topic: str, group: str = "default") -> list[Message]:
        """Return the content of the dead-letter queue without changing it."""
        return await read_queue(self.broker.wrapped, self.served(topic, group).layout)

    # ------------------------------------------------------------ time

    async def settle_down(self, rounds: int = 8) -> None:
        """Let all pending work finish: alternate between the store's thread and the event loop."""
        for _ in range(rounds):
            await self.database.read(_nothing)
            for _ in range(4):
                await asyncio.sleep(0)

    async def let_pass(self, seconds: float) -> None:
        """Advance the clock and run what is due."""
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(seconds)
        await self.do_what_is_due()

    async def do_what_is_due(self) -> None:
        if isinstance(self.broker.wrapped, SqliteBroker):
            self.broker.wrapped.look_at_the_clock()
        await self.settle_down(2)
        while (wait := self.context.deadlines.tick()) is not None and wait <= 0.0:
            await self.settle_down(1)
        await self.settle_down()


@asynccontextmanager
async def open_world(
    folder: Path,
    *,
    amqp_url: str | None = None,
    clock: ManualClock | SystemClock | None = None,
    anonymous: bool = False,
    buffer_bytes_max: int = 64 * 1024 * 1024,
    idle_return_seconds: float = 30.0,
    dedup_seconds: float = 300.0,
    queues: int = 1,
) -> AsyncGenerator[World]:
    """Open a started world in `folder`, on the embedded broker unless a RabbitMQ is given; stop it at the end.

    Raises, at the end: any exception of a background task.
    """
    world = await start_world(
        folder,
        amqp_url=amqp_url,
        clock=clock,
        anonymous=anonymous,
        buffer_bytes_max=buffer_bytes_max,
        idle_return_seconds=idle_return_seconds,
        dedup_seconds=dedup_seconds,
        queues=queues,
    )
    try:
        yield world
    finally:
        await stop_world(world)
    if world.failures:
        raise world.failures[0]


async def start_world(
    folder: Path,
    *,
    amqp_url: str | None = None,
    clock: ManualClock | SystemClock | None = None,
    anonymous: bool = False,
    buffer_bytes_max: int = 64 * 1024 * 1024,
    idle_return_seconds: float = 30.0,
    dedup_seconds: float = 300.0,
    queues: int = 1,
    store: LeaseStore | None = None,
) -> World:
    """Start a world in `folder`. Its leases are in `store` if one is given, otherwise in the folder."""
    failures: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: failures.append(context.get("exception") or RuntimeError(context["message"]))
    )
    clock = clock or SystemClock()
    faults, background, journal = Faults(), Background(failures.append), ListJournal()
    database = Database(folder / DATABASE_FILE, clock)
    await database.open()
    wrapped: Broker = SqliteBroker(database)
    if amqp_url is not None:
        options = RabbitOptions(amqp_urls=(amqp_url,), heartbeat_seconds=5, reconnect_seconds_max=0.5)
        wrapped = RabbitBroker(options, IdentityKeys([SECRET]))
    broker = FaultyBroker(wrapped, faults, anonymous=anonymous)
    records = LatestRecords()
    leases = FaultyLeaseStore(store or SqliteLeaseStore(database, records), faults)
    context = make_context(
        EngineOptions(
            instance=f"i{next(_instances)}.",
            secrets=[SECRET],
            auto_create=True,
            auto_create_queues=queues,
            buffer_bytes_max=buffer_bytes_max,
            idle_return_seconds=idle_return_seconds,
            dedup_seconds=dedup_seconds,
        ),
        broker=broker,
        leases=leases,
        dedup=FaultyDedupStore(SqliteDedupStore(database), faults),
        lease_groups=SqliteLeaseGroups(database, records),
        assignments=FaultyAssignments(SqliteAssignments(database), faults),
        catalog=SqliteCatalog(database),
        journal=journal,
        clock=clock,
        background=background,
    )
    engine = Engine(context)
    await broker.start()
    await engine.start()
    return World(
        clock=clock,
        database=database,
        broker=broker,
        leases=leases,
        faults=faults,
        engine=engine,
        context=context,
        journal=journal,
        failures=failures,
    )


async def stop_world(world: World) -> None:
    """Stop it as a signal would."""
    await world.engine.stop()
    await world.broker.stop()
    await world.database.close()


async def crash(world: World, folder: Path, target: Path) -> None:
    """Leave in `target` what a SIGKILL at this moment would leave in `folder`; the world is unusable afterwards.

    The store's thread is stopped meanwhile, between two commits.
    """
    stopped, go_on = threading.Event(), threading.Event()

    def stand_still(_: sqlite3.Connection) -> None:
        stopped.set()
        go_on.wait(PATIENCE_SECONDS)

    standing = asyncio.ensure_future(world.database.read(stand_still))
    await asyncio.sleep(0)
    stopped.wait(PATIENCE_SECONDS)
    shutil.copytree(folder, target)
    go_on.set()
    await standing
    await stop_world(world)


async def eventually(holds: Callable[[], bool]) -> None:
    """Return as soon as `holds` does. Raises: TimeoutError."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)


async def read_queue(broker: Broker, layout: Layout) -> list[Message]:
    """Return the content of the dead-letter queue of `layout` without changing it."""
    found = _Reader()
    channel = await broker.consume(layout.dead, layout, PREFETCH_MAX, found)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                if not await channel.backlog():
                    return found.messages
                await asyncio.sleep(0.001)
    finally:
        await channel.close()


class _Reader:
    def __init__(self) -> None:
        self.messages: list[Message] = []

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self.messages += [delivery.message for delivery in deliveries]

    def on_channel_lost(self, reason: str, *, queue_gone: bool) -> None:
        raise AssertionError(f"the queue could not be read: {reason}")


def body_of(message: Message) -> str:
    return message.body.decode()


def bodies(leased: Sequence[Leased]) -> list[str]:
    return [body_of(one.message) for one in leased]


def _nothing(_: sqlite3.Connection) -> None:
    pass
