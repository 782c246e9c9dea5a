"""Dead-letters messages: moves them to the dead-letter queue of their subscription, without losing any of them.

A move has four steps. First, the store records the move (state ``moving``, with the copy id of the dead letter).
Second, the dead letter is published, and the broker confirms it. Third, the message is settled in the store. Fourth,
the message is acked at the broker. Every step can be repeated. A retry uses the recorded copy id. So it finishes an
interrupted move, and never duplicates the dead letter (decision 6).

A message that popgate itself fails to process does not block other messages. Each such message is moved separately, and
after the second failure (``Faults``) without its headers (``bare``). If this move fails too, the message stays
unsettled at the broker until its channel ends.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import NamedTuple

from popgate.domain.attempts import SEPARATOR, AttemptEnd, Cause, described, read, without_attempt
from popgate.domain.dead_letter import (
    MAX_DELIVERIES,
    REJECTED,
    UNREADABLE,
    DeadLetterDetails,
    bare,
    dead_letter_headers,
    packed,
    stripped,
)
from popgate.domain.errors import BrokerUnavailable, Conflict, RetryLater
from popgate.domain.lease import SETTLED_STATES, GrantStatus, LeaseRecord, RecordState, SettleAction, SettleStatus
from popgate.domain.message import Message
from popgate.domain.modes import is_pulled
from popgate.domain.names import BrokerQueue, CopyId
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.journal_subjects import Found, found_so, note_found_settled
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus
from popgate.ports.journal import EventKind
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

_log = logging.getLogger(__name__)

BATCH_COUNT_MAX = 256
RETRY_SECONDS = 1.0
REASON_LENGTH_MAX = 256
LEASE_SECONDS = 60.0
"""Seconds for which ``set_aside`` leases a message to move it. After that time, another proxy can lease the message."""

_Place = tuple[BrokerQueue, CopyId]


class _Begun(NamedTuple):
    """A move that the store has recorded, and whose dead letter has to be published."""

    buffered: BufferedMessage
    record: LeaseRecord
    message: Message


class Mover:
    """Moves messages of one subscription to its dead-letter queue."""

    def __init__(self, context: EngineContext, group: ServedGroup) -> None:
        self._context = context
        self._group = group
        self._dead = group.layout.dead
        self._publishing: set[_Place] = set()
        """Message copies whose dead letters are being published. If such a message is delivered again in the meantime,
        it must not be moved a second time, because that would duplicate its dead letter."""

    def is_publishing(self, queue: BrokerQueue) -> bool:
        """Whether dead letters of messages of ``queue`` are being published."""
        return any(place[0] == queue for place in self._publishing)

    def _place(self, buffered: BufferedMessage) -> _Place:
        return self._group.queue(buffered), buffered.copy_id

    def start(self, buffered: Sequence[BufferedMessage]) -> None:
        """Dead-letter messages in the background.

        Repeat failed moves, except of messages that are stuck (``_gets_stuck``). The messages have reached
        ``max_deliveries``, or their moves were interrupted. If the body of a message is not in memory, the message is
        moved when the broker has delivered it again.
        """
        here: list[BufferedMessage] = []
        for one in buffered:
            if one.state is MessageState.DROPPED:
                continue
            one.enter(MessageState.MOVING)
            if one.message is not None:
                here.append(one)
            else:
                self._group.host(one).fetch_again([one])
        if here:
            self._context.background.spawn(self._persist(here), name=f"dead-letter {self._dead}")

    async def reject(self, buffered: Sequence[BufferedMessage], reasons: Sequence[str]) -> list[bool]:
        """Dead-letter leased messages whose bodies are in memory. Return for each whether its dead letter is stored.

        Raises: StateUnavailable, BrokerUnavailable; RetryLater if popgate failed to process a message that is still
        leased. Moves that have begun are finished in the background, also after an error or a cancellation.
        """
        try:
            return await self._move(buffered, SettleAction.MOVE, reasons)
        except RetryLater:
            raise
        except Exception as error:
            if len(buffered) > 1:
                return [(await self.reject([one], [reason]))[0] for one, reason in zip(buffered, reasons, strict=True)]
            if self._fails(buffered[0], error) and buffered[0].state is MessageState.LEASED:
                raise RetryLater("popgate failed on this message: reject it again", retry_after_seconds=1.0) from error
            return [False]
        finally:  # also if the broker refused a copy, because its client may never repeat the request
            self.start(
                [
                    one
                    for one in buffered
                    if one.state is MessageState.MOVING and self._place(one) not in self._publishing
                ]
            )

    def set_aside(self, buffered: BufferedMessage, error: Exception) -> None:
        """Dead-letter a message that popgate fails to process, in the background.

        If a client has leased the message, the move waits until the lease has ended.
        """
        buffered.enter(MessageState.MOVING)
        reason = f"{UNREADABLE}: {type(error).__name__}: {error}"[:REASON_LENGTH_MAX].replace(SEPARATOR, " ")
        self._context.background.spawn(self._set_aside(buffered, reason), name=f"dead-letter {self._dead}")

    async def _set_aside(self, buffered: BufferedMessage, reason: str) -> None:
        while True:
            pause = RETRY_SECONDS
            try:
                if not buffered.lease_id:
                    pause = max(pause, await self._lease(buffered))
                if buffered.lease_id:
                    await self._move([buffered], SettleAction.MOVE, [reason])
            except RetryLater as error:
                _log.warning("dead-lettering waits", extra={"queue": self._dead, "error": error.detail})
                pause = error.retry_after_seconds
            except Exception as error:
                self._gets_stuck(buffered, error)
                return
            if buffered.state is not MessageState.MOVING or buffered.message is None:
                return
            await asyncio.sleep(pause)

    async def _lease(self, buffered: BufferedMessage) -> float:
        """Lease a message before its move, because the move needs a lease record.

        If a client has leased the message, return the seconds until the next attempt. Raises: StateUnavailable.
        """
        host = self._group.host(buffered)
        request = GrantRequest(
            subscription=self._group.name,
            lease_id=self._context.mint_lease_id(),
            entries=[GrantEntry(host.broker_queue, host.epoch, buffered.copy_id, buffered.earlier_deliveries)],
            invisibility_seconds=LEASE_SECONDS,
            max_deliveries=None,
            mode_generation=self._group.spec.mode_generation,
        )
        ((status, remaining, record),) = await self._context.leases.grant(request)
        if buffered.state is MessageState.DROPPED:
            return 0.0
        if status is GrantStatus.FENCED:
            host.step_down(request.entries[0].epoch)
        elif status is GrantStatus.GRANTED and record is not None:
            buffered.adopt(record)
        elif record is not None and status is not GrantStatus.HELD:  # the message is being moved, or is settled
            host.conform(buffered, record, remaining)
        return remaining

    def _fails(self, buffered: BufferedMessage, error: Exception) -> bool:
        """Count a failure to process a message. Return whether its move should be tried again."""
        queue = self._group.queue(buffered)
        was_unreadable = self._context.faults.is_unreadable(queue, buffered.copy_id)
        self._context.faults.message_failed(queue, buffered.copy_id, error)
        if was_unreadable:
            self._gets_stuck(buffered, error)
        return not was_unreadable

    def _gets_stuck(self, buffered: BufferedMessage, error: Exception) -> None:
        """Leave a message unsettled at the broker, because popgate also fails to create its dead letter."""
        self._group.host(buffered).state.stuck.add(buffered.copy_id)
        place = {"queue": self._group.queue(buffered), "copy_id": buffered.copy_id}
        _log.error("a message can't be dead-lettered, and stays unsettled", exc_info=error, extra=place)

    async def _persist(self, buffered: Sequence[BufferedMessage]) -> None:
        for start in range(0, len(buffered), BATCH_COUNT_MAX):
            batch = buffered[start : start + BATCH_COUNT_MAX]
            while batch:
                pause = RETRY_SECONDS
                try:
                    await self._move(batch, SettleAction.EXHAUST, [self._exhausted(one) for one in batch])
                except RetryLater as error:
                    _log.warning("dead-lettering waits", extra={"queue": self._dead, "error": error.detail})
                    pause = error.retry_after_seconds
                except Exception as error:
                    if len(batch) > 1:
                        for one in batch:
                            await self._persist([one])
                        break
                    if not self._fails(batch[0], error):
                        break
                batch = [one for one in batch if one.state is MessageState.MOVING and one.message is not None]
                if batch:
                    await asyncio.sleep(pause)

    async def _move(
        self, buffered: Sequence[BufferedMessage], action: SettleAction, reasons: Sequence[str]
    ) -> list[bool]:
        entries = [
            SettleEntry(
                self._group.queue(one),
                one.copy_id,
                one.lease_id,
                action,
                target=self._dead,
                target_copy_id=self._context.mint_copy_id(),
                reason=reason,
            )
            for one, reason in zip(buffered, reasons, strict=True)
        ]
        answers = await self._context.leases.settle(entries)
        begun: list[_Begun] = []
        moved: set[BufferedMessage] = set()
        known: list[Found] = []
        try:
            for one, answer in zip(buffered, answers, strict=True):
                record = answer.record
                if record is None:
                    self._group.host(one).make_ready([one])
                elif answer.status is SettleStatus.LOST:
                    if record.state is RecordState.DEAD and record.lease_id == one.lease_id:
                        moved.add(one)
                    if record.state in SETTLED_STATES:
                        known.append(found_so(one.copy_id, one.queue_index, record, one))
                    self._group.host(one).conform(one, record, answer.remaining_seconds)
                elif one.state is not MessageState.DROPPED:
                    self._group.host(one).state.begin_move(one, record)
                    if one.message is not None and self._place(one) not in self._publishing:
                        self._publishing.add(self._place(one))  # at once: the batch may contain the same message twice
                        begun.append(_Begun(one, record, one.message))
            note_found_settled(self._context, self._group.name, known)
            moved.update(await self._publish(begun))
        finally:
            self._publishing.difference_update(self._place(one) for one, _, _ in begun)
        return [one in moved for one in buffered]

    async def _publish(self, begun: Sequence[_Begun]) -> list[BufferedMessage]:
        """Publish the dead letters of begun moves, and settle the moved messages.

        Return the messages whose dead letters are stored.
        """
        if not begun:
            return []
        now = self._context.clock.wall()
        outcomes = await self._stored([self._dead_letter(one, record, message, now) for one, record, message in begun])
        stored: list[BufferedMessage] = []
        reasons: list[str] = []
        letters: list[CopyId] = []
        for (one, record, _), outcome in zip(begun, outcomes, strict=True):
            if outcome.status is PublishStatus.PUBLISHED:
                assert record.target_copy_id is not None, "a moving record names its copy"
                stored.append(one)
                reasons.append(without_attempt(record.reason))
                letters.append(record.target_copy_id)
            else:
                _log.warning("a dead letter was not stored", extra={"queue": self._dead, "why": outcome.detail})
        if any(outcome.status is PublishStatus.UNROUTED for outcome in outcomes):
            await self._declare_again()
        self._context.journal.record(
            EventKind.DEAD_LETTERED, self._group.name, stored, now, details=reasons, new_copy_ids=letters
        )
        answers = await self._context.leases.settle(
            [SettleEntry(self._group.queue(one), one.copy_id, one.lease_id, SettleAction.MOVED) for one in stored]
        )
        for one, answer in zip(stored, answers, strict=True):
            host = self._group.host(one)
            present = host.find(one.copy_id)  # another object if the queue was claimed again
            if present is not None:
                host.settle([present], answer.settled_at)
            elif answer.status is SettleStatus.DONE:
                host.settle_absent(one.copy_id, answer.settled_at)
        return stored

    async def _stored(self, letters: Sequence[Message]) -> list[PublishOutcome]:
        """Publish dead letters. Return one outcome for each dead letter.

        If the broker can't carry a dead letter unchanged, try it again in the form ``packed``, then in the form
        ``stripped``. Raises: BrokerUnavailable if no dead letter was stored.
        """
        publish, dead = self._context.broker.publish, self._dead
        outcomes = await publish([Outgoing(message=letter, queue=dead) for letter in letters])
        for smaller in (packed, stripped):
            unfit = [place for place, outcome in enumerate(outcomes) if outcome.unfit]
            if not unfit:
                break
            try:
                again = await publish([Outgoing(message=smaller(letters[place]), queue=dead) for place in unfit])
            except BrokerUnavailable as error:  # the other dead letters are stored
                _log.info("dead letters are packed later", extra={"queue": dead, "why": error.detail})
                break
            for place, outcome in zip(unfit, again, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def _declare_again(self) -> None:
        """Declare the dead-letter queue again, because it was deleted."""
        try:
            await self._context.broker.declare_group(self._group.layout)
        except Conflict as error:
            _log.warning("dead letters have no queue", extra={"queue": self._dead, "error": error.detail})

    def _dead_letter(self, buffered: BufferedMessage, record: LeaseRecord, message: Message, now: float) -> Message:
        assert record.target_copy_id is not None, "a moving record names its copy"
        reason, attempts = read(record.reason)
        cause = MAX_DELIVERIES if reason == MAX_DELIVERIES or _is_after_tries(record, reason) else REJECTED
        if self._context.faults.is_unreadable(*self._place(buffered)):
            cause, message = UNREADABLE, bare(message)
        elif reason.startswith(f"{UNREADABLE}: "):
            cause = UNREADABLE
        note = DeadLetterDetails(
            cause=cause,
            reason=reason,
            queue=buffered.queue_index,
            delivery_count=record.delivery_count,
            first_delivered_at=record.first_delivered_at,
            dead_lettered_at=now,
            attempts=tuple(attempts),
        )
        return Message(
            copy_id=record.target_copy_id,
            message_id=message.message_id or buffered.copy_id,
            body=message.body,
            headers=dead_letter_headers(message.headers, note, self._group.name, buffered.copy_id),
            ordering_key=message.ordering_key,
            published_at=message.published_at,
        )

    def _exhausted(self, buffered: BufferedMessage) -> str:
        """Return the reason of the move, with the last attempt, which the store records only if its lease has
        expired."""
        client = self._group.expired_clients.client_of(buffered)
        return described(MAX_DELIVERIES, AttemptEnd.EXPIRED, Cause(client=client))


def _is_after_tries(record: LeaseRecord, reason: str) -> bool:
    """Whether a pull client has rejected the message after ``max_deliveries`` tries of its own.

    To keep the order of a queue, such a client does not give a failed message back between its tries.
    """
    return is_pulled(record.lease_id) and reason.startswith(f"{MAX_DELIVERIES}: ")
