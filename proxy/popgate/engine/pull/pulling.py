"""Serves pulls and commits: the client to which a queue is assigned receives the queue's messages in order.

Theory of operation (decision 11). A pulled message is leased in the store, like a popped message. The lease id contains
the generation in which the queue was assigned to the client. So a client that has lost its queue is refused at every
proxy and after every crash. The lease does not expire. It is released when the queue is assigned to another client, or
when the same client has registered again (``stale_leases``).

A pull returns the leased messages that the client has not seen. So a repeated pull gets the same answer, and no message
is lost when an answer is lost. A commit settles all messages of the client up to a given message, in one step.

The owner of a queue reads the assignment from the store when the generation in a client's request does not match the
known assignment, and periodically while messages are pulled. A delay is harmless: the next client of a queue receives
messages only after its first request, and this request makes the owner read the assignment.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
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
from popgate.domain.permissions import Permit, permit_all
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.domain.topics import ConsumeMode
from popgate.engine.catalog.topics import Topics
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Found, found_so, note_found_settled
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.lease.pull_lease import PullLease
from popgate.engine.lease.selection import ANSWER_BYTES_MAX, PullSelection
from popgate.engine.pull.assigning import Assigning, HeartbeatAnswer
from popgate.engine.queue.buffered import BufferedMessage, MessageState, size_of
from popgate.engine.queue.host import QueueHost
from popgate.engine.settle.settling import Settler
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.runtime.deadlines import NEVER
from popgate.runtime.in_turn import in_turn

UNCOMMITTED_MAX = 1_000
"""Maximum number of uncommitted messages of one queue that a client may have."""
LEASE_SECONDS = 10 * 366 * 86_400.0
"""Lease time, in seconds, of a pulled message: practically unlimited, because the lease ends with the session."""
LOOK_SECONDS = 1.0
"""Seconds between two reads of the assignment, and maximum seconds of one pop during a pull."""
BODIES_AT_ONCE = 16
"""Maximum number of bodies that are fetched again at once, because the bodies of all messages of a client may not fit
into memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOrder:
    """The parameters of a client's pull request.

    ``after``: the receipt handle of the last message that the client has seen, or None.
    """

    client_id: ClientId
    generation: int
    max_messages: int = 1
    wait_seconds: float = 0.0
    after: str | None = None
    answer_bytes: Callable[[Message], int] = size_of


class _Pull:
    """A pull that is in progress."""

    def __init__(self) -> None:
        self.presence = Presence()
        self.ended = asyncio.Event()


class Puller:
    """Serves the pull clients of every subscription of this proxy.

    Every call can raise TopicNotFound, GroupNotFound and StateUnavailable. Every call raises PeerUnavailable if another
    proxy must answer the request: for heartbeats, the owner of the first queue; for pulls and commits, the owner of the
    queue (``owner``).
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
        """Start to read the assignments periodically while messages are pulled."""
        self._context.deadlines.schedule(self._context.clock.monotonic() + LOOK_SECONDS, self)

    def owner(self, topic: str, group: str, number: int) -> InstanceId | None:
        """Return the other proxy that owns a queue, or None if this proxy owns it or the queue does not exist.

        Raises: PeerUnavailable if no proxy owns the queue at the moment.
        """
        served = self._topics.served.get(Subscription(TopicName(topic), GroupName(group)))
        if served is None or number >= len(served.hosts):
            return None
        return self._context.router.responsible(served.layout.queues[number])

    # -- the assignment -------------------------------------------------------------------------------------------

    async def heard(
        self,
        topic: str,
        group: str,
        client_id: ClientId,
        supports: Collection[ConsumeMode],
        shown: int | None,
        permit: Permit = permit_all,
    ) -> HeartbeatAnswer:
        """Register a client, or record its heartbeat. ``shown``: the generation that the client knows.

        If creation by use is on, an unknown group is created, if ``permit`` allows this. Raises: WrongMode if the
        client supports only pull mode and the group is in another mode (the client's session is registered
        nevertheless); RetryLater if there are too many clients; and the errors of ``permit``.
        """
        served = await self._topics.subscription_to_pop(topic, group, permit)
        told = await self._assigning.heard(served, client_id, supports, shown)
        if told.mode is not ConsumeMode.PULL and ConsumeMode.POP not in supports:
            raise modes.wrong_mode(served.spec, ConsumeMode.PULL)
        return told

    async def left(self, topic: str, group: str, client_id: ClientId) -> None:
        """End the session of a client, and release its uncommitted messages at once. Idempotent."""
        await self._assigning.left(self._topics.subscription(topic, group), client_id)

    # -- messages -------------------------------------------------------------------------------------------------

    async def pull(self, topic: str, group: str, number: int, order: PullOrder, presence: Presence) -> list[Leased]:
        """Return the client's messages of a queue behind ``order.after``. If there are none, lease new messages.

        A later pull of the same queue ends this pull. Raises: WrongMode, Fenced, InvalidRequest, TooManyInFlight,
        BrokerUnavailable.
        """
        served = self._topics.subscription(topic, group)
        served.polls += 1
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
        """Pull in several rounds, because the owner or the client of the queue may change in the meantime."""
        deadline = self._context.clock.monotonic() + order.wait_seconds
        while True:
            left = deadline - self._context.clock.monotonic()
            is_last = left <= LOOK_SECONDS
            lease = await self._lease(served, host, order.client_id, order.generation, is_pull=True)
            # If the pull is a repeat, another proxy may have committed messages since the first attempt.
            await self._look_up(served, host, [*islice(lease.uncommitted(after), order.max_messages)])
            if next(lease.uncommitted(after), None) is None and not presence.gone:
                given = await self._give(served, lease, order, left, presence)
                if given and len([*islice(lease.uncommitted(after), len(given) + 1)]) == len(given):
                    return given  # nearly always: these are all unseen messages of the client
            messages = await self._messages(served, lease, after, order)
            if messages or is_last or presence.gone or served.is_closed:
                return messages

    async def _give(
        self, served: ServedSubscription, lease: PullLease, order: PullOrder, left: float, presence: Presence
    ) -> list[Leased]:
        """Lease the next messages to the client if they arrive soon.

        Raises: TooManyInFlight if the client has too many uncommitted messages, or if too many messages of the group
        are in flight at the end of the wait.
        """
        count_max = UNCOMMITTED_MAX - lease.host.state.counts.in_flight
        if count_max <= 0:
            raise TooManyInFlight(f"{UNCOMMITTED_MAX} messages of this queue are pulled: commit some")
        await self._bring_again(served, lease, order.max_messages, presence)
        request = PopRequest(
            max_messages=min(order.max_messages, count_max),
            wait_seconds=min(max(0.0, left), LOOK_SECONDS),
            invisibility_seconds=LEASE_SECONDS,
            client=order.client_id,
            selection=PullSelection(lease),
            answer_bytes=order.answer_bytes,
        )
        try:
            return await served.pops.pop(request, presence)
        except TooManyInFlight:
            if left <= LOOK_SECONDS:
                raise
            return []

    @staticmethod
    async def _bring_again(served: ServedSubscription, lease: PullLease, max_messages: int, presence: Presence) -> None:
        """Fetch the dropped bodies of the next messages together, so that one pull can return them all."""
        host = lease.host
        coming = [buffered for buffered in islice(lease.following(), max_messages) if buffered.message is None]
        for buffered in coming:
            if buffered.state is MessageState.READY:
                host.requeue(buffered)  # the broker delivers it again, and its place in the queue stays the same

        def have_come() -> bool:
            if presence.gone or not any(buffered.state is MessageState.REQUEUED for buffered in coming):
                return True
            return (
                host.state.flow.is_paused and next(lease.candidates(), None) is not None
            )  # there is no memory for more bodies

        if coming:
            await served.retrieval.until(have_come)

    async def commit(
        self, topic: str, group: str, number: int, client_id: ClientId, generation: int, receipt_handle: str
    ) -> int:
        """Settle a pulled message and all earlier messages of the client in the queue. Idempotent.

        Return the number of messages that this call settled. Raises: WrongMode, Fenced, InvalidRequest,
        BrokerUnavailable.
        """
        served = self._topics.subscription(topic, group)
        host = self._host(served, number)
        lease = await self._lease(served, host, client_id, generation, is_pull=False)
        receipt = self._receipt(host, receipt_handle, "receipt_handle")
        if receipt.lease_id != lease.lease_id:
            raise _fenced(number)
        buffered = host.find(receipt.copy_id)
        if buffered is None or buffered.key is None or buffered.lease_id != lease.lease_id:
            record = (await self._context.leases.peek(host.broker_queue, [receipt.copy_id])).get(receipt.copy_id)
            if record is None or record.lease_id != lease.lease_id:
                raise _fenced(number)
            if record.state is RecordState.ACKED:
                return 0
            if record.state is RecordState.DEAD:
                raise InvalidRequest(
                    "receipt_handle belongs to a message that was rejected; commit the one before it, or after it",
                    field="receipt_handle",
                )
            raise PeerUnavailable(f"messages of queue {host.broker_queue} are on their way back from the broker")
        became = await self._settler.settle_held(served, host, lease.through(buffered))
        if SettleStatus.LOST in became:
            raise _fenced(number)
        return became.count(SettleStatus.DONE)

    # -- the lease of a client ------------------------------------------------------------------------------------

    @staticmethod
    def _host(served: ServedSubscription, number: int) -> QueueHost:
        if number >= len(served.hosts):
            raise InvalidRequest(f"queue must be less than {len(served.hosts)}, the number of queues", field="queue")
        return served.hosts[number]

    def _receipt(self, host: QueueHost, handle: str, field: str) -> Receipt:
        receipt = self._signer.verify(handle)
        if receipt is None or receipt.queue != host.queue or not modes.is_pulled(receipt.lease_id):
            raise InvalidRequest(
                f"{field} is not a receipt handle of a message that was pulled from this queue", field=field
            )
        return receipt

    async def _lease(
        self, served: ServedSubscription, host: QueueHost, client_id: ClientId, generation: int, *, is_pull: bool
    ) -> PullLease:
        """Return a client's lease of a queue.

        First wait until the leases of earlier clients are released, and the client's own messages are in the chain. If
        ``is_pull`` is False, the request is a commit, which is allowed until the client has released the queue.
        """
        if not host.is_owned:
            raise PeerUnavailable(f"queue {host.broker_queue} is changing its owner")
        spec, number = served.spec, host.queue.number
        if spec.mode is not ConsumeMode.PULL if is_pull else modes.leased_by(spec) is not ConsumeMode.PULL:
            raise modes.wrong_mode(spec, ConsumeMode.PULL)
        holding = await self._holding(served, number, client_id, generation, is_news=False)
        holding = holding or await self._holding(served, number, client_id, generation, is_news=True)
        if holding is None:
            raise _fenced(number)
        if is_pull and holding.to is not None:
            raise Fenced(f"queue {number} moves to another client: commit processed messages, and let go of it")
        await served.stale_leases.given_back()
        lease = PullLease(host, modes.pull_lease_id(served.spec, holding.since), client_id)
        if host.listener is None or host.pull_order != (host.listener, lease.lease_id):
            # If the broker has no more messages, the missing messages were deleted there.
            if not await served.retrieval.until(lease.is_lined_up) and await _has_more(host):
                raise BrokerUnavailable(f"messages of queue {host.broker_queue} are on their way back from the broker")
            # A settled message is delivered again if its ack did not reach the broker.
            await self._look_up(served, host, lease.unsure())
            if host.listener is not None:
                host.pull_order = host.listener, lease.lease_id
        return lease

    async def _look_up(self, served: ServedSubscription, host: QueueHost, unsure: Sequence[BufferedMessage]) -> None:
        """Look up ``unsure`` messages in the store, and apply the records of those that are already settled."""
        if not unsure:
            return
        records = await self._context.leases.peek(host.broker_queue, [buffered.copy_id for buffered in unsure])
        known: list[Found] = []
        for buffered in unsure:
            record = records.get(buffered.copy_id)
            if record is not None and record.state in SETTLED_STATES and not buffered.is_undecided:
                known.append(found_so(buffered.copy_id, buffered.queue_index, record, buffered))
                host.conform(buffered, record, 0.0)
        note_found_settled(self._context, served.name, known)

    async def _holding(
        self, served: ServedSubscription, number: int, client_id: ClientId, generation: int, *, is_news: bool
    ) -> Holding | None:
        assignment = await self._assigning.known(served, is_news=is_news)
        if assignment.lease_generation != served.spec.lease_generation:
            return None
        return held_by(assignment, number, client_id, generation)

    # -- the answer -----------------------------------------------------------------------------------------------

    @staticmethod
    async def _messages(
        served: ServedSubscription, lease: PullLease, after: CopyId | None, order: PullOrder
    ) -> list[Leased]:
        """Return the client's messages behind ``after``, in order. Their number and their bytes are limited."""
        found: list[Leased] = []
        size = 0
        wanted = [*islice(lease.uncommitted(after), order.max_messages)]
        for first in range(0, len(wanted), BODIES_AT_ONCE):
            part = wanted[first : first + BODIES_AT_ONCE]
            if not await served.bring_back(part):
                if found:
                    break
                raise BrokerUnavailable("the messages are on their way back from the broker")
            for buffered in part:
                message = buffered.message
                if message is None or not lease.is_mine(buffered):
                    return found  # the message changed hands; for earlier messages of the answer this is detected later
                size += order.answer_bytes(message)
                if found and size > ANSWER_BYTES_MAX:
                    return found
                found.append(served.leased(buffered, message))
        return found

    # -- the timer ------------------------------------------------------------------------------------------------

    def due(self, now: float) -> float | None:
        """Read the assignments of pulled subscriptions in the background. Return the time of the next call."""
        if not self._looking:
            pulled = [served for served in self._topics.served.values() if _is_pulled_here(served)]
            if pulled:
                self._looking = True
                self._context.background.spawn(self._look(pulled), name="look who has which queue")
        return now + LOOK_SECONDS * random.uniform(0.8, 1.2)

    async def _look(self, pulled: Sequence[ServedSubscription]) -> None:
        try:
            await in_turn(partial(self._look_at, served) for served in pulled)
        except RetryLater:
            pass  # the store is unavailable, so no client receives messages
        finally:
            self._looking = False

    async def _look_at(self, served: ServedSubscription) -> None:
        if served.hosts[0].is_owned:
            await self._assigning.tend(served)
        await self._assigning.known(served, is_news=True)


def _is_pulled_here(served: ServedSubscription) -> bool:
    """Whether this proxy assigns the queues of a subscription, or owns queues with pulled messages."""
    if modes.leased_by(served.spec) is not ConsumeMode.PULL:
        return False
    hosts = served.hosts
    return hosts[0].is_owned or any(host.is_owned and host.state.counts.all(MessageState.LEASED) for host in hosts)


async def _has_more(host: QueueHost) -> bool:
    """Whether the broker has, or may have, messages that it has not delivered to this proxy."""
    return host.channel is None or await host.channel.backlog() > 0


def _fenced(number: int) -> Fenced:
    return Fenced(
        f"queue {number} is not assigned to this client in this generation: ask for the assignment, discard its "
        "messages that were pulled and not committed, and pull again if it is assigned to you"
    )
