"""Each error of the server is raised as the right exception, with its fields."""

import asyncio
import gzip
import pickle
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from popgate_client import (
    AsyncClient,
    BrokerUnavailable,
    Client,
    Conflict,
    Forbidden,
    GroupNotFound,
    LeaseLost,
    LimitExceeded,
    Message,
    MessageTooLarge,
    NoSubscribers,
    NotSupported,
    OutgoingMessage,
    PopgateError,
    PublishResult,
    RequestInvalid,
    RetryLater,
    ServerFault,
    ServerUnreachable,
    SettleResult,
    StateUnavailable,
    TooManyInFlight,
    TopicNotFound,
    Unauthorized,
    WrongMode,
    locks,
)
from popgate_client.assignments import assign
from popgate_client.errors import error_from
from popgate_client.exchange import Exchange, Exchanges
from popgate_client.lock_terms import LockTerm
from popgate_client.locks import LockExchanges, LockGrant
from popgate_client.message import SettleEntry, Verb
from popgate_client.subscription_calls import SubscriptionCalls
from popgate_client.wire import Request
from support.processes import PortBlock
from support.proxy import ProxyProcess

TOO_LARGE = "x" * (16 * 1024 * 1024 + 1)


REFUSED: list[tuple[Callable[[Client], object], type[PopgateError], int, str | None]] = [
    (lambda client: client.pop("t", "g", 0), RequestInvalid, 400, "max_messages"),
    (lambda client: client.pop("t", "g", 257), RequestInvalid, 400, "max_messages"),
    (lambda client: client.pop("t", "g", wait_seconds=31), RequestInvalid, 400, "wait_seconds"),
    (lambda client: client.pop("not a name", "g"), RequestInvalid, 400, "topic"),
    (lambda client: client.pop("a/b", "g"), NotSupported, 404, None),
    (lambda client: client.publish("t", TOO_LARGE), MessageTooLarge, 413, "messages[0].body"),
    (lambda client: client.publish("t", "", OutgoingMessage(body="", message_id="")), RequestInvalid, 400,
     "messages[1].message_id"),
    (lambda client: client.publish("t", OutgoingMessage(body="", headers={"x": [1]})), RequestInvalid, 400, None),
    (lambda client: client.publish("t", OutgoingMessage(body="", dedup_id="")), RequestInvalid, 400,
     "messages[0].dedup_id"),
    (lambda client: client.put_group("t", "g", invisibility_seconds=0), RequestInvalid, 400,
     "invisibility_seconds"),
    (lambda client: client.put_topic("t", adopt=["none"]), Conflict, 409, None),
    (lambda client: client.stats("missing", "g"), TopicNotFound, 404, None),
    (lambda client: client.delete_topic("missing"), TopicNotFound, 404, None),
    (lambda client: client.delete_group("errors", "missing"), GroupNotFound, 404, None),
    (lambda client: client.ack("errors", "missing", "handle"), GroupNotFound, 404, None),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "status", "field"), REFUSED)
def test_a_refused_call_raises_what_to_do_about_it(
    client: Client, call: Callable[[Client], object], kind: type[PopgateError], status: int, field: str | None
) -> None:
    client.put_topic("errors", queues=1)
    with pytest.raises(kind) as caught:
        call(client)
    error = caught.value
    assert error.detail
    assert error.code in str(error)
    assert (type(error), error.status) == (kind, status)
    if field is not None:
        assert isinstance(error, RequestInvalid)
        assert error.field == field


UNSENDABLE: list[Callable[[Client], object]] = [
    lambda client: client.pop("", "g"),
    lambda client: client.pop("..", "g"),
    lambda client: client.stats("t", "."),
    lambda client: client.publish("t", "\ud800"),
    lambda client: client.publish("t", OutgoingMessage(body="", headers={"x": object()})),
    lambda client: client.release("t", "g", "handle", float("nan")),
]


@pytest.mark.parametrize("call", UNSENDABLE)
def test_what_can_never_be_sent_is_refused_before_it_is(
    call: Callable[[Client], object], wire_url: str, sent_requests: list[bytes]
) -> None:
    with Client(wire_url) as client, pytest.raises(RequestInvalid) as caught:
        call(client)
    assert caught.value.status is None
    assert sent_requests == []


def test_changing_the_number_of_filled_queues_is_a_conflict(client: Client, topic: str) -> None:
    client.publish(topic, "a")
    with pytest.raises(Conflict) as caught:
        client.put_topic(topic, queues=1)
    assert (caught.value.code, caught.value.status) == ("conflict", 409)


def test_a_message_for_nobody_fails_alone(client: Client, topic: str) -> None:
    client.put_topic(topic, queues=1)
    (result,) = client.publish(topic, "a", raise_on_failure=False)
    assert not result.ok
    with pytest.raises(NoSubscribers):
        result.raise_for_status()


def test_a_missing_topic_is_not_made_where_that_is_off(tmp_path: Path) -> None:
    with ProxyProcess(tmp_path / "proxy", "--auto-create", "false") as proxy, Client(proxy.url) as client:
        with pytest.raises(TopicNotFound):
            client.publish("missing", "a")
        with pytest.raises(TopicNotFound):
            client.pop("missing", "default")
        client.put_topic("there", queues=1)
        with pytest.raises(GroupNotFound):
            client.pop("there", "missing")


def test_nobody_at_the_port_is_unreachable_and_nothing_was_sent() -> None:
    block = PortBlock()
    url = f"http://127.0.0.1:{block.ports[0]}"
    with Client(url, retry_seconds_max=0) as client, pytest.raises(ServerUnreachable) as caught:
        client.publish("t", "a")
    assert caught.value.sent is False


def test_a_lost_answer_is_unreachable_and_something_may_have_been_done(
    wire_url: str, lose_answers: Callable[[str, Sequence[int]], None]
) -> None:
    lose_answers("GET /v1", [1])
    with Client(wire_url, retry_seconds_max=0) as client, pytest.raises(ServerUnreachable) as caught:
        client.info()
    assert caught.value.sent is True


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request", RequestInvalid),
        (401, "unauthorized", Unauthorized),
        (403, "forbidden", Forbidden),
        (404, "not_found", NotSupported),
        (404, "topic_not_found", TopicNotFound),
        (404, "group_not_found", GroupNotFound),
        (408, "timeout", RetryLater),
        (409, "conflict", Conflict),
        (409, "wrong_mode", WrongMode),
        (413, "message_too_large", MessageTooLarge),
        (413, "of_a_later_version", MessageTooLarge),
        (418, "of_a_later_version", RequestInvalid),
        (429, "too_many_in_flight", TooManyInFlight),
        (429, "limit_exceeded", LimitExceeded),
        (302, "http_302", RequestInvalid),
        (500, "internal_error", ServerFault),
        (502, "http_502", ServerUnreachable),
        (503, "broker_unavailable", BrokerUnavailable),
        (503, "state_unavailable", StateUnavailable),
        (503, "unavailable", RetryLater),
        (503, "not_ready", RetryLater),
        (503, "of_a_later_version", ServerUnreachable),
        (504, "http_504", ServerUnreachable),
    ],
)
def test_each_problem_has_its_exception(status: int, code: str, kind: type[PopgateError]) -> None:
    problem = {"code": code, "detail": "why", "field": "a.b", "mode": "pull"}
    error = error_from(problem, status=status, retry_after_seconds=7)
    assert type(error) is kind
    assert (error.code, error.detail, error.status) == (code, "why", status)
    if isinstance(error, RetryLater):
        assert error.retry_after_seconds == 7
    if isinstance(error, RequestInvalid):
        assert error.field == "a.b"
    if isinstance(error, WrongMode):
        assert error.mode == "pull"
    again: object = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert vars(again) == vars(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("no_subscribers", NoSubscribers),
        ("not_confirmed", RetryLater),
        ("not_sent", RetryLater),
        ("server_unreachable", ServerUnreachable),
        ("message_too_large", MessageTooLarge),
        ("of_a_later_version", PopgateError),
    ],
)
def test_a_failed_message_raises_by_its_code(code: str, kind: type[PopgateError]) -> None:
    result = PublishResult(status="failed", error={"code": code, "detail": "why"})
    with pytest.raises(PopgateError) as caught:
        result.raise_for_status()
    assert (type(caught.value), caught.value.code) == (kind, code)


@pytest.mark.parametrize(
    ("status", "kind"),
    [("expired", LeaseLost), ("invalid", LeaseLost), ("later", LeaseLost), ("unavailable", RetryLater)],
)
def test_a_lease_that_was_not_settled_raises_by_its_status(status: str, kind: type[PopgateError]) -> None:
    result = SettleResult(status=status)
    assert not result.ok
    with pytest.raises(kind) as caught:
        result.raise_for_status()
    assert caught.value.code == status


LEASE = '"receipt_handle": "a", "queue": 0, "delivery_count": 1, "first_delivered_at": 0, "invisible_until": 0'


@pytest.mark.parametrize(
    "body",
    [
        "<html>",
        "[]",
        "{}",
        '{"messages": [{}]}',
        f'{{"messages": [{{{LEASE}, "body_base64": "?"}}]}}',
        f'{{"messages": [{{{LEASE}, "body": "", "published_at": "noon"}}]}}',
        f'{{"messages": [{{{LEASE}, "body": "", "ordering_key": [1]}}]}}',
        f'{{"messages": [{{{LEASE}, "body": "", "receipt_handle": {{}}}}]}}',
        f'{{"messages": [{{{LEASE}, "body": "", "published_at": {"9" * 400}}}]}}',
        "[" * 100_000,
    ],
)
def test_an_answer_that_is_not_popgates_is_the_servers_fault(body: str) -> None:
    exchange = Exchanges().pop("t", "g", make=Message)
    next(exchange)
    with pytest.raises(ServerFault) as caught:
        exchange.send(httpx.Response(200, text=body))
    assert caught.value.code == "malformed_answer"


@pytest.mark.parametrize("status", [302, 400, 404, 405, 451])
def test_a_refusal_of_a_gateway_says_nothing_about_the_request(status: int) -> None:
    exchange = Exchanges().pop("t", "g", make=Message)
    next(exchange)
    with pytest.raises(ServerFault):
        exchange.send(httpx.Response(status, html="<html>"))


def test_results_of_another_call_are_the_servers_fault() -> None:
    """A gateway that answers once too often makes a client take each answer for that of its next request."""
    publishing = Exchanges().publish("t", ["a"])
    next(publishing)
    with pytest.raises(ServerFault):
        publishing.send(httpx.Response(200, json={"results": [{"status": "acked"}]}))
    acking = Exchanges().settle("t", "g", Verb.ACK, [SettleEntry(receipt_handle="h")])
    next(acking)
    with pytest.raises(ServerFault):
        acking.send(httpx.Response(200, json={"results": [{"status": "published"}]}))


@pytest.mark.parametrize("body", ["{}", '{"features": null}', '{"features": 5}', '{"status": "ok"}'])
async def test_features_that_are_not_popgates_are_the_servers_fault(body: str) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    async with AsyncClient("http://x", transport=transport) as client:
        calls = SubscriptionCalls(client, "t", "g", client_id="c", invisibility_seconds=None, filter=None)
        with pytest.raises(ServerFault):
            await calls.features()
        with pytest.raises(ServerFault):
            await calls.policy()


@pytest.mark.parametrize("told", ["0", "-1e999", "NaN", "1e999"])
def test_a_heartbeat_has_bounds(told: str) -> None:
    exchange = assign(Exchanges(), "t", "g", "c", ["pull"], None)
    next(exchange)
    body = f'{{"mode": "pull", "generation": 1, "queues": [], "heartbeat_seconds": {told}}}'
    with pytest.raises(StopIteration) as answered:
        exchange.send(httpx.Response(200, text=body))
    assert 0.1 <= answered.value.value.heartbeat_seconds <= 86_400


COMPRESSED = gzip.compress(b'{"features": []}')


def hostile(request: httpx.Request) -> httpx.Response:
    """Set a cookie, and compress the answer to a request that was repeated."""
    assert "cookie" not in request.headers
    assert request.headers["accept-encoding"] == "identity"
    if request.url.path == "/v1":
        return httpx.Response(200, json={}, headers={"set-cookie": "a=b; path=/"})
    return httpx.Response(200, content=COMPRESSED, headers={"content-encoding": "gzip"})


async def test_clients_unpack_nothing_and_keep_no_cookies() -> None:
    with Client("http://x.org", retry_seconds_max=0, transport=httpx.MockTransport(hostile)) as client:
        client.info()
        client.info()
        with pytest.raises(ServerUnreachable, match="compressed"):
            client.cluster()
    async with AsyncClient("http://x.org", retry_seconds_max=0, transport=httpx.MockTransport(hostile)) as twin:
        await twin.info()
        await twin.info()
        with pytest.raises(ServerUnreachable, match="compressed"):
            await twin.cluster()


@pytest.fixture
async def trickling() -> AsyncGenerator[str]:
    """The URL of a server whose answers never end, although no pause between their parts is long."""

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        with suppress(ConnectionError), closing(writer):
            while not writer.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_an_answer_that_trickles_ends_at_last(trickling: str) -> None:
    def exchange() -> Exchange[httpx.Response]:
        return Exchanges(retry_seconds_max=0).repeatable(Request(method="GET", path="/v1", seconds_max=0.5))

    async with AsyncClient(trickling) as twin:
        with pytest.raises(ServerUnreachable, match="not complete"):
            await twin.perform(exchange())
    with Client(trickling) as client, pytest.raises(ServerUnreachable, match="not complete"):
        await asyncio.to_thread(client.perform, exchange())


@pytest.fixture
async def slow_reader() -> AsyncGenerator[str]:
    """The URL of a server that reads a request only after a second, and then answers it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await asyncio.sleep(1)
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split()[0]))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_time_to_send_a_large_request_is_added_to_that_of_its_answer(slow_reader: str) -> None:
    large = Request(method="POST", path="/", content=b"x" * (1 << 20), seconds_max=0.1)

    def exchange() -> Exchange[httpx.Response]:
        return Exchanges(retry_seconds_max=0).repeatable(large)

    async with AsyncClient(slow_reader) as twin:
        assert (await twin.perform(exchange())).content == b"{}"
    with Client(slow_reader) as client:
        assert (await asyncio.to_thread(client.perform, exchange())).content == b"{}"


@pytest.fixture
async def slow_writer() -> AsyncGenerator[str]:
    """The URL of a server that takes a second to send an answer of 160 kB."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 160000\r\n\r\n")
            for _ in range(10):
                writer.write(b"x" * 16_000)
                await asyncio.sleep(0.1)

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_time_to_receive_a_large_answer_is_added_too(slow_writer: str) -> None:
    small = Request(method="GET", path="/", seconds_max=0.3)

    def exchange() -> Exchange[httpx.Response]:
        return Exchanges(retry_seconds_max=0).repeatable(small)

    async with AsyncClient(slow_writer) as twin:
        assert len((await twin.perform(exchange())).content) == 160_000
    with Client(slow_writer) as client:
        assert len((await asyncio.to_thread(client.perform, exchange())).content) == 160_000


async def test_the_answer_to_a_release_may_not_trickle(trickling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "RELEASE_SECONDS_MAX", 0.5)
    clock, term = (lambda: 0.0), LockTerm("l", 30.0, 0.0, random.Random(0))
    grant = LockGrant(name="l", holder="h", token="t", fencing_token=1, slot=0, term=term)
    release = LockExchanges(Exchanges(), clock).release(grant, retry_seconds_max=0)
    with Client(trickling) as client, pytest.raises(ServerUnreachable, match="not complete"):
        await asyncio.to_thread(client.perform, release)


def test_an_answer_with_too_few_results_is_the_servers_fault() -> None:
    exchange = Exchanges().publish("t", ["a", "b"])
    next(exchange)
    with pytest.raises(ServerFault):
        exchange.send(httpx.Response(200, json={"results": [{"status": "published"}]}))
