"""The peers port: what the proxies of one cluster ask each other.

Theory of operation. The store decides; what stands here only makes it quick and whole. Who is not told of a settlement
meets it at its next conditional write, and who does not answer is found to be gone by its missing beats. So nothing
here has to be repeated, and nothing is lost with a message that did not arrive.

A message is asked of one member, which answers for its own queues only: one hop, never two. ``MESSAGES`` says what is
answered to which message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from popgate.domain.lease import LeaseRecord
from popgate.domain.lease_group import GroupKey
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, ClientId, CopyId, InstanceId, LeaseId, Subscription

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class PeerMessage(Generic[AnswerT]):
    """One of ``MESSAGES``; ``AnswerT`` is what it is answered with."""


class LearnedRecord(NamedTuple):
    """What the store says of a copy, ``remaining_seconds`` being read just now."""

    queue: BrokerQueue
    copy_id: CopyId
    record: LeaseRecord
    remaining_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned(PeerMessage[None]):
    """The store has decided these by another proxy's hand; told to the owner of their queues."""

    records: tuple[LearnedRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(PeerMessage[bool]):
    """The asking proxy has pops that nobody could fill, for the next ``seconds``: tell it once (``Available``) when
    something is ready. Answers whether something is ready now; then it will not be told.

    ``since``: what was ready when the count of arrivals stood there was not for them (0: they have not asked yet).
    """

    subscription: Subscription
    seconds: float
    since: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Available(PeerMessage[None]):
    """The asking proxy has something ready that was ``Wanted``."""

    subscription: Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseForGroup(PeerMessage[int]):
    """Lease up to ``count`` messages that are ready, as members of a lease group. Answers how many there were."""

    subscription: Subscription
    key: GroupKey
    builder: str
    lease_id: LeaseId
    count: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(PeerMessage[list[Message | None]]):
    """Answers the messages of leases, in order; None where one is not that lease's any more. RetryLater where some are
    still on their way from the broker."""

    subscription: Subscription
    leases: tuple[LearnedRecord, ...]


class HeldCounts(NamedTuple):
    """What the owner of a queue holds of it. ``blocked`` ones are among the ``ready``."""

    number: int
    ready: int
    in_flight: int
    waiting: int
    blocked: int
    at_broker: int
    """Of those that wait at the broker, how many are counted here, or settled."""
    dead_held: int
    """Dead letters that the broker does not count as waiting; the owner of the first queue knows."""
    is_paused: bool
    is_open: bool
    oldest_at: float | None
    """Since when the oldest one waits, Unix seconds; None: nothing is known to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountHeld(PeerMessage[list[HeldCounts]]):
    subscription: Subscription


class PeerOrder(NamedTuple):
    receipt_handle: str
    seconds: float | None
    reason: str


class PeerResult(NamedTuple):
    status: str
    invisible_until: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleThere(PeerMessage[list[PeerResult]]):
    """Settlements that only the owner of their queues can carry out: rejections, which need the message, and those of
    messages that can't be identified, which no record protects. ``verb``: as in HTTP."""

    subscription: Subscription
    verb: str
    orders: tuple[PeerOrder, ...]


class PurgedThere(NamedTuple):
    purged: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PurgeThere(PeerMessage[PurgedThere]):
    """Drop what is visible in the queues that the answering proxy owns."""

    subscription: Subscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Follow(PeerMessage[None]):
    """Topics or groups have changed: answered once the answering proxy serves what the catalog says."""


MESSAGES: Mapping[str, type[PeerMessage[Any]]] = {
    "learned": Learned,
    "wanted": Wanted,
    "available": Available,
    "lease_for_group": LeaseForGroup,
    "fetch": Fetch,
    "count_held": CountHeld,
    "settle": SettleThere,
    "purge": PurgeThere,
    "follow": Follow,
}
"""Every message, by its name on the wire."""


class PassedRequest(NamedTuple):
    """A client's HTTP request as it came, for the proxy that can answer it. ``headers`` in lower case. ``client_id`` is
    that of a pop, which has none in its body then."""

    method: str
    path: str
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    client_id: ClientId | None = None


class PassedAnswer(NamedTuple):
    """``headers`` are those that the client should see. Of a pop that got nothing ``arrivals`` is the count of what had
    become ready until then, for ``Wanted``; None: it got something, or was no pop."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes
    arrivals: int | None = None


class Peers(Protocol):
    """The other members. Every call raises PeerUnavailable where one doesn't answer, or is no member any more; what was
    asked of it may have been done."""

    async def ask(self, to: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """What ``to`` answers. Raises: PeerUnavailable, and whatever PopgateError it answers with."""
        ...

    async def pass_on(self, to: InstanceId, request: PassedRequest, *, wait_seconds: float | None) -> PassedAnswer:
        """Let ``to`` answer a client's request from its own queues. A cancellation tells it that the client has gone.

        ``wait_seconds``: in place of what the request says. Raises: PeerUnavailable.
        """
        ...


class PeerAnswers(Protocol):
    """What answers the messages of others: the engine."""

    async def answer(self, sender: InstanceId, message: PeerMessage[AnswerT]) -> AnswerT:
        """Raises: PopgateError, which the sender gets."""
        ...
