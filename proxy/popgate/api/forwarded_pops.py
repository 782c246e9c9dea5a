"""Forwards pops to other proxies of a cluster, and answers forwarded pops.

A pop is forwarded unchanged, except for its ``client_id``. The other proxy answers the pop only with messages of the
queues that it owns. If it has no message, it reports how many messages have become ready there so far (``ARRIVALS``).
The pop is forwarded to that proxy again only after this number has grown.
"""

from collections.abc import Awaitable, Callable

from msgspec import UNSET, Struct, json, msgpack
from msgspec.structs import replace
from starlette.types import Scope

from popgate.api.formats import Format, negotiate
from popgate.api.forwarding import forwarded_request
from popgate.api.reading import POP
from popgate.domain.errors import PeerUnavailable, RetryLater, TooManyInFlight
from popgate.domain.names import ClientId, InstanceId
from popgate.engine.cluster.remote_pops import PeerPop
from popgate.ports.peers import ForwardedAnswer, Peers
from popgate.wire.admission import ARRIVALS, WAITED_SECONDS

_OK, _NOT_FOUND, _TOO_MANY, _UNAVAILABLE = 200, 404, 429, 503


class _Given(Struct):
    receipt_handle: str
    invisible_until: float


class _Answer(Struct):
    """The fields of an answer to a pop that the forwarding proxy reads."""

    messages: list[_Given]


class _Problem(Struct):
    code: str


_read_problem = json.Decoder(_Problem).decode
_in_json, _packed = json.Decoder(_Answer).decode, msgpack.Decoder(_Answer).decode


def forwarder(
    peers: Peers, scope: Scope, body: bytes, client_id: ClientId | None = None, retry_after_seconds: float = 1.0
) -> Callable[[InstanceId], Awaitable[PeerPop[ForwardedAnswer]]]:
    """Return a function that forwards the pop of ``scope`` to another proxy, which answers it without waiting for
    messages."""

    async def forward(to: InstanceId) -> PeerPop[ForwardedAnswer]:
        request = forwarded_request(scope, body, scope["headers"])  # created only now: most pops are not forwarded
        if client_id is not None:
            request = request._replace(client_id=client_id, body=_without_client(body, scope))
        answer = await peers.forward(to, request, wait_seconds=0.0)
        if answer.status == _TOO_MANY:
            raise TooManyInFlight(
                "the group's max_in_flight messages are in flight: acknowledge some, or raise it",
                retry_after_seconds=retry_after_seconds,
            )
        if answer.status == _NOT_FOUND:
            raise PeerUnavailable(f"proxy {to} does not know of this group yet")
        if answer.status == _UNAVAILABLE and _read_problem(answer.body).code == RetryLater.code:
            raise PeerUnavailable(f"proxy {to} is about to leave")
        return PeerPop(answer, answer.arrivals if answer.status == _OK else None, answer.waited_seconds)

    return forward


def _without_client(body: bytes, scope: Scope) -> bytes:
    """Return the body of the pop without the ``client_id``, which is sent separately."""
    form = negotiate(dict(scope["headers"]))
    asked = replace(POP.read(body, form.packed), client_id=UNSET)
    return msgpack.encode(asked) if form.packed else json.encode(asked)


def without_settlements(body: bytes, form: Format) -> bytes:
    """Return the body of the pop without its settlements, which this proxy carries out itself."""
    asked = replace(POP.read(body, form.packed), ack=UNSET, release=UNSET, extend=UNSET, reject=UNSET)
    return msgpack.encode(asked) if form.packed else json.encode(asked)


def nothing_here(form: Format, body: bytes, arrivals: int) -> ForwardedAnswer:
    """Return this proxy's answer to a forwarded pop for which it has no message."""
    return ForwardedAnswer(_OK, [form.content_type, (ARRIVALS, b"%d" % arrivals)], body)


def found_here(form: Format, body: bytes, waited_seconds: float | None) -> ForwardedAnswer:
    """Return this proxy's answer to a forwarded pop, with its messages."""
    headers = [form.content_type]
    if waited_seconds is not None:
        headers.append((WAITED_SECONDS, b"%.3f" % waited_seconds))
    return ForwardedAnswer(_OK, headers, body)


def receipts_of(answer: ForwardedAnswer, form: Format) -> list[str]:
    """Return the receipt handles in a pop's answer."""
    if answer.status != _OK:
        return []
    given = (_packed if form.answer_packed else _in_json)(answer.body).messages
    return [one.receipt_handle for one in given]
