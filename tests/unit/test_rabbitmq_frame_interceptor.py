"""The frame interceptor: which frames it takes from a connection, which it passes, and what ends it."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pamqp.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import FrameTypes
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat

from popgate.adapters.rabbitmq.channel_parser import CloseReason, Confirm, RawDelivery
from popgate.adapters.rabbitmq.frame_interceptor import JOINED_BYTES_MAX, FrameInterceptor

HEARTBEAT = Heartbeat().marshal()


class Told:
    """A handler that records everything, in order."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.raw: list[RawDelivery] = []

    def on_deliveries(self, deliveries: list[RawDelivery]) -> None:
        self.raw += deliveries
        self.log += [("delivery", tag, redelivered, body) for _, tag, redelivered, _, _, body in deliveries]

    def on_confirms(self, confirms: list[Confirm]) -> None:
        self.log += confirms

    def on_returned(self, reason: CloseReason, properties: bytes) -> None:
        self.log.append(("returned", reason, properties))

    def on_cancelled(self) -> None:
        self.log.append("cancelled")

    def on_closed(self, reason: CloseReason) -> None:
        self.log.append(reason)


class Line:
    """An interceptor under test. It must be made while an event loop runs."""

    def __init__(self) -> None:
        self.ends: list[CloseReason] = []
        self.blocked: list[str | None] = []
        self.now = 100.0
        self.interceptor = FrameInterceptor(
            on_end=self.ends.append, on_blocked=self.blocked.append, now=lambda: self.now
        )

    def handler(self, channel: int) -> Told:
        told = Told()
        self.interceptor.attach(channel, told)
        return told

    async def through(self) -> bytes:
        """Return what aiormq would have got, without heartbeats."""
        if not self.interceptor.at_eof():
            self.interceptor.feed_eof()
        return (await self.interceptor.read()).replace(HEARTBEAT, b"")


def frames(channel: int, *values: FrameTypes) -> bytes:
    return b"".join(pamqp.frame.marshal(value, channel) for value in values)


def content(body: bytes, frame_size: int = 1000) -> list[FrameTypes]:
    parts = [body[start : start + frame_size] for start in range(0, len(body), frame_size)]
    return [ContentHeader(body_size=len(body)), *[ContentBody(part) for part in parts]]


def delivery(channel: int, tag: int, body: bytes, frame_size: int = 1000) -> bytes:
    deliver = commands.Basic.Deliver("consumer", tag, tag % 2 == 0, "exchange", "key")
    return frames(channel, deliver, *content(body, frame_size))


def returned(channel: int, body: bytes) -> bytes:
    return frames(channel, commands.Basic.Return(312, "NO_ROUTE", "exchange", "key"), *content(body))


def chunks(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


@given(st.lists(st.integers(0, 10**6), max_size=60), st.integers(1, 50))
def test_it_makes_no_difference_how_the_bytes_arrive(cuts: list[int], frame_size: int) -> None:
    ours = [
        delivery(1, 1, b"a" * 100, frame_size),
        delivery(1, 2, b"", frame_size),
        frames(1, commands.Basic.Ack(7, True), commands.Basic.Nack(8)),
        delivery(2, 1, b"other channel", frame_size),
        returned(1, b"lost"),
        delivery(1, 3, b"c" * 333, frame_size),
    ]
    others = [
        frames(1, commands.Queue.DeclareOk("q", 1, 2)),
        frames(0, Heartbeat()),
        delivery(3, 1, b"no handler here", frame_size),
        frames(2, commands.Basic.QosOk()),
        frames(3, commands.Basic.Ack(1)),
        frames(0, commands.Connection.Blocked("low on memory")),
    ]
    data = b"".join(own + other for own, other in zip(ours, others, strict=True))

    async def run() -> None:
        line = Line()
        one, two = line.handler(1), line.handler(2)
        for chunk in chunks(data, cuts):
            line.interceptor.feed_data(chunk)
        assert [(tag, body) for _, tag, _, _, _, body in one.raw] == [(1, b"a" * 100), (2, b""), (3, b"c" * 333)]
        assert one.log.count(("returned", CloseReason(312, "NO_ROUTE"), b"\x00\x00")) == 1
        assert [entry for entry in one.log if entry in ((7, True, True), (8, False, False))] == [
            (7, True, True),
            (8, False, False),
        ]
        assert two.log == [("delivery", 1, 0, b"other channel")]
        assert line.blocked == ["low on memory"]
        assert await line.through() == b"".join(others).replace(HEARTBEAT, b"")

    asyncio.run(run())


async def test_deliveries_come_as_they_are_on_the_wire() -> None:
    line = Line()
    handler = line.handler(5)
    line.interceptor.feed_data(delivery(5, 2**40, b"body"))
    assert handler.raw == [(b"consumer", 2**40, 1, b"\x08exchange\x03key", b"\x00\x00", b"body")]


async def test_a_return_is_told_before_its_confirm() -> None:
    line = Line()
    handler = line.handler(1)
    line.interceptor.feed_data(returned(1, b"lost") + frames(1, commands.Basic.Ack(1)))
    assert handler.log == [("returned", CloseReason(312, "NO_ROUTE"), b"\x00\x00"), (1, False, True)]


async def test_a_body_in_many_small_pieces_arrives_whole_and_in_linear_time() -> None:
    line = Line()
    handler = line.handler(1)
    body = bytes(range(256)) * (16 * 1024 * 1024 // 256)
    line.interceptor.feed_data(frames(0, commands.Connection.Tune(2047, 131_072, 5)))
    data = delivery(1, 1, body, 131_064)
    started = asyncio.get_running_loop().time()
    for start in range(0, len(data), 4096):
        line.interceptor.feed_data(data[start : start + 4096])
    assert asyncio.get_running_loop().time() - started < 2
    assert handler.log == [("delivery", 1, 0, body)]


async def test_contents_of_different_channels_may_interleave() -> None:
    line = Line()
    one, two = line.handler(1), line.handler(2)
    first = [pamqp.frame.marshal(value, 1) for value in content(b"1" * 3000)]
    second = [pamqp.frame.marshal(value, 2) for value in content(b"2" * 3000)]
    deliver = commands.Basic.Deliver("c", 1, False, "", "q")
    line.interceptor.feed_data(frames(1, deliver) + frames(2, deliver))
    for pair in zip(first, second, strict=True):
        line.interceptor.feed_data(b"".join(pair))
    assert one.log == [("delivery", 1, 0, b"1" * 3000)]
    assert two.log == [("delivery", 1, 0, b"2" * 3000)]


# ---------------------------------------------------------------- ends


async def test_a_channel_that_the_broker_closes_hears_of_it_after_its_deliveries_and_nothing_more() -> None:
    line = Line()
    handler = line.handler(1)
    close = frames(1, commands.Channel.Close(406, "timed out", 0, 0))
    line.interceptor.feed_data(delivery(1, 1, b"last") + close)
    assert handler.log == [("delivery", 1, 0, b"last"), CloseReason(406, "timed out")]
    assert line.interceptor.ended is None
    assert await line.through() == close
    assert len(handler.log) == 2


async def test_a_discarded_channel_drops_its_traffic_until_its_end_is_confirmed() -> None:
    line = Line()
    handler = line.handler(1)
    line.interceptor.feed_data(delivery(1, 1, b"half" * 100)[:150])
    line.interceptor.discard(1)
    close_ok = frames(1, commands.Channel.CloseOk())
    line.interceptor.feed_data(delivery(1, 1, b"half" * 100)[150:] + delivery(1, 2, b"late") + close_ok)
    assert handler.log == []
    successor = line.handler(1)
    line.interceptor.feed_data(delivery(1, 1, b"of the next channel"))
    assert successor.log == [("delivery", 1, 0, b"of the next channel")]
    assert await line.through() == close_ok


async def test_a_cancelled_consumer_hears_of_it_after_its_deliveries() -> None:
    line = Line()
    handler = line.handler(1)
    cancel = frames(1, commands.Basic.Cancel("consumer", True))
    line.interceptor.feed_data(delivery(1, 1, b"last") + cancel)
    assert handler.log == [("delivery", 1, 0, b"last"), "cancelled"]
    assert await line.through() == cancel


async def test_a_closed_connection_ends_everything_once_with_the_brokers_words() -> None:
    line = Line()
    handler = line.handler(1)
    close = frames(0, commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0))
    line.interceptor.feed_data(delivery(1, 1, b"last") + close)
    reason = CloseReason(320, "CONNECTION_FORCED")
    assert handler.log == [("delivery", 1, 0, b"last"), reason]
    assert await line.through() == close
    line.interceptor.set_exception(ConnectionResetError("reset"))
    assert line.ends == [reason]
    assert len(handler.log) == 2
    assert line.handler(2).log == [reason]


async def test_the_end_of_the_stream_ends_everything() -> None:
    line = Line()
    handler = line.handler(1)
    line.interceptor.feed_data(delivery(1, 1, b"cut")[:-1])
    line.interceptor.feed_eof()
    assert handler.log == [CloseReason(0, "RabbitMQ closed the connection")]
    assert len(line.ends) == 1
    with pytest.raises(asyncio.IncompleteReadError):
        await line.interceptor.readexactly(1000)


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"AMQP\x00\x00\x09\x01",
        b"\x05\x00\x01\x00\x00\x00\x00\xce",
        frames(1, commands.Basic.QosOk())[:-1] + b"\x00",
        b"\x01\x00\x01\x7f\xff\xff\xff\x00",
        frames(1, ContentHeader(body_size=1)),
        frames(1, ContentBody(b"x")),
        frames(1, commands.Basic.Deliver("c", 1, False, "", "q"), ContentBody(b"x")),
        frames(1, commands.Basic.Deliver("c", 1, False, "", "q")) * 2,
        frames(1, commands.Basic.Deliver("c", 1, False, "", "q"), *[ContentHeader(body_size=1)] * 2),
        frames(1, commands.Basic.Deliver("c", 1, False, "", "q"), ContentHeader(body_size=1), ContentBody(b"xx")),
        b"\x01\x00\x01\x00\x00\x00\x04\x00\x3c\x00\x3c\xce",
    ],
)
async def test_what_amqp_does_not_allow_ends_the_connection(data: bytes) -> None:
    line = Line()
    handler = line.handler(1)
    line.interceptor.feed_data(data)
    line.interceptor.feed_data(delivery(1, 1, b"ignored"))
    assert len(line.ends) == 1
    assert "malformed frame" in line.ends[0].text
    assert handler.log == line.ends
    with pytest.raises(ConnectionError):
        await line.interceptor.read()


async def test_a_frame_larger_than_agreed_ends_the_connection() -> None:
    line = Line()
    line.handler(1)
    line.interceptor.feed_data(frames(0, commands.Connection.Tune(2047, 4096, 5)))
    line.interceptor.feed_data(b"\x03\x00\x01" + (5000).to_bytes(4, "big"))
    assert line.ends == []
    line.interceptor.feed_data(b"x")
    assert "4096" in line.ends[0].text


# ---------------------------------------------------------------- heartbeats and backpressure


async def test_aiormq_sees_a_sign_of_life_while_all_traffic_is_taken_off() -> None:
    line = Line()
    line.handler(1)
    for line.now in (100.0, 100.1, 100.9, 101.2, 101.3, 103.0):
        line.interceptor.feed_data(delivery(1, 1, b"busy"))
    line.interceptor.feed_eof()
    assert await line.interceptor.read() == HEARTBEAT * 3


async def test_no_sign_of_life_is_made_up_when_nothing_arrives_whole() -> None:
    line = Line()
    line.handler(1)
    line.interceptor.feed_data(delivery(1, 1, b"busy")[:5])
    line.interceptor.feed_eof()
    assert HEARTBEAT not in await line.interceptor.read()


async def test_what_is_fed_through_still_holds_the_sender_back() -> None:
    line = Line()

    class Transport(asyncio.Transport):
        paused = 0

        def pause_reading(self) -> None:
            self.paused += 1

    transport = Transport()
    line.interceptor.set_transport(transport)
    line.interceptor.feed_data(delivery(9, 1, b"x" * 200_000, 100_000))
    assert transport.paused == 1


class Wire(asyncio.Transport):
    """A transport that records what is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return True

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))


def wired() -> tuple[FrameInterceptor, Wire]:
    interceptor, wire = Line().interceptor, Wire()
    protocol = asyncio.StreamReaderProtocol(interceptor)
    interceptor.own_writer(asyncio.StreamWriter(wire, protocol, interceptor, asyncio.get_running_loop()))
    return interceptor, wire


async def test_frames_of_one_turn_share_a_write_before_any_answer_to_them_is_read() -> None:
    interceptor, wire = wired()
    told: list[list[bytes]] = []
    interceptor.write_soon(b"a")
    asyncio.get_running_loop().call_soon(lambda: told.append(list(wire.written)))
    interceptor.write_soon(b"b")
    assert wire.written == []
    assert interceptor.unsent_bytes == 2
    await asyncio.sleep(0)
    assert told == [[b"ab"]]
    assert interceptor.unsent_bytes == 0


async def test_joined_frames_keep_their_place_before_later_writes() -> None:
    interceptor, wire = wired()
    interceptor.write_soon(b"a")
    interceptor.write(b"b")
    interceptor.write_soon(b"c")
    await interceptor.drain()
    large = b"d" * JOINED_BYTES_MAX
    interceptor.write_soon(large)
    assert wire.written == [b"a", b"b", b"c", large]
    await asyncio.sleep(0)
    assert len(wire.written) == 4


async def test_joined_frames_are_dropped_if_the_connection_ends_before_they_are_written() -> None:
    interceptor, wire = wired()
    interceptor.write_soon(b"a")
    interceptor.end(CloseReason(0, "lost"))
    await asyncio.sleep(0)
    assert wire.written == []


async def test_alarms_are_told_and_fed_through() -> None:
    line = Line()
    alarms = frames(0, commands.Connection.Blocked("low on memory"), commands.Connection.Unblocked())
    line.interceptor.feed_data(alarms)
    assert line.blocked == ["low on memory", None]
    assert await line.through() == alarms
