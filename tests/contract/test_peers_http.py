"""Proxies call each other over HTTP: messages, errors, and clients' requests that are passed on whole."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from contract.peer_bench import HOST, SECRET, PeerNode, listening, peer_node, until
from popgate.adapters.peers import HttpPeers, http, pool
from popgate.adapters.peers.connection import PeerConnection
from popgate.domain.errors import BrokerUnavailable, PeerUnavailable, RetryLater, WrongMode
from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, InstanceId, Subscription, TopicName
from popgate.ports.peers import (
    CountMessages,
    Fetch,
    ForwardedAnswer,
    ForwardedRequest,
    Learned,
    PurgeAtOwner,
    PurgeResult,
    QueueCounts,
)
from popgate.wire import version_1
from popgate.wire.admission import peer_token
from popgate.wire.codec import Codec
from releases import next_wire

A, B = InstanceId("a"), InstanceId("b")
SUBSCRIPTION = Subscription(TopicName("t"), GroupName("default"))
COUNT = CountMessages(subscription=SUBSCRIPTION)
PURGE = PurgeAtOwner(subscription=SUBSCRIPTION)
GROUP = "/v1/topics/t/groups/default"
JSON_HEADERS = [(b"content-type", b"application/json")]


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[PeerNode]:
    async with peer_node(tmp_path / "b", "b") as node:
        yield node


def peers_at(address: str | None, *, secret: bytes = SECRET, version: int = 1) -> HttpPeers:
    return HttpPeers(A, secret, address_of=lambda _: address, version=lambda: version)


@pytest.fixture
async def peers(node: PeerNode) -> AsyncIterator[HttpPeers]:
    peers = peers_at(node.url)
    yield peers
    peers.close()


def posted(path: str, body: object, *headers: tuple[bytes, bytes]) -> ForwardedRequest:
    return ForwardedRequest("POST", path, b"", [*JSON_HEADERS, *headers], json.dumps(body).encode())


# ---------------------------------------------------------------- messages


async def test_a_message_is_answered_and_its_sender_known(node: PeerNode, peers: HttpPeers) -> None:
    counts = [QueueCounts(0, 1, 2, 3, 4, 5, 6, False, True, 7.5)]
    node.answers.says = {CountMessages: counts, PurgeAtOwner: PurgeResult(3, True)}
    assert await peers.ask(B, COUNT) == counts
    assert await peers.ask(B, PURGE) == PurgeResult(3, True)
    await peers.ask(B, Learned(records=()))
    assert node.answers.heard == [(A, COUNT), (A, PURGE), (A, Learned(records=()))]


async def test_an_answer_may_be_large(node: PeerNode, peers: HttpPeers) -> None:
    message = Message(CopyId("c"), "m", b"\xff" * 16 * 1024 * 1024, {"n": 1}, None, 1.5)
    node.answers.says = {Fetch: [message, None, message]}
    assert await peers.ask(B, Fetch(subscription=SUBSCRIPTION, leases=())) == [message, None, message]


async def test_one_connection_serves_one_message_after_the_other(node: PeerNode, peers: HttpPeers) -> None:
    for _ in range(5):
        await peers.ask(B, Learned(records=()))
    assert node.connections == 1
    await asyncio.gather(*(peers.ask(B, Learned(records=())) for _ in range(8)))
    assert 1 < node.connections <= 8


@pytest.mark.parametrize(
    "error",
    [
        RetryLater("on their way", retry_after_seconds=0.25),
        WrongMode("pull it", mode="pull"),
        BrokerUnavailable("away", outcome_unknown=True),
    ],
)
async def test_an_error_is_raised_where_it_was_asked(node: PeerNode, peers: HttpPeers, error: RetryLater) -> None:
    node.answers.says = {CountMessages: error}
    with pytest.raises(type(error)) as caught:
        await peers.ask(B, COUNT)
    assert vars(caught.value) == vars(error)


async def test_a_bug_of_the_peer_is_one_to_retry_and_tells_no_details(
    node: PeerNode, peers: HttpPeers, caplog: pytest.LogCaptureFixture
) -> None:
    node.answers.says = {CountMessages: ZeroDivisionError("secret")}
    with pytest.raises(RetryLater) as caught:
        await peers.ask(B, COUNT)
    assert "secret" not in caught.value.detail
    assert [record.exc_info is not None for record in caplog.records] == [True]


# ---------------------------------------------------------------- which senders are accepted


async def test_who_has_another_secret_is_refused_whatever_it_asks(node: PeerNode) -> None:
    peers = peers_at(node.url, secret=b"another secret of this length")
    with pytest.raises(PeerUnavailable, match=r"proxy b answered 401: .*--secret"):
        await peers.ask(B, COUNT)
    with pytest.raises(PeerUnavailable, match=r"proxy b refused: .*--secret"):
        await peers.forward(B, posted(f"{GROUP}/pop", {}), wait_seconds=0)
    assert node.answers.heard == []
    peers.close()


async def test_who_has_no_token_is_refused_before_the_body_is_read(node: PeerNode) -> None:
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
        for method in ("GET", "POST", "PUT"):
            answer = await client.request(method, "/v1/peers", content=b"x")
            assert answer.status_code == 401
            assert answer.json()["code"] == "not_a_peer"


async def test_what_was_meant_for_an_earlier_process_at_the_address_is_refused(node: PeerNode) -> None:
    peers, earlier = peers_at(node.url), InstanceId("earlier")
    with pytest.raises(PeerUnavailable, match="request is for proxy 'earlier', but this is proxy b"):
        await peers.ask(earlier, COUNT)
    for path in (f"{GROUP}/pop", f"{GROUP}/ack", "/v1/locks/l/verify"):
        with pytest.raises(PeerUnavailable, match="request is for proxy 'earlier', but this is proxy b"):
            await peers.forward(earlier, posted(path, {}), wait_seconds=0)
    assert node.answers.heard == []
    peers.close()


async def test_bytes_that_are_no_message_are_refused_in_words(node: PeerNode) -> None:
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
        headers = {"popgate-peer-token": peer_token(SECRET).decode(), "popgate-to": "b"}
        answer = await client.post("/v1/peers", content=b"\x81\xa7version\x09", headers=headers)
        assert answer.status_code == 400
        assert answer.json()["code"] == "not_understood"
        assert "version 9" in answer.json()["detail"]
        assert (await client.put("/v1/peers", headers=headers)).status_code == 405


async def test_a_version_that_this_proxy_does_not_speak_is_not_sent(node: PeerNode) -> None:
    peers = peers_at(node.url, version=2)
    with pytest.raises(PeerUnavailable, match="version 2"):
        await peers.ask(B, COUNT)
    peers.close()


async def test_messages_that_were_on_their_way_when_the_version_changed_are_answered_as_they_came(
    tmp_path: Path,
) -> None:
    """Proxies learn one after the other that all can speak version 2, or that one no longer can. Half of the
    messages are answered after the version has changed.
    """
    both = Codec({1: version_1, 2: next_wire})
    versions: list[int] = []
    held: list[asyncio.Future[None]] = []

    async def hold(_: object) -> list[QueueCounts]:
        held.append(asyncio.get_running_loop().create_future())
        await held[-1]
        return [QueueCounts(len(held), 1, 2, 3, 4, 5, 6, False, True, 7.5)]

    def version() -> int:
        versions.append(1 + len(versions) // 2 % 2)
        return versions[-1]

    async with peer_node(tmp_path / "b", "b", codec=both) as node:
        node.answers.says = {CountMessages: hold, PurgeAtOwner: WrongMode("pull it", mode="pull")}
        peers = HttpPeers(A, SECRET, address_of=lambda _: node.url, version=version, codec=both)
        asked = [asyncio.create_task(peers.ask(B, COUNT)) for _ in range(40)]
        await until(lambda: len(held) == len(asked))
        assert {*versions} == {1, 2}
        for future in held:
            future.set_result(None)
        assert [counts[0][1:] for counts in await asyncio.gather(*asked)] == [(1, 2, 3, 4, 5, 6, False, True, 7.5)] * 40
        for _ in range(4):
            with pytest.raises(WrongMode):
                await peers.ask(B, PURGE)
        peers.close()


# ---------------------------------------------------------------- peers that are not there


@pytest.mark.parametrize("address", [None, "https://127.0.0.1:1", "nonsense", "http://"])
async def test_who_has_no_address_is_unavailable(address: str | None) -> None:
    with pytest.raises(PeerUnavailable, match="proxy b"):
        await peers_at(address).ask(B, COUNT)


async def test_a_peer_whose_port_refuses_is_unavailable() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerUnavailable, match=rf"^proxy b at http://127.0.0.1:{port} can't be reached: .*$"):
        await peers_at(f"http://{HOST}:{port}").ask(B, COUNT)


async def test_a_peer_that_takes_too_long_is_unavailable_and_hears_that_nobody_waits(
    node: PeerNode, peers: HttpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ANSWER_SECONDS", 0.2)
    release = asyncio.Event()

    async def slow(_: CountMessages) -> list[QueueCounts]:
        await release.wait()
        return []

    node.answers.says = {CountMessages: slow}
    with pytest.raises(PeerUnavailable, match="does not answer in time"):
        await peers.ask(B, COUNT)
    await until(lambda: node.connections == 0)
    release.set()


async def test_a_peer_that_came_back_is_asked_over_a_new_connection(tmp_path: Path) -> None:
    async with peer_node(tmp_path, "b") as node:
        peers = peers_at(node.url)
        await peers.ask(B, Learned(records=()))
    async with peer_node(tmp_path, "b", port=node.port) as node:
        node.answers.says = {PurgeAtOwner: PurgeResult(0, True)}
        await peers.ask(B, PURGE)
        assert node.answers.heard == [(A, PURGE)]
    peers.close()


@contextlib.asynccontextmanager
async def cutting_off(after: int) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """A server that answers `after` requests on a connection, reads the next one, and closes without an answer."""
    heads: list[bytes] = []
    served: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has enough
            for answered in range(after + 1):
                head = await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                heads.append(head)
                if answered < after:
                    answer = b"\x82\xa7version\x01\xa6answer\xc0"
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
        writer.close()
        await writer.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.create_task(serve(reader, writer), name="a server that cuts off"))

    server = await asyncio.start_server(accept, HOST, 0)
    async with server:
        yield f"http://{HOST}:{server.sockets[0].getsockname()[1]}", heads
    await asyncio.wait(served, timeout=5)


async def test_a_kept_connection_that_breaks_is_replaced_once_for_what_may_come_twice() -> None:
    async with cutting_off(after=1) as (url, heads):
        peers = peers_at(url)
        for _ in range(3):
            await peers.ask(B, Learned(records=()))
        assert len(heads) == 5, "the first on each connection is answered, the second comes again"
        peers.close()


async def test_what_does_harm_twice_is_never_sent_twice() -> None:
    async with cutting_off(after=1) as (url, heads):
        peers = peers_at(url)
        await peers.ask(B, Learned(records=()))
        with pytest.raises(PeerUnavailable):
            await peers.ask(B, PURGE)
        assert len(heads) == 2
        await peers.ask(B, Learned(records=()))
        with pytest.raises(PeerUnavailable):
            await peers.forward(B, posted(f"{GROUP}/pop", {}), wait_seconds=0)
        assert len(heads) == 4
        peers.close()


async def test_what_fails_on_a_new_connection_is_not_sent_again() -> None:
    async with cutting_off(after=0) as (url, heads):
        peers = peers_at(url)
        with pytest.raises(PeerUnavailable, match="proxy b"):
            await peers.ask(B, Learned(records=()))
        assert len(heads) == 1
        peers.close()


async def test_what_waits_when_the_peers_are_closed_fails_and_is_not_sent_again(
    node: PeerNode, peers: HttpPeers
) -> None:
    asked = asyncio.Event()

    async def hang(_: CountMessages) -> None:
        asked.set()
        await asyncio.sleep(3600)

    node.answers.says = {CountMessages: hang}
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(_failure(peers.ask(B, COUNT)))
        await asked.wait()
        peers.close()
        peers.close()
    assert isinstance(waiting.result(), PeerUnavailable)
    assert len(node.answers.heard) == 1


async def _failure(work: Any) -> Exception | None:
    try:
        await work
    except Exception as error:
        return error
    return None


# ---------------------------------------------------------------- requests that are passed on


async def test_a_request_is_answered_as_if_the_client_had_asked_there(peers: HttpPeers) -> None:
    published = await peers.forward(
        B, posted("/v1/topics/t/messages", {"messages": [{"body": "hello"}]}), wait_seconds=None
    )
    assert published.status == 200
    popped = await peers.forward(B, posted(f"{GROUP}/pop", {"wait_seconds": 5}), wait_seconds=None)
    assert [message["body"] for message in json.loads(popped.body)["messages"]] == ["hello"]
    assert popped.headers == [(b"content-type", b"application/json")]
    state = await peers.forward(B, ForwardedRequest("GET", GROUP, b"", [], b""), wait_seconds=None)
    assert json.loads(state.body)["in_flight"] == 1


async def test_a_query_a_path_and_a_problem_pass_as_they_are(peers: HttpPeers) -> None:
    path = "/v1/admin/topics/t%2f%C3%A4/groups/default/dead-letters"
    answer = await peers.forward(B, ForwardedRequest("GET", path, b"max_messages=3", [], b""), wait_seconds=None)
    assert answer.status in (400, 404)
    assert dict(answer.headers)[b"content-type"] == b"application/problem+json"
    busy = await peers.forward(B, ForwardedRequest("POST", GROUP, b"", [], b""), wait_seconds=None)
    assert (busy.status, dict(busy.headers)[b"allow"]) == (405, b"GET")


async def test_the_wait_of_a_pop_is_the_one_that_was_passed_along(peers: HttpPeers) -> None:
    began = time.monotonic()
    empty = await peers.forward(B, posted(f"{GROUP}/pop", {"wait_seconds": 20}), wait_seconds=0)
    assert json.loads(empty.body) == {"messages": []}
    assert time.monotonic() - began < 5


async def test_what_a_client_says_in_the_peers_headers_counts_for_nothing(node: PeerNode, peers: HttpPeers) -> None:
    pretended = {"popgate-passed-by": "a", "popgate-wait-seconds": "0", "popgate-to": "x"}
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
        began = time.monotonic()
        assert (await client.post(f"{GROUP}/pop", json={"wait_seconds": 0.3}, headers=pretended)).status_code == 200
        assert time.monotonic() - began >= 0.3
    began = time.monotonic()
    headers = [(name.encode(), value.encode()) for name, value in pretended.items()]
    await peers.forward(B, posted(f"{GROUP}/pop", {"wait_seconds": 0.3}, *headers), wait_seconds=None)
    assert time.monotonic() - began >= 0.3


async def test_a_cancellation_ends_the_pop_at_the_peer(node: PeerNode, peers: HttpPeers) -> None:
    pop = posted(f"{GROUP}/pop", {"wait_seconds": 30})
    waiting = asyncio.create_task(peers.forward(B, pop, wait_seconds=None))
    await until(lambda: node.parked_pops == 1)
    waiting.cancel()
    await until(lambda: node.parked_pops == 0)
    assert waiting.cancelled()
    await peers.forward(B, posted("/v1/topics/t/messages", {"messages": [{"body": "x"}]}), wait_seconds=None)
    async with asyncio.timeout(1):
        popped = await peers.forward(B, pop, wait_seconds=None)
    assert json.loads(popped.body)["messages"][0]["delivery_count"] == 1


async def test_an_answer_that_came_too_late_for_its_client_gives_its_leases_back(
    peers: HttpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is in this process when the waiting is cancelled: the reset tells that nobody has read it."""
    await peers.forward(B, posted("/v1/topics/t/messages", {"messages": [{"body": "x"}]}), wait_seconds=None)
    exchange = PeerConnection.exchange

    async def late(*arguments: Any, **options: Any) -> ForwardedAnswer:
        await exchange(*arguments, **options)
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:  # the one instant that no test can await
        patch.setattr(PeerConnection, "exchange", late)
        with pytest.raises(asyncio.CancelledError):
            await peers.forward(B, posted(f"{GROUP}/pop", {"wait_seconds": 5}), wait_seconds=None)
    async with asyncio.timeout(2):
        popped = await peers.forward(B, posted(f"{GROUP}/pop", {"wait_seconds": 20}), wait_seconds=None)
    assert [one["body"] for one in json.loads(popped.body)["messages"]] == ["x"]


async def test_a_connection_that_was_idle_for_long_is_replaced_before_anything_is_sent(
    node: PeerNode, peers: HttpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.answers.says = {PurgeAtOwner: PurgeResult(0, True)}
    await peers.ask(B, PURGE)
    assert node.server is not None
    (first,) = node.server.server_state.connections
    monkeypatch.setattr(pool, "IDLE_SECONDS_MAX", -1.0)
    await peers.ask(B, PURGE)
    connections = node.server.server_state.connections
    await until(lambda: first not in connections)
    assert len(node.answers.heard) == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 1_000 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\n\xff\xff",
        b"",
    ],
)
async def test_whatever_else_is_at_the_address_the_peer_is_unavailable(answer: bytes) -> None:
    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(accept, HOST, 0)
    async with server:
        peers = peers_at(f"http://{HOST}:{server.sockets[0].getsockname()[1]}")
        for work in (peers.ask(B, COUNT), peers.ask(B, PURGE)):
            with pytest.raises(PeerUnavailable, match=r"^proxy b [^\n]*$"):
                await work
        peers.close()
