"""Rejects leases: moves their messages to the dead-letter queue.

If this proxy has the message in its memory, it moves the message at once, and the result of the rejection is available
when the copy is in the dead-letter queue. The broker may first have to deliver the message's body again. For any other
message, this proxy writes the beginning of the move to the message's record. The move is finished when the broker
delivers the message.
"""

from collections.abc import Sequence

from popgate.domain.attempts import AttemptEnd, described
from popgate.domain.lease import RecordState, SettleAction, SettleStatus
from popgate.domain.receipt import Receipt
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Absent, Found, found_so, note_found_settled
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.settle.orders import EXPIRED, UNAVAILABLE, SettleResult, ValidOrder, cause_of
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.journal import EventKind
from popgate.ports.leases import SettleEntry

REJECTED_AT_ONCE_MAX = 16
"""Maximum number of rejected messages whose bodies are fetched at the same time, because all bodies of a long request
may not fit into memory."""


class Rejections:
    """Carries out rejections for every subscription of this proxy.

    The methods write the result of each order to ``results``, at the order's ``place``.
    """

    def __init__(self, context: EngineContext) -> None:
        self._context = context

    async def reject(
        self, subscription: ServedSubscription, valid: Sequence[ValidOrder], results: list[SettleResult]
    ) -> None:
        """Dead-letter messages that a client rejects. Return when the moves have ended.

        A message that is not in this proxy's memory is moved later; until then its result is "unavailable". If two
        orders name the same lease, the message is moved once, with the reason of the first order.
        """
        firsts: dict[Receipt, ValidOrder] = {}
        for one in valid:
            firsts.setdefault(one.receipt, one)
        present: list[tuple[ValidOrder, BufferedMessage]] = []
        absent: list[ValidOrder] = []
        for one in firsts.values():
            buffered = one.buffered
            results[one.place] = UNAVAILABLE
            if buffered is None or buffered.lease_id != one.receipt.lease_id:
                absent.append(one)
            else:
                present.append((one, buffered))
        await self.begin_absent(subscription, absent, results)
        for start in range(0, len(present), REJECTED_AT_ONCE_MAX):
            await self._reject_present(subscription, present[start : start + REJECTED_AT_ONCE_MAX], results)
        for one in valid:
            results[one.place] = results[firsts[one.receipt].place]

    async def _reject_present(
        self,
        subscription: ServedSubscription,
        present: Sequence[tuple[ValidOrder, BufferedMessage]],
        results: list[SettleResult],
    ) -> None:
        await subscription.bring_back([buffered for _, buffered in present])
        able: list[tuple[ValidOrder, BufferedMessage]] = []
        subjects: list[Absent] = []
        for one, buffered in present:
            if buffered.lease_id != one.receipt.lease_id:  # the lease ended during the wait
                results[one.place] = EXPIRED
            elif buffered.message is not None:
                able.append((one, buffered))
                subjects.append(_as_it_is(buffered))
        if not able:
            return
        moved = await subscription.mover.reject([buffered for _, buffered in able], [_attempt(one) for one, _ in able])
        done: list[Absent] = []
        reasons: list[str] = []
        for (one, buffered), subject, was_moved in zip(able, subjects, moved, strict=True):
            if was_moved:
                results[one.place] = SettleResult("rejected")
                done.append(subject)
                reasons.append(_reason(one))
            elif buffered.state is not MessageState.MOVING and buffered.state is not MessageState.DROPPED:
                results[one.place] = EXPIRED  # a message whose queue has changed owners remains UNAVAILABLE: try again
        wall = self._context.clock.wall()
        self._context.journal.record(EventKind.REJECTED, subscription.name, done, wall, details=reasons)

    async def begin_absent(
        self, subscription: ServedSubscription, absent: Sequence[ValidOrder], results: list[SettleResult]
    ) -> None:
        """Begin to dead-letter rejected messages that are not in this proxy's memory.

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
                reason=_attempt(one),
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
                results[one.place] = EXPIRED
        note_found_settled(self._context, subscription.name, known)


def _as_it_is(buffered: BufferedMessage) -> Absent:
    lease = buffered.leased_at, buffered.message, buffered.client, buffered.invisibility_seconds
    return Absent(buffered.copy_id, buffered.queue_index, buffered.delivery_count, *lease)


def _attempt(one: ValidOrder) -> str:
    """Return the reason of the move, with the attempt that the rejection ends."""
    return described(_reason(one), AttemptEnd.REJECTED, cause_of(one))


def _reason(one: ValidOrder) -> str:
    return one.order.reason or "rejected"
