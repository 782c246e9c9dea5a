"""Acks, releases, extends and rejects leases. The store decides, and this proxy then applies the decision to the queue.

The steps are, in order: write the settlement to the store, answer the client, and send ``basic.ack`` to the broker
(decision 4). A message without a stable id is called unidentified or transient below. The ack of such a message is sent
before the answer, because the store has no record that would settle the message again if the broker redelivered it.
"""

from collections.abc import Mapping, Sequence

from popgate.domain.attempts import AttemptEnd, described
from popgate.domain.errors import PeerUnavailable
from popgate.domain.lease import SettleAction, SettleAnswer, SettleStatus
from popgate.domain.modes import extended_under, is_pulled
from popgate.domain.names import CopyId, InstanceId
from popgate.domain.receipt import ReceiptSigner
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Absent, Found, found_so, note_found_settled
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.host import QueueHost
from popgate.engine.settle.orders import (
    EXPIRED,
    INVALID,
    UNAVAILABLE,
    SettleOrder,
    SettleResult,
    ValidOrder,
    Verb,
    cause_of,
)
from popgate.engine.settle.rejecting import Rejections
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind, JournalSubject
from popgate.ports.leases import SettleEntry
from popgate.ports.peers import PeerOrder, SettleAtOwner

REMEMBERED_MAX = 10_000
"""Maximum number of settled unidentified messages that a proxy remembers, to recognize repeated settlements."""

_ACTION = {Verb.ACK: SettleAction.ACK, Verb.RELEASE: SettleAction.RELEASE, Verb.EXTEND: SettleAction.EXTEND}
_DONE = {Verb.ACK: "acked", Verb.RELEASE: "released", Verb.EXTEND: "extended", Verb.REJECT: "rejected"}
_ALREADY = {Verb.ACK: "already_acked", Verb.RELEASE: "released", Verb.EXTEND: "extended", Verb.REJECT: "rejected"}
_ENDS = (Verb.ACK, Verb.REJECT)
"""Verbs that remove a message from its queue."""
_EVENT = {Verb.ACK: EventKind.ACKED, Verb.RELEASE: EventKind.RELEASED, Verb.EXTEND: EventKind.EXTENDED}


class Settler:
    """Carries out settlements for every subscription of this proxy."""

    def __init__(self, context: EngineContext, signer: ReceiptSigner) -> None:
        self._context = context
        self._signer = signer
        self._rejections = Rejections(context)
        self._remembered: dict[tuple[CopyId, Verb], SettleResult] = {}

    async def settle(
        self,
        subscription: ServedSubscription,
        verb: Verb,
        orders: Sequence[SettleOrder],
        *,
        noted_as: EventKind | None = None,
        is_passed: bool = False,
    ) -> list[SettleResult]:
        """Carry out ``orders``. Return one result for each order, in the sequence of ``orders``.

        ``noted_as``: the event that the journal records; by default, the event of the verb. ``is_passed``: whether
        another proxy has forwarded this request. Such a request is not forwarded again. Raises: StateUnavailable. If
        this error is raised, forwarded orders and some of the rejections may have been carried out.
        """
        results = [INVALID] * len(orders)
        valid = self._valid_orders(subscription, verb, orders)
        is_elsewhere = not is_passed and not all(host.is_owned for host in {one.host for one in valid})
        there = [one for one in valid if _is_the_owners(one, verb)] if is_elsewhere else []
        if there:
            await self._settle_there(subscription, verb, there, results)
            valid = _without(valid, there)
        transient = [one for one in valid if one.is_transient]
        gone = [one for one in transient if one.buffered is None]
        if gone:  # the leases of these messages have ended with their channel, or with an earlier settlement
            for one in gone:
                results[one.place] = self._remembered.get((one.receipt.copy_id, verb), EXPIRED)
            valid, transient = _without(valid, gone), _without(transient, gone)
        if verb is Verb.REJECT:
            await self._rejections.reject(subscription, valid, results)
        else:
            counts = await self._counts(subscription, verb, valid)
            entries = (
                [_ack(one) for one in valid]
                if verb is Verb.ACK
                else [self._entry(subscription, verb, one, counts) for one in valid]
            )
            answers = await self._context.leases.settle(entries) if entries else []
            self._apply(subscription, verb, valid, answers, results, noted_as or _EVENT[verb])
        if not is_passed:
            await self._context.router.until_sent()
        if transient and verb is Verb.ACK:
            await self._flush(transient, results)
        if transient and verb in _ENDS:
            self._note(verb, transient, results)
        return results

    async def _settle_there(
        self, subscription: ServedSubscription, verb: Verb, there: Sequence[ValidOrder], results: list[SettleResult]
    ) -> None:
        """Forward orders to the owners of their queues, because only the owners can carry them out.

        If a queue has no owner, this proxy writes the beginning of each rejection to the store, and the result of every
        order for that queue is "unavailable".
        """
        by_owner: dict[InstanceId | None, list[ValidOrder]] = {}
        for one in there:
            by_owner.setdefault(self._context.router.owner(one.host.broker_queue), []).append(one)
        for owner, many in by_owner.items():
            if owner is None:
                for one in many:
                    results[one.place] = UNAVAILABLE
                rejected = [one for one in many if not one.is_transient] if verb is Verb.REJECT else []
                await self._rejections.begin_absent(subscription, rejected, results)
                continue
            orders = tuple(_peer_order(one.order) for one in many)
            message = SettleAtOwner(subscription=subscription.name, verb=verb, orders=orders)
            try:
                answers = [SettleResult(*answer) for answer in await self._context.router.ask(owner, message)]
            except PeerUnavailable:
                answers = [UNAVAILABLE] * len(many)
            for one, answer in zip(many, answers, strict=True):
                results[one.place] = answer

    def _note(self, verb: Verb, transient: Sequence[ValidOrder], results: Sequence[SettleResult]) -> None:
        """Remember the unidentified messages that these orders have settled, so that repeated orders can be answered.

        A repeated order could not be answered in another way: this proxy has dropped the message, and does not ask the
        store about unidentified messages that it has dropped.
        """
        for one in transient:
            if results[one.place].status in (_DONE[verb], _ALREADY[verb]):
                self._remembered[one.receipt.copy_id, verb] = SettleResult(_ALREADY[verb])
        while len(self._remembered) > REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]

    @staticmethod
    async def _flush(transient: Sequence[ValidOrder], results: list[SettleResult]) -> None:
        """Send the acks of unidentified messages to the broker. If an ack may be lost, set the result to "expired"."""
        for host in {one.host for one in transient}:
            channel = host.channel
            if channel is not None:
                await channel.flush()
            if channel is None or host.channel is not channel:  # the acks may be lost with the channel
                for one in transient:
                    if one.host is host and results[one.place].status == _DONE[Verb.ACK]:
                        results[one.place] = EXPIRED

    async def settle_held(
        self, subscription: ServedSubscription, host: QueueHost, many: Sequence[BufferedMessage]
    ) -> list[SettleStatus]:
        """Ack leased messages of one queue with one request to the store. Return their statuses in the same order.

        If a message's lease is no longer valid, update this proxy's state of the message from its record. Raises:
        StateUnavailable.
        """
        entries = [
            SettleEntry(host.broker_queue, buffered.copy_id, buffered.lease_id, SettleAction.ACK) for buffered in many
        ]
        answers = await self._context.leases.settle(entries) if entries else []
        settled: list[BufferedMessage] = []
        known: list[Found] = []
        oldest = float("inf")
        for buffered, (status, remaining, record, _) in zip(many, answers, strict=True):
            if record is None:
                continue
            if status is SettleStatus.ALREADY:
                known.append(found_so(buffered.copy_id, buffered.queue_index, record, buffered))
            if host.has_changed_hands(buffered):
                host.learn(buffered.copy_id, record, remaining)  # this also notifies the queue's new owner
            elif status is SettleStatus.LOST:
                host.conform(buffered, record, remaining)
            else:  # also for ALREADY: the first request may have been interrupted
                settled.append(buffered)
                oldest = min(oldest, record.changed_at)
        done = [buffered for buffered, answer in zip(many, answers, strict=True) if answer.status is SettleStatus.DONE]
        self._context.journal.record(EventKind.ACKED, subscription.name, done, self._context.clock.wall())
        note_found_settled(self._context, subscription.name, known)
        host.settle(settled, oldest)
        await self._context.router.until_sent()
        if host.channel is not None and any(buffered.is_transient for buffered in settled):
            await host.channel.flush()  # no record would settle these messages again after a redelivery
        return [answer.status for answer in answers]

    def _valid_orders(
        self, subscription: ServedSubscription, verb: Verb, orders: Sequence[SettleOrder]
    ) -> list[ValidOrder]:
        """Return the orders whose receipt handles are valid in this subscription and allow ``verb``."""
        valid: list[ValidOrder] = []
        hosts = subscription.hosts
        (own_topic, own_group), verify = subscription.name, self._signer.verify
        for place, order in enumerate(orders):
            receipt = verify(order.receipt_handle)
            if receipt is None:
                continue
            topic, group, number = receipt.queue
            if group != own_group or topic != own_topic or number >= len(hosts):
                continue
            if verb is not Verb.REJECT and is_pulled(receipt.lease_id):
                continue  # a pulled message is settled by a commit, or returned with its client's other messages
            valid.append(ValidOrder(place, order, receipt, hosts[number]))
        return valid

    async def _counts(
        self, subscription: ServedSubscription, verb: Verb, valid: Sequence[ValidOrder]
    ) -> Mapping[CopyId, int]:
        """Return the delivery counts that the retry delay of the group's policy depends on.

        They are needed for releases without a delay of their own. If a message is not in this proxy's memory, its count
        is read from the store. Raises: StateUnavailable.
        """
        if verb is not Verb.RELEASE or subscription.spec.policy.retry.initial_seconds <= 0:
            return {}
        delayed = [one for one in valid if one.order.seconds is None]
        counts = {one.receipt.copy_id: one.buffered.delivery_count for one in delayed if one.buffered is not None}
        for host in {one.host for one in delayed}:
            absent = [one.receipt.copy_id for one in delayed if one.host is host and one.receipt.copy_id not in counts]
            if absent:
                records = await self._context.leases.peek(host.broker_queue, absent)
                counts.update((copy_id, record.delivery_count) for copy_id, record in records.items())
        return counts

    @staticmethod
    def _entry(
        subscription: ServedSubscription, verb: Verb, one: ValidOrder, counts: Mapping[CopyId, int]
    ) -> SettleEntry:
        seconds = one.order.seconds
        if seconds is None:
            count = counts.get(one.receipt.copy_id, 0)
            seconds = subscription.spec.policy.retry.delay_seconds(count) if count else 0.0
        receipt = one.receipt
        attempt = ""
        if verb is Verb.RELEASE:
            attempt = described("", AttemptEnd.RELEASED, cause_of(one), attempt_reason=one.order.reason)
        entry = SettleEntry(
            one.host.broker_queue, receipt.copy_id, receipt.lease_id, _ACTION[verb], seconds, reason=attempt
        )
        if verb is Verb.EXTEND:
            spec = subscription.spec
            return entry._replace(
                age_seconds_max=spec.policy.max_lease_seconds, under=(spec.subscription, extended_under(spec))
            )
        return entry

    def _apply(
        self,
        subscription: ServedSubscription,
        verb: Verb,
        valid: Sequence[ValidOrder],
        answers: Sequence[SettleAnswer],
        results: list[SettleResult],
        event: EventKind,
    ) -> None:
        """Apply the store's decisions to the queues, and write the results of the orders to ``results``.

        Each message is looked up again, because its state may have changed during the request to the store.
        """
        done: list[JournalSubject] = []
        details: list[str] = []
        known: list[Found] = []
        acked: dict[QueueHost, list[BufferedMessage]] = {}
        wall = self._context.clock.wall()
        oldest = float("inf")
        done_result, already_result = SettleResult(_DONE[verb]), SettleResult(_ALREADY[verb])
        for one, (status, remaining, record, _) in zip(valid, answers, strict=True):
            place, order, receipt, host = one
            buffered = host.find(receipt.copy_id)
            # If the store's answer to a release was lost, this proxy still has the lease, and must apply the repeat.
            is_first = status is SettleStatus.DONE or (verb is Verb.RELEASE and one.has_its_lease)
            if status is SettleStatus.LOST or record is None or (buffered is None and is_first and one.is_transient):
                results[place] = EXPIRED  # also if the channel of an unidentified message has ended meanwhile
                continue
            result = done_result if is_first else already_result
            results[place] = result._replace(invisible_until=wall + remaining) if verb is Verb.EXTEND else result
            if is_first:
                details.append(order.reason)
                done.append(
                    buffered or Absent(receipt.copy_id, receipt.queue.number, record.delivery_count, record.leased_at)
                )
            if verb is Verb.ACK:
                if not is_first:
                    known.append(found_so(receipt.copy_id, receipt.queue.number, record, buffered))
                if buffered is not None:  # also for a repeat: the first request may have been interrupted
                    acked.setdefault(host, []).append(buffered)
                    oldest = min(oldest, record.changed_at)
                elif is_first:
                    host.learn(receipt.copy_id, record, remaining)
            elif is_first:
                host.hear(receipt.copy_id, record, remaining)
        self._context.journal.record(event, subscription.name, done, wall, details=details if any(details) else ())
        note_found_settled(self._context, subscription.name, known)
        for host, held_here in acked.items():
            host.settle(held_here, oldest)


def _without(orders: Sequence[ValidOrder], others: Sequence[ValidOrder]) -> list[ValidOrder]:
    """Return ``orders`` without the ``others`` of the same request."""
    places = {one.place for one in others}
    return [one for one in orders if one.place not in places]


def _peer_order(order: SettleOrder) -> PeerOrder:
    return PeerOrder(order.receipt_handle, order.seconds, order.reason, *(order.cause or ()))


def _ack(one: ValidOrder) -> SettleEntry:
    receipt = one.receipt
    return SettleEntry(one.host.broker_queue, receipt.copy_id, receipt.lease_id, SettleAction.ACK)


def _is_the_owners(one: ValidOrder, verb: Verb) -> bool:
    """Whether another proxy owns the queue, and only that owner can carry out the order.

    This is the case for a rejection, which needs the message's body, and for every order for an unidentified message.
    """
    return not one.host.is_owned and (verb is Verb.REJECT or one.is_transient)
