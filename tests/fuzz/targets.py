"""The fuzzing targets: each takes bytes from an untrusted sender, and must neither raise nor hang.

A target has valid inputs, from which the mutations begin. An error that its interface documents is an answer;
everything else is a find.
"""

import asyncio
import json
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import orjson
import pamqp.frame
import uvicorn
from pamqp import commands
from pamqp.body import ContentBody
from pamqp.frame import FrameTypes
from pamqp.header import ContentHeader
from pamqp.heartbeat import Heartbeat
from starlette.types import ASGIApp

from popgate.adapters.journal_parquet.rows import SharedRows
from popgate.adapters.journal_parquet.tables import Call, batch_of, readable
from popgate.adapters.rabbitmq import properties
from popgate.adapters.rabbitmq.channel_parser import CloseReason, Confirm, RawDelivery
from popgate.adapters.rabbitmq.frame_interceptor import FrameInterceptor
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.api import native
from popgate.api.app import build_app
from popgate.api.arrow import ArrowEncoder
from popgate.api.formats import as_text
from popgate.api.server import server_config
from popgate.domain.dead_letter import bare, dead_letter_details, packed, unpacked
from popgate.domain.errors import PopgateError
from popgate.domain.identity import IdentityKeys, TagChecker
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, GroupName, InstanceId, LeaseId, QueueId, Subscription, TopicName
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.engine.lease.pop_request import Leased
from popgate.engine.lease_groups.slices import GroupMessage
from popgate.journal.counters import EventCounters
from popgate.locks.embedded import EmbeddedArbiter
from popgate.locks.hosted import HostedLocks
from popgate.ports.journal import EventKind
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock
from popgate.wire.codec import CODEC
from support.engines import open_world
from unit.test_wire import EXAMPLES

Feed = Callable[[bytes], Awaitable[None]]

SECRET = b"the secret of the fuzzers"
QUEUE = BrokerQueue("popgate:orders:billing:0")
SUBSCRIPTION = Subscription(TopicName("orders"), GroupName("billing"))
EXPECTED_PROBLEMS = ("", "a copy id was rejected", "ValueError", "IndexError", "error", "UnicodeDecodeError")
DOCUMENTED = frozenset({200, 201, 202, 400, 403, 404, 405, 406, 408, 409, 411, 413, 414, 415, 429, 431, 507})
"""Statuses that any request may get; also 503, if the proxy says when to retry."""


class Target(NamedTuple):
    """``seeds`` are valid inputs; ``opened`` yields a function that takes an input, and raises for a find."""

    name: str
    seeds: Sequence[bytes]
    opened: Callable[[Path], Any]


# ---------------------------------------------------------------- AMQP


class _Handler:
    """Decodes deliveries, as a channel does, and notes its errors, because the interceptor survives them."""

    def __init__(self) -> None:
        self.finds: list[Exception] = []
        self._check_tag = IdentityKeys([SECRET]).checker(QUEUE)

    def on_deliveries(self, deliveries: list[RawDelivery]) -> None:
        for _, _, _, routing, raw, body in deliveries:
            try:
                _decoded(raw, body, routing, self._check_tag)
            except Exception as error:
                self.finds.append(error)

    def on_confirms(self, confirms: list[Confirm]) -> None:
        pass

    def on_returned(self, reason: CloseReason, properties: bytes) -> None:
        pass

    def on_cancelled(self) -> None:
        pass

    def on_closed(self, reason: CloseReason) -> None:
        pass


def _decoded(raw: bytes, body: bytes, routing: bytes | None, check_tag: TagChecker, *, notes: bool = False) -> Message:
    """Return the message. Wrong properties must cause an error that the decoder expects."""
    decoded = properties.decode(raw, body, routing, check_tag=check_tag, unique_message_ids=True, notes=notes)
    is_expected = decoded.problem.partition(":")[0] in EXPECTED_PROBLEMS
    assert is_expected, decoded.problem
    return decoded.message


def _frames(channel: int, *values: FrameTypes) -> bytes:
    return b"".join(pamqp.frame.marshal(value, channel) for value in values)


def _content(body: bytes, **fields: Any) -> list[FrameTypes]:
    made = commands.Basic.Properties(**fields)
    return [ContentHeader(body_size=len(body), properties=made), ContentBody(body)]


AMQP_SEEDS = [
    _frames(1, commands.Basic.Deliver("consumer", 1, False, "exchange", "key"), *_content(b"body", headers={"a": 1})),
    _frames(1, commands.Basic.Deliver("c", 2, True, "", "key"), ContentHeader(body_size=0)),
    _frames(1, commands.Basic.Return(312, "NO_ROUTE", "exchange", "key"), *_content(b"body")),
    _frames(1, commands.Basic.Ack(7, True), commands.Basic.Nack(8), commands.Basic.Cancel("consumer")),
    _frames(1, commands.Queue.DeclareOk("q", 1, 2)) + _frames(0, Heartbeat(), commands.Connection.Blocked("memory")),
    _frames(1, commands.Channel.Close(406, "PRECONDITION_FAILED", 0, 0)),
    _frames(0, commands.Connection.Close(320, "CONNECTION_FORCED", 0, 0)),
]


@asynccontextmanager
async def _amqp_frames(folder: Path) -> AsyncGenerator[Feed]:
    async def feed(data: bytes) -> None:
        interceptor, handler = FrameInterceptor(on_end=_ignore, on_blocked=_ignore, now=lambda: 1.0), _Handler()
        for channel in (1, 2):
            interceptor.attach(channel, handler)
        middle = len(data) // 2
        interceptor.feed_data(data[:middle])
        interceptor.feed_data(data[middle:])
        interceptor.feed_eof()
        if handler.finds:
            raise handler.finds[0]

    yield feed


def _ignore(_: object) -> None:
    pass


def _own_properties(**fields: Any) -> bytes:
    message = Message(CopyId(f"{7:032x}"), "m", b"", {"n": 1}, "k", 1.5)._replace(**fields)
    return properties.encode(message, IdentityKeys([SECRET]).signer(QUEUE)(message.copy_id))


def _properties(**fields: Any) -> bytes:
    return ContentHeader(body_size=4, properties=commands.Basic.Properties(**fields)).marshal()[12:]


PROPERTY_SEEDS = [
    _own_properties(),
    _own_properties(visible_at=2.5, expires_at=3.5, headers={"amqp-type": "t", "CC": "x", "deep": [{"a": [None]}]}),
    _properties(headers={"a": 1, "b": [1, {"c": True}], "d": bytearray(b"\xff"), "e": 1.5}, message_id="m", priority=3),
    _properties(content_type="text/plain", correlation_id="c", reply_to="r", expiration="5", app_id="x", user_id="u"),
    _properties(headers={"x-death": [{"count": 1, "queue": "q"}], "x-delivery-count": 2, "x-acquired-count": 3}),
]


@asynccontextmanager
async def _amqp_properties(folder: Path) -> AsyncGenerator[Feed]:
    """Pass a message from its delivery to answers, the journal and the dead letters."""
    check_tag, tag = IdentityKeys([SECRET]).checker(QUEUE), IdentityKeys([SECRET]).signer(QUEUE)
    numbers = count()
    to_json, to_msgpack = msgspec.json.Encoder(enc_hook=as_text), msgspec.msgpack.Encoder(enc_hook=as_text)

    async def feed(data: bytes) -> None:
        for notes in (False, True):
            message = _decoded(data, b"body", b"\x01xkey", check_tag, notes=notes)
            leased = Leased(message, message.message_id, "handle", 0, 1, 1.0, 2.0)
            to_json.encode(native.popped_in_json(leased))
            to_msgpack.encode(native.popped_packed(leased))
            if next(numbers) % ARROW_EACH == 0:
                ArrowEncoder(as_text, _no_find).part([GroupMessage(0, message, 0, 1, 1.0)])
                _to_journal(message)
            note = dead_letter_details(message.headers)
            orjson.dumps([note, unpacked(message).headers, bare(message).headers], default=str)
            for letter in (message, packed(message), bare(message)):
                try:
                    properties.encode(letter._replace(copy_id=CopyId("c")), tag("c"))
                except ValueError:
                    assert letter is not bare(message), "a bare letter can always be published"

    yield feed


def _no_find(queue: int, message: Message, error: Exception) -> None:
    raise AssertionError(f"a message can't be shown: {error!r}") from error


class _Subject(NamedTuple):
    copy_id: CopyId
    message: Message | None
    queue_index: int = 0
    delivery_count: int = 1
    leased_at: float = 1.0
    client: str | None = None
    invisibility_seconds: float = 0.0


def _to_journal(message: Message) -> None:
    values, first = SharedRows().of(EventKind.DELIVERED, SUBSCRIPTION, [_Subject(message.copy_id, message)])
    call = Call(1, EventKind.DELIVERED, *SUBSCRIPTION, 1.0, 1, values, first, (), (), ())
    batch_of([readable(call)], "proxy")


# ---------------------------------------------------------------- receipts and peers


@asynccontextmanager
async def _receipts(folder: Path) -> AsyncGenerator[Feed]:
    signer = ReceiptSigner([SECRET])

    async def feed(data: bytes) -> None:
        text = data.decode("latin-1")
        assert signer.verify(text) is None or data in RECEIPT_SEEDS, "a forged receipt handle"

    yield feed


RECEIPT_SEEDS = [
    ReceiptSigner([SECRET]).sign(Receipt(QueueId(*SUBSCRIPTION, number), LeaseId("l"), 3, CopyId(copy))).encode()
    for number, copy in ((0, "c"), (255, "x" * 200))
]
PEER_SEEDS = [CODEC.encode_message(1, InstanceId("me"), message) for message, _ in EXAMPLES] + [
    CODEC.encode_answer(1, message, answer) for message, answer in EXAMPLES
]


@asynccontextmanager
async def _peers(folder: Path) -> AsyncGenerator[Feed]:
    async def feed(data: bytes) -> None:
        for read in (CODEC.decode_message, *(_answer_to(message) for message, _ in EXAMPLES)):
            with suppress(PopgateError):
                read(data)

    yield feed


def _answer_to(message: Any) -> Callable[[bytes], object]:
    return lambda data: CODEC.decode_answer(message, data)


# ---------------------------------------------------------------- HTTP

BODIES: dict[str, Sequence[object]] = {
    "/v1/topics/t/messages": [
        {"messages": [{"body": "x", "headers": {"a": 1, "b": None}, "ordering_key": "k", "dedup_id": "d"}]},
        {"messages": [{"body_base64": "AA==", "delay_seconds": 1, "ttl_seconds": 5, "message_id": "m"}]},
    ],
    "/v1/topics/t/groups/default/pop": [
        {"max_messages": 2, "wait_seconds": 0, "invisibility_seconds": 1, "filter": {"a": [1, "x", None]}},
        {"attempt_id": "a", "client_id": "c"},
    ],
    "/v1/topics/t/groups/default/ack": [{"receipt_handles": ["x"]}],
    "/v1/topics/t/groups/default/extend": [{"entries": [{"receipt_handle": "x", "invisibility_seconds": 5}]}],
    "/v1/topics/t/groups/default/reject": [{"entries": [{"receipt_handle": "x", "reason": "bad"}]}],
    "/v1/locks/l/acquire": [{"holder": "h", "ttl_seconds": 1, "wait_seconds": 0}],
    "/v1/admin/topics/t/groups/default/dead-letters/redrive": [{"rate_per_second": 5, "wait_seconds": 0}],
}
ANSWER_SECONDS = 10
ARROW_EACH = 16
"""Arrow runs for one in this many inputs, because it takes that many times as long as everything else."""
_SEPARATOR = b"\x00\n"
"""Separates a path from the body that is sent there."""


def _http_seeds(encode: Callable[[object], bytes]) -> list[bytes]:
    return [path.encode() + _SEPARATOR + encode(body) for path, bodies in BODIES.items() for body in bodies]


@asynccontextmanager
async def _app(folder: Path) -> AsyncGenerator[ASGIApp]:
    """Open a proxy on an embedded store, without a socket."""
    async with AsyncExitStack() as stack:
        world = await stack.enter_async_context(open_world(folder))
        clock, background, file = SystemClock(), Background(), Database(folder / "locks" / "locks.db", SystemClock())
        await file.open()
        stack.push_async_callback(file.close)
        store = SqliteLockStore(file)
        arbiter = EmbeddedArbiter(store, clock, background)
        locks = HostedLocks(arbiter, store, clock, background, instance=InstanceId("i"), auto_create=True)
        await locks.start()
        stack.push_async_callback(locks.stop)
        yield build_app(world.engine, locks, EventCounters())


def _bodies(content_type: str) -> Callable[[Path], Any]:
    @asynccontextmanager
    async def opened(folder: Path) -> AsyncGenerator[Feed]:
        async with (
            _app(folder) as app,
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client,
        ):

            async def feed(data: bytes) -> None:
                path, _, body = data.partition(_SEPARATOR)
                known = path.decode("latin-1")
                target = known if known in BODIES else next(iter(BODIES))
                async with asyncio.timeout(ANSWER_SECONDS):
                    answer = await client.post(target, content=body, headers={"content-type": content_type})
                come_again = answer.status_code == 503 and "retry-after" in answer.headers
                assert answer.status_code in DOCUMENTED or come_again, (target, answer.status_code, answer.text[:300])

            yield feed

    return opened


REQUEST_SEEDS = [
    b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n",
    (
        b"POST /v1/topics/t/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 30\r\n\r\n"
        b'{"messages":[{"body":"abcd"}]}'
    ),
    (
        b"POST /v1/topics/t/groups/default/pop HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b'5\r\n{"max\r\n10\r\n_messages": 2}  \r\n0\r\n\r\n'
    ),
    b"GET /v1 HTTP/1.1\r\nhost: a\r\n\r\nGET /metrics?x=%ff HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
]


@asynccontextmanager
async def _requests(folder: Path) -> AsyncGenerator[Feed]:
    """Send whole requests over a socket: an exception in the server is found because it is logged."""
    finds: list[str] = []

    class Finder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            finds.append(record.getMessage())

    asyncio.get_running_loop().set_exception_handler(lambda _, context: finds.append(str(context)))
    logger, finder = logging.getLogger("uvicorn.error"), Finder(logging.ERROR)
    logger.setLevel(logging.ERROR)
    async with _app(folder) as app:
        server = uvicorn.Server(server_config(app, host="127.0.0.1", port=0))
        logger.addHandler(finder)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]), name="fuzzed server")
            port = listener.getsockname()[1]

            async def feed(data: bytes) -> None:
                answer = b""
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with suppress(ConnectionError):
                    writer.write(data)
                    writer.write_eof()
                    async with asyncio.timeout(ANSWER_SECONDS):
                        answer = await reader.read()
                writer.close()
                assert answer[:9] in (b"", b"HTTP/1.1 "), answer[:100]
                assert answer[9:12] != b"500", answer[:300]
                assert not finds, finds[0]

            try:
                yield feed
            finally:
                server.should_exit = True
                await serving
                logger.removeHandler(finder)


TARGETS = {
    target.name: target
    for target in (
        Target("amqp-frames", AMQP_SEEDS, _amqp_frames),
        Target("amqp-properties", PROPERTY_SEEDS, _amqp_properties),
        Target("receipts", RECEIPT_SEEDS, _receipts),
        Target("peers", PEER_SEEDS, _peers),
        Target("http-json", _http_seeds(lambda body: json.dumps(body).encode()), _bodies("application/json")),
        Target("http-requests", REQUEST_SEEDS, _requests),
        Target("http-msgpack", _http_seeds(msgspec.msgpack.encode), _bodies("application/msgpack")),
    )
}
logging.getLogger("httpx").setLevel(logging.WARNING)
