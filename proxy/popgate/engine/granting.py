"""Gives leases: one conditional write a pop, and what the store's answers do to the messages.

Owns nothing but the way there and back. Which messages are tried, and for whom, is ``serving``'s choice.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from popgate.domain.errors import RetryLater, StateUnavailable
from popgate.domain.lease import GrantAnswer, GrantStatus, LeaseRecord, SettleAction
from popgate.domain.message import Message
from popgate.domain.names import TRANSIENT_PREFIX, CopyId, LeaseId, QueueId, Subscription
from popgate.domain.receipt import Receipt, ReceiptSigner
from popgate.domain.topics import GroupSpec
from popgate.engine.held import Held, HeldState
from popgate.engine.limiting import InFlightLimit
from popgate.engine.moves import Mover
from popgate.engine.popping import Leased, PopRequest
from popgate.engine.queue_host import QueueHost
from popgate.engine.room import Room
from popgate.engine.subjects import Found, found_so, note_found_settled
from popgate.ports.journal import EventKind
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

UNTOLD_MAX = 16_384
"""So many messages are remembered that may have been leased without an answer; leases of those before them run out."""


class ModeOvertaken(Exception):
    """The group has a later mode generation than was asked with: nothing was given."""


class Granter:
    """Leases messages of one subscription, within ``limit``; those that are exhausted go to ``mover``."""

    def __init__(
        self,
        room: Room,
        subscription: Subscription,
        signer: ReceiptSigner,
        mover: Mover,
        limit: InFlightLimit,
        granted: Callable[[Sequence[Held]], None],
    ) -> None:
        """``granted`` is shown what was leased together."""
        self._room = room
        self._subscription = subscription
        self._signer = signer
        self._mover = mover
        self._limit = limit
        self._granted = granted
        self._untold: dict[LeaseId, Sequence[Held]] = {}
        """What the store may have leased, but nobody was told of, in the order it was asked for."""
        self._untold_count = 0

    async def grant(
        self, spec: GroupSpec, candidates: list[Held], request: PopRequest, lease_id: LeaseId, attempt_id: str | None
    ) -> list[Leased]:
        """What the store gave of ``candidates``, which are GRANTING; the others are what it says, or ready again.

        Raises: ModeOvertaken, StateUnavailable; LeaseGroupAcked, Conflict where the pop's lease group is no longer
        being formed. A cancellation takes the leases back, and so does the next pop that meets leases of which the
        answer was lost; unless an attempt or a lease group holds them for its repeat.
        """
        room = self._room
        if any(held.host.claiming.lost_epoch for held in candidates):
            give_back(candidates)
            raise StateUnavailable("the store has lost its data: records are written back before anything is leased")
        policy = spec.policy
        invisibility = request.invisibility_seconds or policy.invisibility_seconds
        if request.lease_id is None:
            invisibility = min(invisibility, policy.max_lease_seconds)
        lines = _lines_of(candidates)
        entries = [
            GrantEntry(held.host.broker_queue, held.host.epoch, held.copy_id, held.earlier_deliveries, line)
            for held, line in zip(candidates, lines, strict=True)
        ]
        messages = [held.message for held in candidates]
        asked = GrantRequest(
            subscription=self._subscription,
            lease_id=lease_id,
            entries=entries,
            invisibility_seconds=invisibility,
            max_deliveries=policy.max_deliveries,
            mode_generation=spec.mode_generation,
            attempt_id=attempt_id,
            group=None if request.group is None else request.group.part,
        )
        limits = None if policy.max_in_flight is None or request.by_admin else self._limit.counting()
        is_repeatable = attempt_id is not None or request.group is not None
        was_there = room.leases.unavailable_reason() is None
        try:
            answers = await (room.leases.grant(asked) if limits is None else self._limit.grant(limits, asked))
        except BaseException as error:
            # Only such a lease is this pop's alone. A store that is known to be away is asked much, and writes nothing.
            if was_there and attempt_id is None and request.lease_id is None:
                self._remember_untold(lease_id, candidates)
            if isinstance(error, asyncio.CancelledError) and not is_repeatable:
                self._withdraw(lease_id, candidates, met=candidates)
            else:
                give_back(candidates)
            raise
        if answers and answers[0].status is GrantStatus.WRONG_MODE:
            give_back(candidates)
            raise ModeOvertaken
        given_for = 0.0 if request.pull is not None else invisibility
        leased = self._apply(candidates, messages, entries, answers, request, given_for)
        if leased and not request.by_admin:  # an admin's are of no mode, and settled at once
            self._granted([held for held in candidates if held.lease_id == lease_id])
        return leased

    def _remember_untold(self, lease_id: LeaseId, candidates: Sequence[Held]) -> None:
        self._untold[lease_id] = candidates
        self._untold_count += len(candidates)
        while self._untold_count > UNTOLD_MAX:
            self._untold_count -= len(self._untold.pop(next(iter(self._untold))))

    def _withdraw(self, lease_id: LeaseId, candidates: Sequence[Held], met: Sequence[Held]) -> None:
        self._room.background.spawn(self._end_untold(lease_id, candidates, met), name="withdraw leases")

    async def _end_untold(self, lease_id: LeaseId, candidates: Sequence[Held], met: Sequence[Held]) -> None:
        """End a lease that nobody was told of, should it have been written; those that were ``met`` are ready then.

        All that was asked for at once is withdrawn at once: a later owner takes who was handed out, by its record, for
        whoever stood in front (``lines``), and so none of a key may be uncounted without those behind it.
        """
        try:
            await self._room.leases.settle(
                [
                    SettleEntry(held.host.broker_queue, held.copy_id, lease_id, SettleAction.WITHDRAW)
                    for held in candidates
                ]
            )
        except RetryLater:
            pass  # then the next pop that meets them does
        finally:
            give_back(met)

    def _apply(
        self,
        candidates: Sequence[Held],
        messages: Sequence[Message | None],
        entries: Sequence[GrantEntry],
        answers: Sequence[GrantAnswer],
        request: PopRequest,
        given_for_seconds: float,
    ) -> list[Leased]:
        """What ``request`` was given."""
        now, wall = self._room.clock.monotonic(), self._room.clock.wall()
        granted: list[Held] = []
        continued: list[Held] = []
        leased: list[Leased] = []
        exhausted: list[Held] = []
        ended: dict[QueueHost, list[CopyId]] = {}
        fenced: dict[QueueHost, int] = {}
        not_now: list[Held] = []
        known: list[Found] = []
        untold: dict[LeaseId, list[Held]] = {}
        for held, message, entry, (status, remaining, record) in zip(
            candidates, messages, entries, answers, strict=True
        ):
            host = held.host
            if status is GrantStatus.FULL or status is GrantStatus.BEHIND:
                not_now.append(held)
                continue
            if record is None:
                fenced[host] = entry.epoch
                continue
            is_here = held.state is not HeldState.DROPPED
            if status is GrantStatus.GRANTED:
                if not is_here and held.copy_id.startswith(TRANSIENT_PREFIX):
                    ended.setdefault(host, []).append(held.copy_id)  # with its channel: it comes again as another one
                    continue
                assert message is not None, "only messages that are here are candidates"
                (continued if held.lease_id == record.lease_id else granted).append(held)
                held.lease_id, held.epoch = record.lease_id, record.epoch
                held.delivery_count, held.first_delivered_at = record.delivery_count, record.first_delivered_at
                held.leased_at = record.leased_at
                held.client, held.invisibility_seconds = request.client, given_for_seconds
                if is_here:
                    held.state = HeldState.LEASED
                    host.hold_until(held, now + remaining)
                    if request.group is not None:
                        host.keep(held)
                is_told = request.group is None
                leased.append(self.leased(host.queue, held.copy_id, held, message, wall + remaining, is_told=is_told))
            elif status is GrantStatus.EXHAUSTED and is_here:
                held.lease_id, held.delivery_count = record.lease_id, record.delivery_count
                held.first_delivered_at = record.first_delivered_at
                exhausted.append(held)
            elif status is GrantStatus.HELD and is_here and record.lease_id in self._untold:
                untold.setdefault(record.lease_id, []).append(held)
            else:
                if status is GrantStatus.SETTLED:
                    known.append(found_so(held.copy_id, held.queue_index, record, held))
                host.conform(held, record, remaining)
        give_back(not_now)
        for host, epoch in fenced.items():
            host.step_down(epoch)
        for host, copy_ids in ended.items():
            host.upkeep.forget(copy_ids)
        if exhausted:
            self._mover.start(exhausted)
        for lease_id, helds in untold.items():
            self._withdraw(lease_id, self._untold[lease_id], helds)
        note_found_settled(self._room, self._subscription, known)
        if continued:
            self._room.journal.record(EventKind.EXTENDED, self._subscription, continued, wall)
        if granted:
            self._handed_out(granted, wall)
        return leased

    def _handed_out(self, granted: Sequence[Held], wall: float) -> None:
        self._room.journal.record(EventKind.DELIVERED, self._subscription, granted, wall)
        for host in {held.host for held in granted}:
            if host.supply.is_half_full:
                host.returns.spare_bodies(held for held in granted if held.host is host)

    def leased(
        self,
        queue: QueueId,
        copy_id: CopyId,
        terms: Held | LeaseRecord,
        message: Message,
        invisible_until: float,
        *,
        is_told: bool = True,
    ) -> Leased:
        """A lease as its pop is told of it; the receipt handle is empty unless somebody ``is_told``."""
        return Leased(
            message,
            message.message_id or copy_id,
            self._signer.sign(Receipt(queue, terms.lease_id, terms.epoch, copy_id)) if is_told else "",
            queue.number,
            terms.delivery_count,
            terms.first_delivered_at,
            invisible_until,
        )


def _lines_of(candidates: Sequence[Held]) -> list[int]:
    """Numbers of the lines that they stand in; 0 for those that stand behind nobody, nor in front of anybody here."""
    if all(held.is_first for held in candidates):
        return [0] * len(candidates)
    numbers: dict[tuple[QueueHost, str], int] = {}
    return [
        0 if held.key is None else numbers.setdefault((held.host, held.key), len(numbers) + 1) for held in candidates
    ]


def give_back(candidates: Iterable[Held]) -> None:
    """What was to be granted is ready again."""
    for held in candidates:
        if held.state is HeldState.GRANTING:
            held.host.make_ready([held])
