"""Pulls and commits: messages of one queue, in order, for the one client that has it (design: section 3).

Theory of operation. A pulled message is leased in the store as a popped one is, under a lease id that says since when
its client has the queue; so each proxy, each crash and each overtaken client meet the same fence. It has no
invisibility timeout: it is given back when another client has the queue, or its client has begun anew
(``stale_leases``).

What is answered is what the client has and has not seen: a repeat of a pull is answered the same, and an answer that
was lost loses nothing. A commit settles in one step what the client has up to one message.

A queue's owner reads who has it when somebody comes with a generation that does not fit what it knows, and time and
again while messages are pulled. That it knows late does no harm: until the next client comes, nobody else gets
anything.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice

from popgate.domain import modes
from popgate.domain.assignment import Holding, held_by
from popgate.domain.errors import (
    BrokerUnavailable,
    Fenced,
    InvalidRequest,
    PeerUnavailable,
    RetryLater,
    TooManyInFlight,
)
from popgate.domain.lease import SETTLED_STATES, RecordState, SettleStatus
from popgate.domain.message import Message
from popgate.domain.names import ClientId, CopyId, GroupName, InstanceId, Subscription, TopicName
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.domain.topics import ConsumeMode
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Found, found_so, note_found_settled
from popgate.engine.lease.pop_request import ANSWER_BYTES_MAX, Leased, PopRequest, Presence
from popgate.engine.lease.pull_lease import PullLease
from popgate.engine.pull.assigning import Assigning, Told
from popgate.engine.queue.buffered import BufferedMessage, MessageState, size_of
from popgate.engine.queue.host import QueueHost
from popgate.engine.settle.settling import Settler
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.runtime.deadlines import NEVER

UNCOMMITTED_MAX = 1_000
"""So many messages of one queue a client may have."""
LEASE_SECONDS = 10 * 366 * 86_400.0
"""A pulled message's lease ends with its client's session. This is for ever, as far as the store's clock goes."""
LOOK_SECONDS = 1.0
"""How often it is looked who has which queue by now."""
BODIES_AT_ONCE = 16
"""Bodies that are fetched again together: all that a client has may not fit into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """What a client asks for. ``after``: the receipt handle of the last message that it has seen; None: none yet."""

    client_id: ClientId
    generation: int
    max_messages: int = 1
    wait_seconds: float = 0.0
    after: str | None = None
    answer_bytes: Callable[[Message], int] = size_of


class _Pull:
    """One that is under way."""

    def __init__(self) -> None:
        self.presence = Presence()
        self.ended = asyncio.Event()


class Puller:
    """Serves the pull clients of every subscription of this proxy.

    Every call raises TopicNotFound and GroupNotFound, StateUnavailable, and PeerUnavailable where another proxy has to
    be asked: the owner of the first queue about the assignment, of the queue about its messages (``owner``).
    """

    def __init__(self, context: EngineContext, topics: Topics, settler: Settler, signer: ReceiptSigner) -> None:
        self.timer = NEVER
        self._context = context
        self._topics = topics
        self._assigning = Assigning(context)
        self._settler = settler
        self._signer = signer
        self._pulls: dict[QueueHost, _Pull] = {}
        self._looking = False

    def start(self) -> None:
        """Look time and again who has which queue, where messages are pulled."""
        self._context.deadlines.schedule(self._context.clock.monotonic() + LOOK_SECONDS, self)

    def owner(self, topic: str, group: str, number: int) -> InstanceId | None:
        """Which other proxy owns a queue; None: this one does, or there is none such. Raises: PeerUnavailable, where
        nobody does at the moment."""
        served = self._topics.served.get(Subscription(TopicName(topic), GroupName(group)))
        if served is None or number >= len(served.hosts):
            return None
        return self._context.router.responsible(served.layout.queues[number])

    # -- the assignment -------------------------------------------------------------------------------------------

    async def heard(
        self, topic: str, group: str, client_id: ClientId, supports: Collection[ConsumeMode], shown: int | None
    ) -> Told:
        """A client registers, or shows by the generation that it knows that it lives. A group that is unknown is
        created where that is done by use. Raises: WrongMode, where the client can do nothing but pull, and nobody may;
        it has a session all the same. RetryLater, where there are too many clients."""
        served = await self._topics.subscription_to_pop(topic, group)
        told = await self._assigning.heard(served, client_id, supports, shown)
        if told.mode is not ConsumeMode.PULL and ConsumeMode.POP not in supports:
            raise modes.wrong_mode(served.spec, ConsumeMode.PULL)
        return told

    async def left(self, topic: str, group: str, client_id: ClientId) -> None:
        """A client leaves: what it has not committed returns at once. Idempotent."""
        await self._assigning.left(self._topics.subscription(topic, group), client_id)

    # -- messages -------------------------------------------------------------------------------------------------

    async def pull(self, topic: str, group: str, number: int, order: PullOrder, presence: Presence) -> list[Leased]:
        """What the client has of the queue behind ``after`` and, where that is nothing, what it is given now.

        A later pull of the same queue ends this one. Raises: WrongMode, Fenced, InvalidRequest, TooManyInFlight,
        BrokerUnavailable.
        """
        served = self._topics.subscription(topic, group)
        host = self._host(served, number)
        await self._lease(served, host, order.client_id, order.generation, is_pull=True)
        after = None if order.after is None else self._receipt(host, order.after, "after").copy_id
        while (earlier := self._pulls.get(host)) is not None:
            earlier.presence.leave()
            await earlier.ended.wait()
        pull = self._pulls[host] = _Pull()
        presence.on_leave = pull.presence.leave
        if presence.gone:
            pull.presence.leave()
        try:
            return await self._pull(served, host, order, after, pull.presence)
        finally:
            presence.on_leave = None
            del self._pulls[host]
            pull.ended.set()

    async def _pull(
        self,
        served: ServedSubscription,
        host: QueueHost,
        order: PullOrder,
        after: CopyId | None,
        presence: Presence,
    ) -> list[Leased]:
        """In turns, for the queue may have another owner or another client meanwhile."""
        deadline = self._context.clock.monotonic() + order.wait_seconds
        while True:
            left = deadline - self._context.clock.monotonic()
            is_last = left <= LOOK_SECONDS
            lease = await self._lease(served, host, order.client_id, order.generation, is_pull=True)
            # A repeat: it may have been committed meanwhile, by another proxy's hand.
            await self._look_up(served, host, [*islice(lease.uncommitted(after), order.max_messages)])
            if next(lease.uncommitted(after), None) is None and not presence.gone:
                given = await self._give(served, lease, order, left, presence)
                if given and len([*islice(lease.uncommitted(after), len(given) + 1)]) == len(given):
                    return given  # as nearly always: it is all that the client has and has not seen
            messages = await self._messages(served, lease, after, order)
            if messages or is_last or presence.gone or served.is_closed:
                return messages

    async def _give(
        self, served: ServedSubscription, lease: PullLease, order: PullOrder, left: float, presence: Presence
    ) -> list[Leased]:
        """Lease the client what comes next, should it come soon. Raises: TooManyInFlight, where the client itself has
        too much, or the group when the wait is over."""
        count_max = UNCOMMITTED_MAX - lease.host.state.counts.in_flight
        if count_max <= 0:
            raise TooManyInFlight(f"{UNCOMMITTED_MAX} messages of this queue are pulled: commit some")
        await self._bring_again(served, lease, order.max_messages, presence)
        request = PopRequest(
            max_messages=min(order.max_messages, count_max),
            wait_seconds=min(max(0.0, left), LOOK_SECONDS),
            invisibility_seconds=LEASE_SECONDS,
            pull=lease,
            answer_bytes=order.answer_bytes,
        )
        try:
            return await served.pop(request, presence)
        except TooManyInFlight:
            if left <= LOOK_SECONDS:
                raise
            return []

    @staticmethod
    async def _bring_again(served: ServedSubscription, lease: PullLease, max_messages: int, presence: Presence) -> None:
        """Fetch the bodies that were forgotten of what comes next: together, lest each of them be a pull of its own."""
        host = lease.host
        coming = [held for held in islice(lease.following(), max_messages) if held.message is None]
        for held in coming:
            if held.state is MessageState.READY:
                host.requeue(held)  # it comes again, in its place

        def have_come() -> bool:
            if presence.gone or not any(held.state is MessageState.REQUEUED for held in coming):
                return True
            return (
                host.state.flow.is_paused and next(lease.candidates(), None) is not None
            )  # no memory for more of them

        if coming:
            await served.retrieval.until(have_come)

    async def commit(
        self, topic: str, group: str, number: int, client_id: ClientId, generation: int, receipt_handle: str
    ) -> int:
        """Settle a pulled message and all that the client has before it; how many were not settled yet. Idempotent.

        Raises: WrongMode, Fenced, InvalidRequest, BrokerUnavailable.
        """
        served = self._topics.subscription(topic, group)
        host = self._host(served, number)
        lease = await self._lease(served, host, client_id, generation, is_pull=False)
        receipt = self._receipt(host, receipt_handle, "receipt_handle")
        if receipt.lease_id != lease.lease_id:
            raise _fenced(number)
        held = host.find(receipt.copy_id)
        if held is None or held.key is None or held.lease_id != lease.lease_id:
            record = (await self._context.leases.peek(host.broker_queue, [receipt.copy_id])).get(receipt.copy_id)
            if record is None or record.lease_id != lease.lease_id:
                raise _fenced(number)
            if record.state is RecordState.ACKED:
                return 0
            if record.state is RecordState.DEAD:
                raise InvalidRequest(
                    "receipt_handle is that of a message that was rejected; commit the one before it, or after it",
                    field="receipt_handle",
                )
            raise PeerUnavailable(f"messages of queue {host.broker_queue} are on their way back from the broker")
        became = await self._settler.settle_held(served, host, lease.through(held))
        if SettleStatus.LOST in became:
            raise _fenced(number)
        return became.count(SettleStatus.DONE)

    # -- who has it -----------------------------------------------------------------------------------------------

    @staticmethod
    def _host(served: ServedSubscription, number: int) -> QueueHost:
        if number >= len(served.hosts):
            raise InvalidRequest(f"queue must be less than {len(served.hosts)}, as many as there are", field="queue")
        return served.hosts[number]

    def _receipt(self, host: QueueHost, handle: str, field: str) -> Receipt:
        receipt = self._signer.verify(handle)
        if receipt is None or receipt.queue != host.queue or not modes.is_pulled(receipt.lease_id):
            raise InvalidRequest(
                f"{field} is no receipt handle of a message that was pulled from this queue", field=field
            )
        return receipt

    async def _lease(
        self, served: ServedSubscription, host: QueueHost, client_id: ClientId, generation: int, *, is_pull: bool
    ) -> PullLease:
        """What a client has of a queue, once all that others had of it is given back, and the rest is here.

        ``is_pull``: or is it a commit, which a client may do until it has let go of the queue.
        """
        if not host.is_owned:
            raise PeerUnavailable(f"queue {host.broker_queue} changes hands just now")
        spec, number = served.spec, host.queue.number
        if spec.mode is not ConsumeMode.PULL if is_pull else modes.leased_by(spec) is not ConsumeMode.PULL:
            raise modes.wrong_mode(spec, ConsumeMode.PULL)
        holding = await self._holding(served, number, client_id, generation, is_news=False)
        holding = holding or await self._holding(served, number, client_id, generation, is_news=True)
        if holding is None:
            raise _fenced(number)
        if is_pull and holding.to is not None:
            raise Fenced(f"queue {number} is to go to another client: settle what is done of it, and let go of it")
        await served.stale_leases.given_back()
        lease = PullLease(host, modes.pull_lease_id(served.spec, holding.since), client_id)
        if host.listener is None or host.pull_order != (host.listener, lease.lease_id):
            # What the broker does not have any more, somebody has deleted there.
            if not await served.retrieval.until(lease.is_lined_up) and await _has_more(host):
                raise BrokerUnavailable(f"messages of queue {host.broker_queue} are on their way back from the broker")
            # It has come again where its ack did not reach the broker.
            await self._look_up(served, host, lease.unsure())
            if host.listener is not None:
                host.pull_order = host.listener, lease.lease_id
        return lease

    async def _look_up(self, served: ServedSubscription, host: QueueHost, unsure: Sequence[BufferedMessage]) -> None:
        """Settle those which the store knows to be settled."""
        if not unsure:
            return
        records = await self._context.leases.peek(host.broker_queue, [held.copy_id for held in unsure])
        known: list[Found] = []
        for held in unsure:
            record = records.get(held.copy_id)
            if record is not None and record.state in SETTLED_STATES and not held.is_undecided:
                known.append(found_so(held.copy_id, held.queue_index, record, held))
                host.conform(held, record, 0.0)
        note_found_settled(self._context, served.name, known)

    async def _holding(
        self, served: ServedSubscription, number: int, client_id: ClientId, generation: int, *, is_news: bool
    ) -> Holding | None:
        assignment = await self._assigning.known(served, is_news=is_news)
        if assignment.lease_generation != served.spec.lease_generation:
            return None
        return held_by(assignment, number, client_id, generation)

    # -- what it is given -----------------------------------------------------------------------------------------

    @staticmethod
    async def _messages(
        served: ServedSubscription, lease: PullLease, after: CopyId | None, order: PullOrder
    ) -> list[Leased]:
        """What the client has behind ``after``, in order; bounded in number and in bytes of the answer."""
        found: list[Leased] = []
        size = 0
        wanted = [*islice(lease.uncommitted(after), order.max_messages)]
        for first in range(0, len(wanted), BODIES_AT_ONCE):
            part = wanted[first : first + BODIES_AT_ONCE]
            if not await served.bring_back(part):
                if found:
                    break
                raise BrokerUnavailable("the messages are on their way back from the broker")
            for held in part:
                message = held.message
                if message is None or not lease.is_mine(held):
                    return found  # it has changed hands meanwhile: what stands before it has not, or it is met later
                size += order.answer_bytes(message)
                if found and size > ANSWER_BYTES_MAX:
                    return found
                found.append(served.leased(held, message))
        return found

    # -- what is known of it --------------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """The time to look who has which queue."""
        if not self._looking:
            pulled = [served for served in self._topics.served.values() if _is_pulled_here(served)]
            if pulled:
                self._looking = True
                self._context.background.spawn(self._look(pulled), name="look who has which queue")
        return now + LOOK_SECONDS * random.uniform(0.8, 1.2)

    async def _look(self, pulled: Sequence[ServedSubscription]) -> None:
        try:
            for served in pulled:
                if served.hosts[0].is_owned:
                    await self._assigning.tend(served)
                await self._assigning.known(served, is_news=True)
        except RetryLater:
            pass  # the store is away: nobody is given anything meanwhile
        finally:
            self._looking = False


def _is_pulled_here(served: ServedSubscription) -> bool:
    """Whether this proxy arranges the clients of a subscription, or has messages that they have."""
    if modes.leased_by(served.spec) is not ConsumeMode.PULL:
        return False
    hosts = served.hosts
    return hosts[0].is_owned or any(host.is_owned and host.state.counts.all(MessageState.LEASED) for host in hosts)


async def _has_more(host: QueueHost) -> bool:
    """Whether the broker has messages that are not here."""
    return host.channel is None or await host.channel.backlog() > 0


def _fenced(number: int) -> Fenced:
    return Fenced(
        f"queue {number} is not this client's in this generation: ask for the assignment, forget what was pulled of "
        "the queue and not committed, and pull again where it is assigned"
    )
