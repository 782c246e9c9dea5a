"""Acks, releases, extends and rejects leases. The store decides, and then its decision is applied to the queue.

A settlement is written to the store, then answered, then sent to the broker as ``basic.ack`` (decision 4). For messages
that can't be identified, the ack is sent before the answer, because no record would prevent their redelivery.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from popgate.domain.errors import PeerUnavailable
from popgate.domain.lease import RecordState, SettleAction, SettleAnswer, SettleStatus
from popgate.domain.modes import extended_under, is_pulled
from popgate.domain.names import CopyId, InstanceId, is_transient
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Absent, Found, found_so, note_found_settled
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind, JournalSubject
from popgate.ports.leases import SettleEntry
from popgate.ports.peers import PeerOrder, SettleAtOwner


class Verb(StrEnum):
    ACK = "ack"
    RELEASE = "release"
    EXTEND = "extend"
    REJECT = "reject"


class SettleOrder(NamedTuple):
    """A client's request for one lease.

    ``seconds``: the extension, or the delay of a release (None: the delay of the group's policy).
    """

    receipt_handle: str
    seconds: float | None = None
    reason: str = ""


class SettleResult(NamedTuple):
    """The result for one lease. ``status`` is part of the HTTP interface.

    ``invisible_until`` (Unix seconds) is set only for ``extended``.
    """

    status: str
    invisible_until: float | None = None


class _ValidOrder(NamedTuple):
    """An order whose receipt is valid."""

    place: int
    order: SettleOrder
    receipt: Receipt
    host: QueueHost

    @property
    def buffered(self) -> BufferedMessage | None:
        """This proxy's present state of the message; None if the message is not on this proxy."""
        return self.host.find(self.receipt.copy_id)

    @property
    def has_its_lease(self) -> bool:
        """Whether the message is on this proxy and, in this proxy's state, still has the lease of the receipt."""
        buffered = self.buffered
        return (
            buffered is not None
            and buffered.state is MessageState.LEASED
            and buffered.lease_id == self.receipt.lease_id
        )

    @property
    def is_transient(self) -> bool:
        return is_transient(self.receipt.copy_id)


REJECTED_AT_ONCE_MAX = 16
"""Maximum number of bodies fetched again at once: all bodies of a long request may not fit into memory."""

REMEMBERED_MAX = 10_000
"""Maximum number of settled unidentified messages for which a repeated settlement is recognized."""

_INVALID = SettleResult("invalid")
_EXPIRED = SettleResult("expired")
_UNAVAILABLE = SettleResult("unavailable")
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
        """Settle leases, and return one result for each order, in order.

        The journal records ``noted_as``, or by default the verb's event. A request from another proxy (``is_passed``)
        is not forwarded again. Raises: StateUnavailable. Orders that were forwarded, and some of several rejections,
        may have been carried out in this case.
        """
        results = [_INVALID] * len(orders)
        valid = self._valid_orders(subscription, verb, orders)
        there = [] if is_passed else [one for one in valid if _is_the_owners(one, verb)]
        if there:
            await self._settle_there(subscription, verb, there, results)
            valid = [one for one in valid if one not in there]
        transient = [one for one in valid if one.is_transient]
        gone = [one for one in transient if one.buffered is None]
        if gone:  # their leases have ended with their channel, or with an earlier settlement
            for one in gone:
                results[one.place] = self._remembered.get((one.receipt.copy_id, verb), _EXPIRED)
            valid = [one for one in valid if one not in gone]
            transient = [one for one in transient if one not in gone]
        if verb is Verb.REJECT:
            await self._reject(subscription, valid, results)
        else:
            counts = await self._counts(subscription, verb, valid)
            entries = [self._entry(subscription, verb, one, counts) for one in valid]
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
        self, subscription: ServedSubscription, verb: Verb, there: Sequence[_ValidOrder], results: list[SettleResult]
    ) -> None:
        """Send orders that only the owners can carry out to the owners.

        If a queue has no owner, this proxy begins its rejections.
        """
        by_owner: dict[InstanceId | None, list[_ValidOrder]] = {}
        for one in there:
            by_owner.setdefault(self._context.router.owner(one.host.broker_queue), []).append(one)
        for owner, many in by_owner.items():
            if owner is None:
                for one in many:
                    results[one.place] = _UNAVAILABLE
                rejected = [one for one in many if not one.is_transient] if verb is Verb.REJECT else []
                await self._reject_absent(subscription, rejected, results)
                continue
            orders = tuple(PeerOrder(*one.order) for one in many)
            message = SettleAtOwner(subscription=subscription.name, verb=verb, orders=orders)
            try:
                answers = [SettleResult(*answer) for answer in await self._context.router.ask(owner, message)]
            except PeerUnavailable:
                answers = [_UNAVAILABLE] * len(many)
            for one, answer in zip(many, answers, strict=True):
                results[one.place] = answer

    def _note(self, verb: Verb, transient: Sequence[_ValidOrder], results: Sequence[SettleResult]) -> None:
        """Remember which unidentified messages were settled, because a repeat can't be recognized in any other way."""
        for one in transient:
            if results[one.place].status in (_DONE[verb], _ALREADY[verb]):
                self._remembered[one.receipt.copy_id, verb] = SettleResult(_ALREADY[verb])
        while len(self._remembered) > REMEMBERED_MAX:
            del self._remembered[next(iter(self._remembered))]

    @staticmethod
    async def _flush(transient: Sequence[_ValidOrder], results: list[SettleResult]) -> None:
        """Send unidentified messages' acks before the answer, because no record would prevent their redelivery."""
        for host in {one.host for one in transient}:
            channel = host.channel
            if channel is not None:
                await channel.flush()
            if channel is None or host.channel is not channel:  # the acks may be lost with the channel
                for one in transient:
                    if one.host is host and results[one.place].status == _DONE[Verb.ACK]:
                        results[one.place] = _EXPIRED

    async def settle_held(
        self, subscription: ServedSubscription, host: QueueHost, many: Sequence[BufferedMessage]
    ) -> list[SettleStatus]:
        """Ack leased messages of one queue in one step. Return the status of each, in order.

        If a lease is no longer valid, its message is updated from the record. Raises: StateUnavailable.
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
                host.learn(buffered.copy_id, record, remaining)  # the queue's new owner must be notified
            elif status is SettleStatus.LOST:
                host.conform(buffered, record, remaining)
            else:  # also if it is a repeat: the first request may have been interrupted
                settled.append(buffered)
                oldest = min(oldest, record.changed_at)
        done = [buffered for buffered, answer in zip(many, answers, strict=True) if answer.status is SettleStatus.DONE]
        self._context.journal.record(EventKind.ACKED, subscription.name, done, self._context.clock.wall())
        note_found_settled(self._context, subscription.name, known)
        host.settle(settled, oldest)
        await self._context.router.until_sent()
        if host.channel is not None and any(buffered.is_transient for buffered in settled):
            await host.channel.flush()  # no record would prevent their redelivery
        return [answer.status for answer in answers]

    def _valid_orders(
        self, subscription: ServedSubscription, verb: Verb, orders: Sequence[SettleOrder]
    ) -> list[_ValidOrder]:
        """Return the orders whose receipts are valid for ``verb``."""
        valid: list[_ValidOrder] = []
        hosts = subscription.hosts
        for place, order in enumerate(orders):
            receipt = self._signer.verify(order.receipt_handle)
            if receipt is None or receipt.queue[:2] != subscription.name or receipt.queue.number >= len(hosts):
                continue
            if verb is not Verb.REJECT and is_pulled(receipt.lease_id):
                continue  # a pulled message is settled by a commit, or returns with its client's other messages
            valid.append(_ValidOrder(place, order, receipt, hosts[receipt.queue.number]))
        return valid

    async def _counts(
        self, subscription: ServedSubscription, verb: Verb, valid: Sequence[_ValidOrder]
    ) -> Mapping[CopyId, int]:
        """Return the delivery counts of messages that are released with the policy's delay.

        The counts of messages that are not on this proxy are read from the store. Raises: StateUnavailable.
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
        subscription: ServedSubscription, verb: Verb, one: _ValidOrder, counts: Mapping[CopyId, int]
    ) -> SettleEntry:
        seconds = one.order.seconds
        if seconds is None:
            count = counts.get(one.receipt.copy_id, 0)
            seconds = subscription.spec.policy.retry.delay_seconds(count) if count else 0.0
        receipt = one.receipt
        entry = SettleEntry(one.host.broker_queue, receipt.copy_id, receipt.lease_id, _ACTION[verb], seconds)
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
        valid: Sequence[_ValidOrder],
        answers: Sequence[SettleAnswer],
        results: list[SettleResult],
        event: EventKind,
    ) -> None:
        """Apply the store's decisions to the queues.

        Look up the messages again, because they may have changed since the request was sent to the store.
        """
        done: list[JournalSubject] = []
        details: list[str] = []
        known: list[Found] = []
        acked: dict[QueueHost, list[BufferedMessage]] = {}
        wall = self._context.clock.wall()
        oldest = float("inf")
        done_result, already_result = SettleResult(_DONE[verb]), SettleResult(_ALREADY[verb])
        for one, (status, remaining, record, _) in zip(valid, answers, strict=True):
            buffered = one.buffered
            # If the answer to a release was lost, its repeat is the first to be applied here.
            is_first = status is SettleStatus.DONE or (verb is Verb.RELEASE and one.has_its_lease)
            if status is SettleStatus.LOST or record is None or (buffered is None and is_first and one.is_transient):
                results[one.place] = _EXPIRED  # lost, or an unidentified message's lease ended with its channel
                continue
            result = done_result if is_first else already_result
            results[one.place] = result._replace(invisible_until=wall + remaining) if verb is Verb.EXTEND else result
            if is_first:
                details.append(one.order.reason)
                done.append(
                    buffered
                    or Absent(one.receipt.copy_id, one.receipt.queue.number, record.delivery_count, record.leased_at)
                )
            if verb is Verb.ACK:
                if not is_first:
                    known.append(found_so(one.receipt.copy_id, one.receipt.queue.number, record, buffered))
                if buffered is not None:  # also if it is a repeat: the first request may have been interrupted
                    acked.setdefault(one.host, []).append(buffered)
                    oldest = min(oldest, record.changed_at)
                elif is_first:
                    one.host.learn(one.receipt.copy_id, record, remaining)
            elif is_first:
                one.host.hear(one.receipt.copy_id, record, remaining)
        self._context.journal.record(event, subscription.name, done, wall, details=details if any(details) else ())
        note_found_settled(self._context, subscription.name, known)
        for host, held_here in acked.items():
            host.settle(held_here, oldest)

    async def _reject(
        self, subscription: ServedSubscription, valid: Sequence[_ValidOrder], results: list[SettleResult]
    ) -> None:
        """Dead-letter messages that a client rejects. The answer waits until the copies are in the dead-letter queue.

        If a request names a lease twice, the message is moved once, with the first reason.
        """
        firsts: dict[Receipt, _ValidOrder] = {}
        for one in valid:
            firsts.setdefault(one.receipt, one)
        present: list[tuple[_ValidOrder, BufferedMessage]] = []
        absent: list[_ValidOrder] = []
        for one in firsts.values():
            buffered = one.buffered
            results[one.place] = _UNAVAILABLE
            if buffered is None or buffered.lease_id != one.receipt.lease_id:
                absent.append(one)
            else:
                present.append((one, buffered))
        await self._reject_absent(subscription, absent, results)
        for start in range(0, len(present), REJECTED_AT_ONCE_MAX):
            await self._reject_present(subscription, present[start : start + REJECTED_AT_ONCE_MAX], results)
        for one in valid:
            results[one.place] = results[firsts[one.receipt].place]

    async def _reject_present(
        self,
        subscription: ServedSubscription,
        present: Sequence[tuple[_ValidOrder, BufferedMessage]],
        results: list[SettleResult],
    ) -> None:
        await subscription.bring_back([buffered for _, buffered in present])
        able: list[tuple[_ValidOrder, BufferedMessage]] = []
        subjects: list[Absent] = []
        for one, buffered in present:
            if buffered.lease_id != one.receipt.lease_id:  # the lease ended during the wait
                results[one.place] = _EXPIRED
            elif buffered.message is not None:
                able.append((one, buffered))
                subjects.append(_as_it_is(buffered))
        if not able:
            return
        moved = await subscription.mover.reject([buffered for _, buffered in able], [_reason(one) for one, _ in able])
        done: list[Absent] = []
        reasons: list[str] = []
        for (one, buffered), subject, was_moved in zip(able, subjects, moved, strict=True):
            if was_moved:
                results[one.place] = SettleResult("rejected")
                done.append(subject)
                reasons.append(_reason(one))
            elif buffered.state is not MessageState.MOVING and buffered.state is not MessageState.DROPPED:
                results[one.place] = _EXPIRED  # for a message that changed hands, a repeat gets the result
        wall = self._context.clock.wall()
        self._context.journal.record(EventKind.REJECTED, subscription.name, done, wall, details=reasons)

    async def _reject_absent(
        self, subscription: ServedSubscription, absent: Sequence[_ValidOrder], results: list[SettleResult]
    ) -> None:
        """Begin the moves of rejected messages that are not on this proxy.

        The moves are finished when the broker delivers the messages.
        """
        if not absent:
            return
        dead = subscription.layout.dead
        entries = [
            SettleEntry(
                one.host.broker_queue,
                one.receipt.copy_id,
                one.receipt.lease_id,
                SettleAction.MOVE,
                target=dead,
                target_copy_id=self._context.mint_copy_id(),
                reason=_reason(one),
            )
            for one in absent
        ]
        answers = await self._context.leases.settle(entries)
        known: list[Found] = []
        for one, (status, remaining, record, _) in zip(absent, answers, strict=True):
            if status is not SettleStatus.LOST and record is not None:
                one.host.learn(one.receipt.copy_id, record, remaining)
                subscription.ask()
            elif record is not None and record.state is RecordState.DEAD and record.lease_id == one.receipt.lease_id:
                results[one.place] = SettleResult("rejected")
                known.append(found_so(one.receipt.copy_id, one.receipt.queue.number, record, None))
            else:
                results[one.place] = _EXPIRED
        note_found_settled(self._context, subscription.name, known)


def _is_the_owners(one: _ValidOrder, verb: Verb) -> bool:
    """Whether only the owner of the queue, which is another proxy, can carry out the order.

    A rejection needs the message, and a message that can't be identified has no record.
    """
    return not one.host.is_owned and (verb is Verb.REJECT or one.is_transient)


def _as_it_is(buffered: BufferedMessage) -> Absent:
    lease = buffered.leased_at, buffered.message, buffered.client, buffered.invisibility_seconds
    return Absent(buffered.copy_id, buffered.queue_index, buffered.delivery_count, *lease)


def _reason(one: _ValidOrder) -> str:
    return one.order.reason or "rejected"
