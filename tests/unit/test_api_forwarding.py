"""Requests that are passed on: how they are read from their scope, and which ones stay here whatever their target."""

import asyncio
from typing import Any

import pytest
from msgspec import json, msgpack
from starlette.types import Message, Receive, Scope, Send

from popgate.api.body import ClientGone
from popgate.api.connection import Connection
from popgate.api.forwarded_pops import forwarder
from popgate.api.forwarding import ForwardingMiddleware, forward_request, forwarded_request, send_forwarded_answer
from popgate.api.peers import PeerFace
from popgate.api.problems import NotAPeer, WrongInstance
from popgate.api.scope_keys import FORWARDING, Forwarding
from popgate.domain.names import ClientId, InstanceId
from popgate.ports.peers import ForwardedAnswer, ForwardedRequest, PeerMessage
from popgate.wire.admission import CLIENT_ID, PASSED_BY, TO, WAIT_SECONDS

A, B = InstanceId("a"), InstanceId("b")
FROM_A = {PASSED_BY: b"a", TO: b"b"}
REQUEST = ForwardedRequest("GET", "/", b"", [], b"")


class NoAnswers:
    async def answer(self, sender: InstanceId, message: PeerMessage[Any]) -> Any:
        raise AssertionError("nobody asks")


class Patient:
    """Peers that never answer."""

    async def ask(self, to: InstanceId, message: PeerMessage[Any]) -> Any:
        raise AssertionError("nobody asks")

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")


class Noting:
    """Peers that have nothing, and record what was passed to them."""

    def __init__(self) -> None:
        self.forwarding: list[ForwardedRequest] = []

    async def ask(self, to: InstanceId, message: PeerMessage[Any]) -> Any:
        raise AssertionError("nobody asks")

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        self.forwarding.append(request)
        return ForwardedAnswer(200, [], b"", 7)


FACE = PeerFace(B, NoAnswers())


def scope_of(method: str = "POST", **fields: Any) -> Scope:
    return {"type": "http", "method": method, "path": "/a b", "query_string": b"x=1", "headers": [], **fields}


class Nowhere(asyncio.Transport):
    def is_closing(self) -> bool:
        return True


def connection() -> Connection:
    return Connection(Nowhere())


@pytest.mark.parametrize("scope", [scope_of(raw_path=b"/a%20b"), scope_of(raw_path=None), scope_of()])
def test_a_request_is_taken_as_it_came(scope: Scope) -> None:
    path = (scope.get("raw_path") or b"/a b").decode()
    request = forwarded_request(scope, b"body", [(b"n", b"v")])
    assert request == ForwardedRequest("POST", path, b"x=1", [(b"n", b"v")], b"body")


@pytest.mark.parametrize(("form", "kind"), [(json, b"application/json"), (msgpack, b"application/msgpack")])
async def test_who_pops_is_passed_on_beside_the_pop_which_an_earlier_release_would_refuse_otherwise(
    form: Any, kind: bytes
) -> None:
    peers, asked = Noting(), {"max_messages": 3, "client_id": "ann", "filter": {"kind": ["a", 1]}, "attempt_id": "x"}
    scope = scope_of(headers=[(b"content-type", kind)])
    found = await forwarder(peers, scope, form.encode(asked), ClientId("ann"))(B)
    assert found.arrivals == 7
    (request,) = peers.forwarding
    assert request.client_id == "ann"
    assert form.decode(request.body) == {name: value for name, value in asked.items() if name != "client_id"}
    await forwarder(peers, scope, body := form.encode({"max_messages": 3.0}))(B)
    assert (peers.forwarding[1].body, peers.forwarding[1].client_id) == (body, None)


def test_a_peer_says_who_pops() -> None:
    assert FACE.forwarding({**FROM_A, CLIENT_ID: b"ann"}, A).client_id == "ann"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, None), (b"0.0", 0), (b"2.5", 2.5), (b"-1", 0), (b"nan", 0), (b"inf", 30), (b"soon", 0)],
)
def test_a_passed_request_waits_as_long_as_its_proxy_says_and_never_too_long(
    header: bytes | None, seconds: float | None
) -> None:
    wait = {} if header is None else {WAIT_SECONDS: header}
    assert FACE.forwarding({**FROM_A, **wait}, A) == Forwarding(A, seconds)


def test_a_sender_without_its_certificate_and_an_instance_that_is_another_are_refused() -> None:
    for sender in (None, InstanceId("c")):
        with pytest.raises(NotAPeer):
            FACE.forwarding(FROM_A, sender)
    with pytest.raises(WrongInstance):
        FACE.forwarding({**FROM_A, TO: b"c"}, A)


@pytest.mark.parametrize(
    "scope", [scope_of("HEAD"), {**scope_of(), FORWARDING: Forwarding(A, None)}, {"type": "lifespan"}]
)
async def test_some_requests_stay_here_whatever_their_target(scope: Scope) -> None:
    served: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        served.append(scope)

    async def nothing(*_: Any) -> Any:
        raise AssertionError("it is the application's")

    await ForwardingMiddleware(app, Patient(), lambda _: B)(scope, nothing, nothing)
    assert served == [scope]


async def test_a_client_that_leaves_ends_the_waiting() -> None:
    client = connection()
    waiting = asyncio.create_task(forward_request(Patient(), B, REQUEST, connection=client))
    await asyncio.sleep(0)
    client.ended(by_client=True)
    async with asyncio.timeout(5):
        with pytest.raises(ClientGone):
            await waiting
        with pytest.raises(ClientGone):  # it had left before
            await forward_request(Patient(), B, REQUEST, connection=client)
    assert client.presence is None


async def test_what_was_leased_for_a_client_that_has_gone_is_given_back() -> None:
    client, undone, sent = connection(), list[bool](), list[Message]()
    client.gone = True

    async def send(message: Message) -> None:
        sent.append(message)

    answer = ForwardedAnswer(200, [(b"content-type", b"x")], b"body")
    await send_forwarded_answer(answer, send, client, undo=lambda: undone.append(True))
    assert undone == [True]
    assert sent[0]["headers"] == [(b"content-type", b"x"), (b"content-length", b"4")]
    assert sent[1]["body"] == b"body"
