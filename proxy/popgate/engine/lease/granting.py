"""Grants leases with one conditional write for each pop, and applies the store's answers to the messages.

``serving`` chooses the messages to lease (the candidates), and the pop that receives them.
"""

import asyncio
from collections.abc import Iterable, Sequence

from popgate.domain.errors import RetryLater, StateUnavailable
from popgate.domain.lease import GrantAnswer, GrantStatus, LeaseRecord, SettleAction
from popgate.domain.message import Message
from popgate.domain.names import CopyId, LeaseId, QueueId
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.domain.topics import ConsumeMode, GroupSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.in_flight_limit import InFlightLimit
from popgate.engine.lease.journal_subjects import Found, found_so, note_found_settled
from popgate.engine.lease.moves import Mover
from popgate.engine.lease.pop_request import Leased, PopRequest
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.lease.stale_leases import StaleLeases
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.ports.journal import EventKind
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

_Refused = tuple[BufferedMessage, GrantEntry, GrantAnswer]

UNANSWERED_MAX = 16_384
"""Maximum messages remembered from grants whose answer was lost; older leases simply expire."""


class ModeOvertaken(Exception):
    """No lease was granted, because the store has a later mode generation of the group than the request."""


class Granter:
    """Leases messages of one subscription within ``limit``.

    A message that has reached ``max_deliveries`` is not leased. Instead, ``mover`` dead-letters it.
    """

    def __init__(
        self,
        context: EngineContext,
        group: ServedGroup,
        signer: ReceiptSigner,
        mover: Mover,
        limit: InFlightLimit,
        stale_leases: StaleLeases,
    ) -> None:
        self._context = context
        self._group = group
        self._signer = signer
        self._mover = mover
        self._limit = limit
        self._stale_leases = stale_leases
        self._unanswered: dict[LeaseId, Sequence[BufferedMessage]] = {}
        """By lease id: the messages that the store may have leased although its answer did not arrive. The oldest
        request is first."""
        self._unanswered_count = 0

    async def grant(
        self,
        spec: GroupSpec,
        candidates: list[BufferedMessage],
        request: PopRequest,
        lease_id: LeaseId,
        attempt_id: str | None,
    ) -> list[Leased]:
        """Lease ``candidates``, whose state must be GRANTING. Return the leases that the store granted.

        A candidate that is not granted gets the state of its record, or becomes ready again. Raises: ModeOvertaken,
        StateUnavailable; LeaseGroupAcked or Conflict if the pop is for a lease group that is no longer being formed.

        If the call is cancelled, its leases are withdrawn. If the store's answer is lost, the next pop that tries to
        lease the same messages withdraws the leases. Leases with an attempt id and leases of a lease group are not
        withdrawn, because a repeated request returns them.
        """
        context = self._context
        hosts = self._hosts_of(candidates)
        if any(host.claim.is_lost for host in hosts):
            self.give_back(candidates)
            raise StateUnavailable("the store has lost its data: leases wait until the records are written back")
        selection = request.selection
        messages = [buffered.message for buffered in candidates]
        asked = self._request(spec, candidates, request, lease_id, attempt_id)
        limits = self._limit.counting() if selection.is_limited and spec.policy.max_in_flight is not None else None
        is_repeatable = attempt_id is not None or selection.part is not None
        was_there = context.leases.unavailable_reason() is None
        try:
            answers = await (context.leases.grant(asked) if limits is None else self._limit.grant(limits, asked))
        except BaseException as error:
            # Without an attempt id or a shared lease id, no other request can use this lease. While the store is known
            # to be unavailable, many requests fail, and none of them writes a lease.
            if was_there and attempt_id is None and selection.lease_id is None:
                self._remember_unanswered(lease_id, candidates)
            if isinstance(error, asyncio.CancelledError) and not is_repeatable:
                self._withdraw(lease_id, candidates, met=candidates)
            else:
                self.give_back(candidates)
            raise
        if answers and answers[0].status is GrantStatus.WRONG_MODE:
            self.give_back(candidates)
            raise ModeOvertaken
        if asked.expired_attempts is not None:
            self._group.expired_clients.forget(
                one for one, answer in zip(candidates, answers, strict=True) if answer.status is GrantStatus.GRANTED
            )
        leased = self._apply(candidates, messages, asked, answers, request)
        for host in hosts:
            host.were_granted()
        if leased and selection.mode is not None:  # an admin's leases have no mode, and are settled at once
            self._stale_leases.were_granted([buffered for buffered in candidates if buffered.lease_id == lease_id])
        return leased

    def _request(
        self,
        spec: GroupSpec,
        candidates: Sequence[BufferedMessage],
        request: PopRequest,
        lease_id: LeaseId,
        attempt_id: str | None,
    ) -> GrantRequest:
        policy, selection, hosts = spec.policy, request.selection, self._group.hosts
        expired = self._group.expired_clients
        invisibility = request.invisibility_seconds or policy.invisibility_seconds
        if selection.lease_id is None:
            invisibility = min(invisibility, policy.max_lease_seconds)
        return GrantRequest(
            subscription=self._group.name,
            lease_id=lease_id,
            entries=[
                GrantEntry(host.broker_queue, host.epoch, buffered.copy_id, buffered.earlier_deliveries, line)
                for buffered, line in zip(candidates, _lines_of(candidates), strict=True)
                for host in (hosts[buffered.queue_index],)
            ],
            invisibility_seconds=invisibility,
            max_deliveries=policy.max_deliveries,
            mode_generation=spec.mode_generation,
            attempt_id=attempt_id,
            group=selection.part,
            expired_attempts=expired.attempts(candidates) if expired else None,
        )

    def _remember_unanswered(self, lease_id: LeaseId, candidates: Sequence[BufferedMessage]) -> None:
        self._unanswered[lease_id] = candidates
        self._unanswered_count += len(candidates)
        while self._unanswered_count > UNANSWERED_MAX:
            self._unanswered_count -= len(self._unanswered.pop(next(iter(self._unanswered))))

    def _withdraw(
        self, lease_id: LeaseId, candidates: Sequence[BufferedMessage], met: Sequence[BufferedMessage]
    ) -> None:
        self._context.background.spawn(self._end_unanswered(lease_id, candidates, met), name="withdraw leases")

    async def _end_unanswered(
        self, lease_id: LeaseId, candidates: Sequence[BufferedMessage], met: Sequence[BufferedMessage]
    ) -> None:
        """Withdraw a lease that no client has received, if the store granted it.

        Then make the messages in ``met`` ready. All messages of the lease request are withdrawn in one write. A later
        owner of the queue puts messages with a delivery count in front of the others (``ordering_keys``). So a message
        must not lose its delivery count while messages behind it still have one.
        """
        try:
            await self._context.leases.settle(
                [
                    SettleEntry(self._group.queue(buffered), buffered.copy_id, lease_id, SettleAction.WITHDRAW)
                    for buffered in candidates
                ]
            )
        except RetryLater:
            pass  # the next pop that finds these leases withdraws them
        finally:
            self.give_back(met)

    def _apply(
        self,
        candidates: Sequence[BufferedMessage],
        messages: Sequence[Message | None],
        asked: GrantRequest,
        answers: Sequence[GrantAnswer],
        request: PopRequest,
    ) -> list[Leased]:
        """Apply the store's answers to the messages. Return the granted leases."""
        now, wall = self._context.clock.monotonic(), self._context.clock.wall()
        granted: list[BufferedMessage] = []
        continued: list[BufferedMessage] = []
        leased: list[Leased] = []
        hosts = self._group.hosts
        refused: list[_Refused] = []
        ended: dict[QueueHost, list[CopyId]] = {}
        latest, deadline, until = 0.0, now, wall  # equally long leases share the objects of their ends
        given_for_seconds = 0.0 if request.selection.mode is ConsumeMode.PULL else asked.invisibility_seconds
        for buffered, message, entry, answer in zip(candidates, messages, asked.entries, answers, strict=True):
            status, remaining, record = answer
            if status is not GrantStatus.GRANTED or record is None:
                refused.append((buffered, entry, answer))
                continue
            host = hosts[buffered.queue_index]
            is_here = buffered.state is not MessageState.DROPPED
            if not is_here and buffered.is_transient:  # its channel ended: its next delivery gets a new copy id
                ended.setdefault(host, []).append(buffered.copy_id)
                continue
            assert message is not None, "only messages that are here are candidates"
            (continued if buffered.lease_id == record.lease_id else granted).append(buffered)
            if remaining != latest:
                latest, deadline, until = remaining, now + remaining, wall + remaining
            host.state.granted(buffered, record, deadline)
            buffered.client, buffered.invisibility_seconds = request.client, given_for_seconds
            if is_here and request.selection.part is not None:
                host.state.memory.keep(buffered)
            is_told = request.selection.part is None
            leased.append(self.leased(host.queue, buffered.copy_id, buffered, message, until, is_told=is_told))
        for host, copy_ids in ended.items():
            host.forget_records(copy_ids)
        if refused:
            self._conform(refused)
        if continued:
            self._context.journal.record(EventKind.EXTENDED, self._group.name, continued, wall)
        if granted:
            self._handed_out(granted, wall)
        return leased

    def _conform(self, refused: Sequence[_Refused]) -> None:
        """Apply the store's answers for the messages that were not leased."""
        not_now: list[BufferedMessage] = []
        exhausted: list[BufferedMessage] = []
        fenced: dict[QueueHost, int] = {}
        known: list[Found] = []
        unanswered: dict[LeaseId, list[BufferedMessage]] = {}
        for buffered, entry, (status, remaining, record) in refused:
            host = self._group.host(buffered)
            is_here = buffered.state is not MessageState.DROPPED
            if status is GrantStatus.FULL or status is GrantStatus.BEHIND:
                not_now.append(buffered)
            elif record is None:
                fenced[host] = entry.epoch
            elif status is GrantStatus.EXHAUSTED and is_here:
                buffered.adopt(record)
                exhausted.append(buffered)
            elif status is GrantStatus.HELD and is_here and record.lease_id in self._unanswered:
                unanswered.setdefault(record.lease_id, []).append(buffered)
            else:
                if status is GrantStatus.SETTLED:
                    known.append(found_so(buffered.copy_id, buffered.queue_index, record, buffered))
                host.conform(buffered, record, remaining)
        self.give_back(not_now)
        for host, epoch in fenced.items():
            host.step_down(epoch)
        if exhausted:
            self._mover.start(exhausted)
        for lease_id, helds in unanswered.items():
            self._withdraw(lease_id, self._unanswered[lease_id], helds)
        note_found_settled(self._context, self._group.name, known)

    def _handed_out(self, granted: Sequence[BufferedMessage], wall: float) -> None:
        self._context.journal.record(EventKind.DELIVERED, self._group.name, granted, wall)
        for host in self._hosts_of(granted):
            host.prefetch.spare_bodies(buffered for buffered in granted if buffered.queue_index == host.queue.number)

    def _hosts_of(self, many: Iterable[BufferedMessage]) -> list[QueueHost]:
        return [self._group.hosts[index] for index in {buffered.queue_index for buffered in many}]

    def give_back(self, candidates: Iterable[BufferedMessage]) -> None:
        """Return candidates in state GRANTING to state READY."""
        for buffered in candidates:
            if buffered.state is MessageState.GRANTING:
                self._group.host(buffered).make_ready([buffered])

    def leased(
        self,
        queue: QueueId,
        copy_id: CopyId,
        terms: BufferedMessage | LeaseRecord,
        message: Message,
        invisible_until: float,
        *,
        is_told: bool = True,
    ) -> Leased:
        """Return a lease in the form in which a pop returns it.

        If ``is_told`` is False, the receipt handle is empty.
        """
        return Leased(
            message,
            message.message_id or copy_id,
            self._signer.sign(Receipt(queue, terms.lease_id, terms.epoch, copy_id)) if is_told else "",
            queue.number,
            terms.delivery_count,
            terms.first_delivered_at,
            invisible_until,
        )


def _lines_of(candidates: Sequence[BufferedMessage]) -> list[int]:
    """Return for each candidate a number that identifies its ordering key in this request.

    The number is 0 for a candidate without an ordering key. If each candidate is the head of its ordering key, all
    numbers are 0.
    """
    if all(buffered.is_head for buffered in candidates):
        return [0] * len(candidates)
    numbers: dict[tuple[int, str], int] = {}
    return [
        0 if buffered.key is None else numbers.setdefault((buffered.queue_index, buffered.key), len(numbers) + 1)
        for buffered in candidates
    ]
