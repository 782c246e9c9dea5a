"""Proxies call each other over HTTP: messages, errors, and clients' requests that are passed on whole."""

import asyncio
import contextlib
import gc
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from contract.peer_bench import (
    AUTHORITY,
    HOST,
    SECRET,
    PeerNode,
    acceptor_for,
    listening,
    peer_node,
    peers_of,
    tls_for,
    until,
)
from popgate.adapters.peers import HttpPeers, http, pool
from popgate.adapters.peers.connection import PeerConnection, connect
from popgate.adapters.peers.heads import message_head
from popgate.api.peers import PeerApp, PeerFace
from popgate.bootstrap.peer_tls import authority, tls_of
from popgate.domain.errors import BrokerUnavailable, PeerUnavailable, RetryLater, TooManyPops, WrongMode
from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, InstanceId, Subscription, TopicName
from popgate.domain.permissions import Caller, Principal
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
from popgate.wire.codec import CODEC, Codec
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
    return peers_of(A, lambda _: address, secret=secret, version=lambda: version)


@pytest.fixture
async def peers(node: PeerNode) -> AsyncIterator[HttpPeers]:
    peers = peers_at(node.peer_url)
    yield peers
    peers.close()


def posted(path: str, body: object, *headers: tuple[bytes, bytes]) -> ForwardedRequest:
    return ForwardedRequest("POST", path, b"", [*JSON_HEADERS, *headers], json.dumps(body).encode())


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..b", "a\0b", "[::1", "-", "x.invalid"])
async def test_a_peer_whose_address_leads_nowhere_is_unavailable(host: str) -> None:
    peers = peers_at(f"https://{host}:1")
    with pytest.raises(PeerUnavailable, match=r"can't be reached|does not answer in time"):
        await peers.ask(B, COUNT)
    with pytest.raises(PeerUnavailable, match=r"can't be reached|does not answer in time"):
        await peers.forward(B, posted(f"{GROUP}/pop", {}), wait_seconds=0)
    peers.close()


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


async def test_who_has_another_secret_gets_no_request_whatever_it_is(
    node: PeerNode, caplog: pytest.LogCaptureFixture
) -> None:
    peers = peers_at(node.peer_url, secret=b"another secret of this length")
    for work in (peers.ask(B, COUNT), peers.forward(B, posted(f"{GROUP}/pop", {}), wait_seconds=0)):
        with pytest.raises(PeerUnavailable, match=r"^proxy b at https://.* it has another secret"):
            await work
    assert node.answers.heard == []
    assert [(record.getMessage(), vars(record)["proxy"]) for record in caplog.records] == [
        ("a proxy has another secret, or another program is at its address", B)
    ]
    peers.close()


async def test_who_does_not_accept_this_proxys_secret_is_said_to_have_another(tmp_path: Path) -> None:
    """As after half of a change of the secret: this proxy trusts both, and the other one only its own."""
    other = b"another secret of this length"
    mine = tls_of(A, AUTHORITY, [AUTHORITY, authority(other)])
    async with peer_node(tmp_path, "b", secret=other) as node:
        peers = HttpPeers(A, mine.client, address_of=lambda _: node.peer_url, version=lambda: 1)
        with pytest.raises(PeerUnavailable, match="it has another secret"):
            await peers.ask(B, COUNT)
        assert node.answers.heard == []
        peers.close()


async def test_secrets_can_be_changed_one_proxy_after_the_other(tmp_path: Path) -> None:
    new = authority(b"the next secret of this length")
    for number, (mine, theirs) in enumerate(
        [
            (tls_of(A, AUTHORITY, [AUTHORITY, new]), tls_of(B, new, [new, AUTHORITY])),
            (tls_of(A, new, [new, AUTHORITY]), tls_of(B, AUTHORITY, [AUTHORITY, new])),
        ]
    ):
        with listening() as listener:
            async with peer_node(tmp_path / str(number), "b") as node:
                assert node.server is not None
                served = PeerApp(PeerFace(B, node.answers), node.app, authenticates=False)
                acceptor = acceptor_for(listener, node.server, served, theirs.server)
                acceptor.open()
                url = f"https://{HOST}:{listener.getsockname()[1]}"
                await _ask_once(mine.client, url)
                acceptor.close()


async def _ask_once(context: ssl.SSLContext, url: str) -> None:
    peers = HttpPeers(A, context, address_of=lambda _: url, version=lambda: 1)
    await peers.ask(B, Learned(records=()))
    peers.close()


async def test_what_is_meant_for_an_earlier_process_at_the_address_is_not_sent(node: PeerNode) -> None:
    peers, earlier = peers_at(node.peer_url), InstanceId("earlier")
    works: list[Awaitable[Any]] = [
        peers.ask(earlier, COUNT),
        *(peers.forward(earlier, posted(path, {}), wait_seconds=0) for path in (f"{GROUP}/pop", "/v1/locks/l/verify")),
    ]
    for work in works:
        with pytest.raises(PeerUnavailable, match=r"proxy earlier at .* another proxy \(b\) is at this address"):
            await work
    assert node.answers.heard == []
    peers.close()


async def raw_request(node: PeerNode, head: bytes, body: bytes = b"", *, by: InstanceId = A) -> ForwardedAnswer:
    """Send bytes to the socket for peers, with the certificate of an instance."""
    connection = await connect(HOST, node.peer_port, tls_for(by).client, node.instance, lambda _: None)
    try:
        return await connection.exchange(head, body)
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        (b"", 421, "wrong_instance"),
        (b"popgate-to: c\r\n", 421, "wrong_instance"),
        (b"popgate-to: b\r\npopgate-passed-by: c\r\n", 401, "not_a_peer"),
        (b"popgate-passed-by: a\r\n", 421, "wrong_instance"),
    ],
)
async def test_a_request_for_another_proxy_or_by_another_proxy_is_refused(
    node: PeerNode, headers: bytes, status: int, code: str
) -> None:
    path = f"{GROUP}/pop" if b"passed-by" in headers else "/v1/peers"
    answer = await raw_request(
        node, b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n%b\r\n" % (path.encode(), headers), b"{}"
    )
    assert (answer.status, json.loads(answer.body)["code"]) == (status, code)
    assert node.answers.heard == []


async def test_a_message_that_names_another_sender_than_its_certificate_is_refused(node: PeerNode) -> None:
    body = CODEC.encode_message(1, InstanceId("c"), COUNT)
    answer = await raw_request(node, message_head(b"h", B, len(body)), body)
    assert (answer.status, json.loads(answer.body)["code"]) == (401, "not_a_peer")
    assert node.answers.heard == []


@pytest.mark.parametrize("path", ["/", "/healthz", "/metrics", "/v1", GROUP, "/v1/admin/cluster", "/docs"])
async def test_a_clients_request_gets_nothing_from_the_socket_for_peers(node: PeerNode, path: str) -> None:
    answer = await raw_request(node, b"GET %b HTTP/1.1\r\nhost: x\r\npopgate-to: b\r\n\r\n" % path.encode())
    assert (answer.status, json.loads(answer.body)["code"]) == (404, "not_found")


async def test_the_socket_for_clients_knows_no_peers(node: PeerNode) -> None:
    async with httpx.AsyncClient(base_url=node.url, trust_env=False) as client:
        for method in ("GET", "POST"):
            answer = await client.request(method, "/v1/peers", headers={"popgate-to": "b", "popgate-passed-by": "a"})
            assert answer.status_code == 404


async def test_a_forwarded_request_needs_a_caller_where_callers_are_known(tmp_path: Path) -> None:
    seen: list[Any] = []

    def wrapped(node: PeerNode) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append(scope.get("popgate.caller"))
            await node.app(scope, receive, send)

        return app

    ann = Caller(principal=Principal(name="ann"), credential="k1", expires_at=1.5)
    async with peer_node(tmp_path, "b", authenticates=True, wrap=wrapped) as node:
        peers = peers_at(node.peer_url)
        pop = posted(f"{GROUP}/pop", {})
        assert (await peers.forward(B, pop, wait_seconds=0)).status == 403
        pretended = posted(f"{GROUP}/pop", {}, (b"popgate-caller", b'{"n":"eve","c":"k2"}'))
        assert (await peers.forward(B, pretended, wait_seconds=0)).status == 403
        headers = b"popgate-to: b\r\npopgate-passed-by: a\r\npopgate-caller: nonsense\r\n"
        asked = b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (GROUP.encode(), headers)
        assert (await raw_request(node, asked)).status == 400
        assert seen == []
        assert (await peers.forward(B, pop._replace(caller=ann), wait_seconds=0)).status == 200
        assert seen == [ann]
        peers.close()


async def test_bytes_that_are_no_message_are_refused_in_words(node: PeerNode) -> None:
    body = b"\x81\xa7version\x09"
    answer = await raw_request(node, message_head(b"h", B, len(body)), body)
    problem = json.loads(answer.body)
    assert (answer.status, problem["code"]) == (400, "not_understood")
    assert "version 9" in problem["detail"]
    put = await raw_request(node, b"PUT /v1/peers HTTP/1.1\r\nhost: x\r\npopgate-to: b\r\ncontent-length: 0\r\n\r\n")
    assert put.status == 405


async def test_a_version_that_this_proxy_does_not_speak_is_not_sent(node: PeerNode) -> None:
    peers = peers_at(node.peer_url, version=2)
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
        peers = peers_of(A, lambda _: node.peer_url, version=version, codec=both)
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


@pytest.mark.parametrize("address", [None, "http://127.0.0.1:1", "nonsense", "https://"])
async def test_who_has_no_address_is_unavailable(address: str | None) -> None:
    with pytest.raises(PeerUnavailable, match="proxy b"):
        await peers_at(address).ask(B, COUNT)


async def test_a_peer_whose_port_refuses_is_unavailable() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerUnavailable, match=rf"^proxy b at https://127.0.0.1:{port} can't be reached: .*$"):
        await peers_at(f"https://{HOST}:{port}").ask(B, COUNT)


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
        peers = peers_at(node.peer_url)
        await peers.ask(B, Learned(records=()))
    async with peer_node(tmp_path, "b", peer_port=node.peer_port) as node:
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

    server = await asyncio.start_server(accept, HOST, 0, ssl=tls_for(B).server)
    async with server:
        yield f"https://{HOST}:{server.sockets[0].getsockname()[1]}", heads
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
    topic = await peers.forward(B, ForwardedRequest("GET", "/v1/admin/topics/t", b"", [], b""), wait_seconds=None)
    assert json.loads(topic.body)["topic"] == "t"


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


async def test_requests_that_wait_at_the_peer_delay_no_others(
    node: PeerNode, peers: HttpPeers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(pool, "WAITING_MAX", 1)
    pop = posted(f"{GROUP}/pop", {})
    waiting = asyncio.create_task(peers.forward(B, pop, wait_seconds=30))
    await until(lambda: node.parked_pops == 1)
    async with asyncio.timeout(5):
        await peers.ask(B, Learned(records=()))
        assert (await peers.forward(B, pop, wait_seconds=0)).status == 200
        with pytest.raises(TooManyPops, match="requests wait on proxy b"):
            await peers.forward(B, pop, wait_seconds=30)
    waiting.cancel()
    await until(lambda: node.parked_pops == 0)
    await peers.forward(B, pop, wait_seconds=0.1)


async def test_an_idle_connection_keeps_no_answer(node: PeerNode) -> None:
    node.answers.says = {PurgeAtOwner: PurgeResult(0, True)}
    connection = await connect(HOST, node.peer_port, tls_for(A).client, node.instance, lambda _: None)
    body = CODEC.encode_message(1, A, PURGE)
    answer = await connection.exchange(message_head(b"h", B, len(body)), body)
    await asyncio.sleep(0)  # the step of this task that the answer has begun refers to it
    references = gc.get_referrers(answer)
    connection.close()
    assert [one for one in references if isinstance(one, asyncio.Future)] == []


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
    (first,) = node.peer_connections
    monkeypatch.setattr(pool, "IDLE_SECONDS_MAX", -1.0)
    await peers.ask(B, PURGE)
    await until(lambda: first not in node.peer_connections)
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

    server = await asyncio.start_server(accept, HOST, 0, ssl=tls_for(B).server)
    async with server:
        peers = peers_at(f"https://{HOST}:{server.sockets[0].getsockname()[1]}")
        for work in (peers.ask(B, COUNT), peers.ask(B, PURGE)):
            with pytest.raises(PeerUnavailable, match=r"^proxy b [^\n]*$"):
                await work
        peers.close()
