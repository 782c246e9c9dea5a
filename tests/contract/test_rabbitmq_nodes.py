"""A popgate that knows several nodes of one RabbitMQ: which one it uses, and how soon it leaves a lost one.

The nodes are lines to one real RabbitMQ: each can be cut, refuse, or hang, like a killed or paused node. tests/cluster
covers RabbitMQ's own cluster.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from yarl import URL

from contract.brokers import KEYS, rabbit_broker
from contract.recorder import Recorder, declare, layout, publish
from popgate.adapters.rabbitmq.broker import RabbitBroker
from popgate.adapters.rabbitmq.lock_connection import RabbitLockConnection
from popgate.adapters.rabbitmq.options import RabbitOptions
from popgate.domain.errors import BrokerUnavailable, StartupError
from support.processes import PortBlock

pytestmark = pytest.mark.rabbitmq_versions

BILLING = layout("billing")
QUEUE = BILLING.queues[0]
CONNECTIONS = 2
"""Number of connections of a broker: one consumes, one publishes."""
AT_ONCE_SECONDS = 1.0
NEVER_SECONDS = 60.0
"""Seconds; longer than any test waits: a pause of that length would be noticed."""


class Line:
    """Leads to RabbitMQ while it is `up`; otherwise it refuses. While it is `frozen`, no data passes in either
    direction.
    """

    def __init__(self, far_port: int) -> None:
        self._ports = PortBlock()  # not one that the system may give to another program while the line is down
        self.port = self._ports.ports[0]
        self.taken = 0
        """Number of connections accepted so far."""
        self._far_port = far_port
        self._moving = asyncio.Event()
        self._moving.set()
        self._server: asyncio.Server | None = None
        self._carriers: set[asyncio.Task[None]] = set()

    async def raise_up(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Cut every connection, and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        carriers = list(self._carriers)
        for carrier in carriers:
            carrier.cancel()
        await asyncio.gather(*carriers, return_exceptions=True)

    def freeze(self) -> None:
        self._moving.clear()

    def thaw(self) -> None:
        self._moving.set()

    async def _carry(self, near: asyncio.StreamReader, near_writer: asyncio.StreamWriter) -> None:
        carrier = asyncio.current_task()
        assert carrier is not None
        self._carriers.add(carrier)
        try:
            await self._moving.wait()
            far, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
            self.taken += 1
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._pump(near, far_writer))
                    tasks.create_task(self._pump(far, near_writer))
            finally:
                far_writer.close()
        except* (OSError, asyncio.CancelledError):
            pass  # a stream server reports how its tasks end
        finally:
            self._carriers.discard(carrier)
            near_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            await self._moving.wait()
            writer.write(data)
            await writer.drain()
        writer.close()


class Lines:
    """Three nodes of one RabbitMQ, as a popgate sees them."""

    def __init__(self, amqp_url: str) -> None:
        self.url = URL(amqp_url)
        port = self.url.port
        assert port is not None
        self.all = [Line(port) for _ in range(3)]

    def options(self, **more: float) -> RabbitOptions:
        urls = tuple(str(self.url.with_port(line.port)) for line in self.all)
        return RabbitOptions(amqp_urls=urls, **more)  # type: ignore[arg-type]

    def address(self, number: int) -> str:
        return f"127.0.0.1:{self.all[number].port}"

    def taken(self) -> list[int]:
        return [line.taken for line in self.all]


@pytest.fixture
async def lines(amqp_url: str) -> AsyncIterator[Lines]:
    lines = Lines(amqp_url)
    for line in lines.all:
        await line.raise_up()
    yield lines
    for line in lines.all:
        await line.cut()


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Return what was logged; it must contain no credential."""
    caplog.set_level(logging.INFO, "popgate")
    yield caplog
    for record in caplog.records:
        assert "guest" not in f"{record.getMessage()} {vars(record)}"


def connected(told: pytest.LogCaptureFixture) -> list[str]:
    """Return the addresses of the connections, in order."""
    return [vars(one)["address"] for one in told.records if one.getMessage().startswith("connected to RabbitMQ")]


@asynccontextmanager
async def moved_within(broker: RabbitBroker, seconds: float) -> AsyncGenerator[None]:
    """End the broker's connections inside the block; it must work again within that many seconds of the beginning."""
    began = time.monotonic()
    yield
    async with asyncio.timeout(seconds + 10):
        while broker.unavailable_reason() is None:  # noqa: ASYNC110 - the port has no event for it
            await asyncio.sleep(0.005)
        while broker.unavailable_reason() is not None:  # noqa: ASYNC110 - the port has no event for it
            await asyncio.sleep(0.005)
    assert time.monotonic() - began < seconds


# ---------------------------------------------------------------- at start


async def test_the_first_node_is_preferred(lines: Lines, told: pytest.LogCaptureFixture) -> None:
    async with rabbit_broker(lines.options()):
        assert lines.taken() == [CONNECTIONS, 0, 0]
    assert connected(told) == [lines.address(0)] * CONNECTIONS


async def test_a_node_that_refuses_and_one_that_hangs_are_passed_over(
    lines: Lines, told: pytest.LogCaptureFixture
) -> None:
    await lines.all[0].cut()
    lines.all[1].freeze()
    began = time.monotonic()
    async with rabbit_broker(lines.options(next_node_seconds=0.5, connect_timeout_seconds=NEVER_SECONDS)):
        assert time.monotonic() - began < CONNECTIONS * 0.5 + AT_ONCE_SECONDS
        assert connected(told) == [lines.address(2)] * CONNECTIONS


async def test_where_none_can_be_used_each_is_named_with_its_reason(lines: Lines) -> None:
    await lines.all[0].cut()
    lines.all[1].freeze()
    await lines.all[2].cut()
    broker = RabbitBroker(lines.options(next_node_seconds=0.1, connect_timeout_seconds=0.4), KEYS)
    with pytest.raises(StartupError) as failed:
        await broker.start()
    await broker.stop()
    line = failed.value.detail
    assert "\n" not in line
    assert "guest" not in line
    assert line.startswith("no RabbitMQ node can be used: ")
    assert f"nothing listens on {lines.address(0)}" in line
    assert f"RabbitMQ at {lines.address(1)} did not answer within 0.4 s" in line
    assert f"nothing listens on {lines.address(2)}" in line


async def test_where_all_are_slow_they_are_given_time(lines: Lines) -> None:
    for line in lines.all:
        line.freeze()
    broker = RabbitBroker(lines.options(next_node_seconds=0.1, connect_timeout_seconds=20), KEYS)
    starting = asyncio.create_task(broker.start(), name="start on slow nodes")
    await asyncio.sleep(1.0)
    assert not starting.done()
    for line in lines.all:
        line.thaw()
    await starting
    assert broker.unavailable_reason() is None
    await broker.stop()


async def test_a_guard_that_others_hold_is_waited_for_once_not_at_every_node(lines: Lines, amqp_url: str) -> None:
    async with rabbit_broker(RabbitOptions(amqp_urls=(amqp_url,))):
        broker = RabbitBroker(lines.options(guard_wait_seconds=0), KEYS)
        with pytest.raises(StartupError, match="share no state"):
            await broker.start()
        await broker.stop()
    assert lines.taken() == [1, 0, 0]


# ---------------------------------------------------------------- after a loss


async def test_after_a_loss_the_next_node_is_tried_at_once_and_round_the_ring(
    lines: Lines, told: pytest.LogCaptureFixture
) -> None:
    async with rabbit_broker(lines.options(reconnect_seconds_min=NEVER_SECONDS)) as broker:
        await declare(broker, BILLING)
        for number in (0, 1, 2):
            listener = Recorder()
            await broker.consume(QUEUE, BILLING, 10, listener)
            async with moved_within(broker, AT_ONCE_SECONDS):
                await lines.all[number].cut()
            assert listener.ends
            assert connected(told)[-CONNECTIONS:] == [lines.address((number + 1) % 3)] * CONNECTIONS
            await publish(broker, [b"%d" % number])
            await lines.all[number].raise_up()


async def test_a_node_that_hangs_holds_up_the_way_to_the_next_one_only_shortly(lines: Lines) -> None:
    options = lines.options(
        reconnect_seconds_min=NEVER_SECONDS, connect_timeout_seconds=NEVER_SECONDS, next_node_seconds=0.5
    )
    async with rabbit_broker(options) as broker:
        lines.all[1].freeze()
        async with moved_within(broker, 0.5 + AT_ONCE_SECONDS):
            await lines.all[0].cut()
        assert lines.taken() == [CONNECTIONS, 0, CONNECTIONS]


async def test_the_node_that_was_lost_is_tried_again_after_the_others(
    lines: Lines, told: pytest.LogCaptureFixture
) -> None:
    async with rabbit_broker(lines.options(reconnect_seconds_max=0.2)) as broker:
        for line in lines.all:
            await line.cut()
        while (reason := broker.unavailable_reason()) is None or lines.address(0) not in reason:  # noqa: ASYNC110 - the port has none
            await asyncio.sleep(0.02)
        assert reason.startswith("no RabbitMQ node can be used: ")
        await asyncio.sleep(0.5)
        failed = [one for one in told.records if one.getMessage() == "no connection to RabbitMQ yet"]
        assert len(failed) <= CONNECTIONS * 2, "the others, then all: what stays as it is is told once"
        async with moved_within(broker, AT_ONCE_SECONDS):
            await lines.all[0].raise_up()
        assert connected(told)[-1] == lines.address(0)


async def test_nobody_goes_back_to_a_node_because_it_is_preferred(lines: Lines) -> None:
    async with rabbit_broker(lines.options(reconnect_seconds_max=0.1)) as broker:
        async with moved_within(broker, AT_ONCE_SECONDS):
            await lines.all[0].cut()
        await lines.all[0].raise_up()
        await asyncio.sleep(0.5)
        assert lines.taken() == [CONNECTIONS, CONNECTIONS, 0]


async def test_a_node_that_stands_still_is_left_after_two_heartbeats_and_what_waited_for_it_is_told(
    lines: Lines, told: pytest.LogCaptureFixture
) -> None:
    async with rabbit_broker(lines.options(heartbeat_seconds=1, reconnect_seconds_min=NEVER_SECONDS)) as broker:
        await declare(broker, BILLING)
        listener = Recorder()
        await broker.consume(QUEUE, BILLING, 10, listener)
        async with moved_within(broker, 2 + AT_ONCE_SECONDS):
            lines.all[0].freeze()
            waiting = asyncio.create_task(broker.depth([QUEUE]), name="depth of a hung node")
            with contextlib.suppress(BrokerUnavailable):
                await publish(broker, [b"into the void"])
            _, queue_gone = await listener.until_lost()
            assert not queue_gone
            with pytest.raises(BrokerUnavailable):
                await waiting
        # Not what the lines have taken: a partition detector may have asked another node about the one that hangs.
        assert connected(told) == [lines.address(0)] * CONNECTIONS + [lines.address(1)] * CONNECTIONS
        await broker.consume(QUEUE, BILLING, 10, Recorder())


async def test_a_quiet_connection_is_not_taken_for_a_dead_one(lines: Lines) -> None:
    async with rabbit_broker(lines.options(heartbeat_seconds=1)):
        await asyncio.sleep(4)
        assert lines.taken() == [CONNECTIONS, 0, 0]


async def test_the_connection_of_the_locks_moves_as_well(lines: Lines) -> None:
    connection = RabbitLockConnection(lines.options(reconnect_seconds_min=NEVER_SECONDS))
    await connection.start()
    try:
        await lines.all[0].cut()
        async with asyncio.timeout(AT_ONCE_SECONDS):
            while lines.taken() != [1, 1, 0]:  # noqa: ASYNC110 - the port has no event for it
                await asyncio.sleep(0.01)
    finally:
        await connection.stop()
