"""Defines the peers port: the messages between the proxies of one cluster.

Theory of operation. The store decides about leases and owners. Peer messages only make the cluster faster, and make the
answers to clients complete. A proxy that misses a settlement discovers it at its next conditional write. A proxy that
does not answer is detected by its missing heartbeats. So no peer message has to be repeated, and the loss of a peer
message is harmless.

A message is sent to one member. This member answers only for its own queues, and never forwards the message.
``MESSAGES`` lists all message types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from popgate.domain.lease import LeaseRecord
from popgate.domain.lease_group import GroupKey
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, ClientId, CopyId, InstanceId, LeaseId, Subscription
from popgate.domain.permissions import Caller

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class PeerMessage(Generic[AnswerT]):
    """Base of the types in ``MESSAGES``; ``AnswerT`` is the type of the answer."""


class LearnedRecord(NamedTuple):
    """A copy's record in the store. ``remaining_seconds`` was computed just before the record was sent."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord
    remaining_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(PeerMessage[None]):
    """Reports to the owner of queues which records another proxy has changed in the store."""

    records: tuple[LearnedRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(PeerMessage[bool]):
    """Asks to be notified once (``Available``), within the next ``seconds``, when a message is ready for waiting pops.

    The answer is whether a message is ready now. If it is, no notification follows. ``since`` is the
    arrival count that the waiting pops have already seen: messages that were ready at that count are ignored. 0 means
    that the pops have not asked yet.
    """

    subscription: Subscription
    seconds: float
    since: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Available(PeerMessage[None]):
    """Notifies a proxy that asked with ``Wanted`` that the sender has a message ready."""

    subscription: Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseForGroup(PeerMessage[int]):
    """Asks to lease up to ``count`` ready messages as members of a lease group. The answer is the number of leases."""

    subscription: Subscription
    key: GroupKey
    builder: str
    lease_id: LeaseId
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(PeerMessage[list[Message | None]]):
    """Asks for the messages of leases.

    The answer has one element per lease, in order: the message, or None if the lease is no longer valid. A long
    answer ends early, after at least one element, so that it takes little memory; the rest must be asked for again.
    Raises: RetryLater if the broker has not yet delivered some of the messages.
    """

    subscription: Subscription
    leases: tuple[LearnedRecord, ...]


class QueueCounts(NamedTuple):
    """The owner's counts of the messages of one queue. ``ready`` includes ``blocked``."""

    number: int
    ready: int
    in_flight: int
    waiting: int
    blocked: int
    at_broker: int
    """The number of messages that the broker counts as ready, but that other fields count too, or that are settled."""
    dead_held: int
    """Dead letters that the broker does not count as ready. The owner of the first queue reports them."""
    is_paused: bool
    is_open: bool
    oldest_at: float | None
    """When the oldest waiting message became visible, in Unix seconds. None: no waiting message is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountMessages(PeerMessage[list[QueueCounts]]):
    subscription: Subscription


class PeerOrder(NamedTuple):
    receipt_handle: str
    seconds: float | None
    reason: str
    error_type: str = ""
    error_text: str = ""
    client: str = ""


class PeerResult(NamedTuple):
    status: str
    invisible_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleAtOwner(PeerMessage[list[PeerResult]]):
    """Asks for settlements that only the owner of the queues can perform. ``verb`` is a verb of the HTTP interface.

    These settlements are rejections, which need the message, and settlements of transient messages, which have no
    stable identity.
    """

    subscription: Subscription
    verb: str
    orders: tuple[PeerOrder, ...]


class PurgeResult(NamedTuple):
    purged: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeAtOwner(PeerMessage[PurgeResult]):
    """Asks to drop all visible messages in the queues that the answering proxy owns."""

    subscription: Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow(PeerMessage[None]):
    """Reports a change of topics or groups. The receiver answers when it serves the topics of the current catalog."""


MESSAGES: Mapping[str, type[PeerMessage[Any]]] = {
    "learned": Learned,
    "wanted": Wanted,
    "available": Available,
    "lease_for_group": LeaseForGroup,
    "fetch": Fetch,
    "count_held": CountMessages,
    "settle": SettleAtOwner,
    "purge": PurgeAtOwner,
    "follow": Follow,
}
"""Every message type, by its name on the wire."""


class ForwardedRequest(NamedTuple):
    """A client's HTTP request, unchanged, for the proxy that can answer it. Names in ``headers`` are in lower case.

    ``client_id`` is the id of a pop's client. If it is set, the body does not contain it. ``caller`` is None if this
    proxy does not authenticate callers.
    """

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    client_id: ClientId | None = None
    caller: Caller | None = None


class ForwardedAnswer(NamedTuple):
    """The answer to a forwarded request. ``headers`` are the headers to send to the client.

    ``arrivals``: for a pop that received no messages, the arrival count that the pop has checked (see ``Wanted``). It
    is None if the pop received messages, or if the request was no pop. ``waited_seconds``: how long the first message
    had waited that the pop received, if the other proxy has reported it.
    """

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    arrivals: int | None = None
    waited_seconds: float | None = None


class Peers(Protocol):
    """Sends messages and requests to other members.

    Every call raises PeerUnavailable if the member does not answer or is no longer a member. The member
    may nevertheless have carried out the request.
    """

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Return the answer of ``to``. Raises: PeerUnavailable, and the PopgateError that ``to`` answers with."""
        ...

    async def forward(
        self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float | None
    ) -> ForwardedAnswer:
        """Forward a client's request, which ``to`` answers from its own queues.

        If this call is cancelled, ``to`` sees a disconnect of the client. ``wait_seconds`` replaces the value in the
        request; unless it is 0, the request may wait at ``to``. Raises: PeerUnavailable; TooManyPops if too many
        requests wait at ``to`` already.
        """
        ...


class PeerAnswers(Protocol):
    """Answers the messages of other proxies; the engine implements it."""

    async def answer(self, sender: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Answer a message. Raises: PopgateError, which is sent back to ``sender``."""
        ...
