"""Redrives or drops dead letters in batches. No dead letter is lost or duplicated, even if a process dies.

A redrive moves a dead letter with the same steps as dead-lettering moves a message:

1. Lease the dead letter in the store. The store refuses this if another proxy has claimed the queue. The lease lasts
   zero seconds, because only its record is needed.
2. Write the move to the record: the target queue, and the copy id of the new copy.
3. Publish the copy, and wait for the broker's confirm.
4. Settle the dead letter in the store, then ack it at the broker.

If a move is interrupted after step 2, it is finished with the target and the copy id in the record.
"""

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from popgate.domain.dead_letter import dead_letter_details, publisher_headers
from popgate.domain.errors import BrokerUnavailable, RetryLater, StateUnavailable
from popgate.domain.lease import GrantStatus, LeaseRecord, SettleAction, SettleStatus
from popgate.domain.message import Message
from popgate.domain.names import (
    BrokerQueue,
    CopyId,
    Layout,
    TopicName,
    bound_queue,
    queue_index,
    topic_of_queue,
)
from popgate.domain.topics import TopicSpec
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.dead_letters.dead_walk import DeadWalk, Letter
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.publish.publishing import PublisherGate
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus
from popgate.ports.journal import EventKind
from popgate.ports.leases import GrantEntry, GrantRequest, SettleEntry

_log = logging.getLogger(__name__)

BATCH_COUNT_MAX = 256
BATCH_BYTES_MAX = 16 * 1024 * 1024
REASON = "redrive"
Route = Callable[[Letter, CopyId], BrokerQueue]
"""Returns the target queue of a dead letter. The second argument is the copy id of its new copy."""


class Overtaken(BrokerUnavailable):
    """Another proxy has claimed the dead-letter queue. This proxy must claim the queue again."""


def refused(status: GrantStatus, layout: Layout) -> RetryLater:
    """Return the error for a dead letter that the store did not lease."""
    if status is GrantStatus.WRONG_MODE:
        return StateUnavailable(f"the consume mode of {layout.subscription} is being switched")
    return Overtaken(f"another proxy has claimed queue {layout.dead}")


class Moved(NamedTuple):
    """The outcome of redriving a batch of dead letters.

    ``moved``: the dead letters that were moved. ``stay``: those that can't be moved now and stay in the queue.
    ``unknown``: whether the broker neither confirmed nor refused some copies. These are in neither list, and the next
    walk finishes their moves. ``why``: the reason for the last dead letter that was not moved.
    """

    moved: Sequence[Letter] = ()
    stay: Sequence[Letter] = ()
    unknown: bool = False
    why: str = ""


class _LetterSubject(NamedTuple):
    """A dead letter as the subject of a journal event."""

    copy_id: CopyId
    message: Message
    queue_index: int
    delivery_count: int
    leased_at: float = 0.0
    client: str | None = None
    invisibility_seconds: float = 0.0


class _Move(NamedTuple):
    """The move of one dead letter, already written to its record. ``is_new``: its copy was never published before."""

    letter: Letter
    record: LeaseRecord
    is_new: bool


class Purged(NamedTuple):
    """The result of a purge.

    ``purged``: the number of deleted dead letters. ``dead``: the number of those left. ``complete`` is False if the
    purge stopped because it took too long. The client must then repeat it.
    """

    purged: int
    dead: int
    complete: bool


class DeadMoves:
    """Redrives and drops the dead letters of one subscription."""

    def __init__(self, context: EngineContext, group: ServedGroup, gate: PublisherGate) -> None:
        self._context = context
        self._group = group
        self._layout = group.layout
        self._gate = gate

    # -- where letters go -----------------------------------------------------------------------------------------

    def home(self, letter: Letter, copy_id: CopyId) -> BrokerQueue:
        """Return the queue of this subscription to which the dead letter returns.

        It is the queue of the ordering key, or without an ordering key the queue from which the message came. If that
        queue is unknown or no longer exists, ``copy_id`` determines the queue. On an adopted topic, the ordering key is
        ignored.
        """
        queues, key = self._layout.queues, letter.message.ordering_key
        if key is not None and not self._layout.adopted:
            return queues[queue_index(key, len(queues))]
        number = dead_letter_details(letter.message.headers).queue
        return queues[number if number is not None and number < len(queues) else queue_index(copy_id, len(queues))]

    @staticmethod
    def to_topic(spec: TopicSpec) -> Route:
        """Return the route to another topic. As with any publish, one queue of each group receives the copy.

        The route returns the same queue each time that it is called with the same dead letter and copy id.
        """

        def route(letter: Letter, copy_id: CopyId) -> BrokerQueue:
            index = queue_index(letter.message.ordering_key or copy_id, spec.queue_count)
            return spec.adopted[index] if spec.adopted else bound_queue(spec.topic, index)

        return route

    # -- redrive --------------------------------------------------------------------------------------------------

    async def redrive(self, walk: DeadWalk, letters: Sequence[Letter], route: Route, epoch: int) -> Moved:
        """Publish each dead letter to the queue that ``route`` returns, then remove it from the dead-letter queue.

        If the move of a dead letter was begun earlier, its target is the one in the record. Raises: Overtaken,
        StateUnavailable, BrokerUnavailable. After such an error, the next walk finishes the moves that were begun.
        """
        mine, begun = await self._lease(walk, letters, epoch)
        moves = [_Move(letter, record, False) for letter, record in begun]
        moves += await self._begin(mine, route)
        return await self._finish(walk, moves)

    async def finish(self, walk: DeadWalk, letters: Sequence[Letter]) -> Moved:
        """Finish moves that were begun earlier. Do not change other dead letters. Raises the errors of ``redrive``."""
        moves = [_Move(one, one.record, False) for one in letters if one.is_half_moved and one.record is not None]
        return await self._finish(walk, moves)

    async def drop(self, walk: DeadWalk, letters: Sequence[Letter], epoch: int) -> int:
        """Delete the dead letters, and return the number of deleted ones.

        If the move of a dead letter was begun earlier, the move is finished, and the dead letter does not count.

        Raises the errors of ``redrive``.
        """
        mine, begun = await self._lease(walk, letters, epoch)
        answers = await self._settle([(letter, record, SettleAction.ACK) for letter, record in mine])
        dropped = [letter for (letter, _), status in zip(mine, answers, strict=True) if status is not SettleStatus.LOST]
        walk.ack(dropped)
        self._note(EventKind.PURGED, dropped)
        await self._finish(walk, [_Move(letter, record, False) for letter, record in begun])
        return len(dropped)

    # -- how ------------------------------------------------------------------------------------------------------

    async def _lease(
        self, walk: DeadWalk, letters: Sequence[Letter], epoch: int
    ) -> tuple[list[tuple[Letter, LeaseRecord]], list[tuple[Letter, LeaseRecord]]]:
        """Lease the dead letters in the store. Ack those that the store has already settled.

        Return the dead letters that are leased now, and those whose moves were begun earlier, with their records.
        """
        if not letters:
            return [], []
        request = GrantRequest(
            subscription=self._group.name,
            lease_id=self._context.mint_lease_id(),
            entries=[GrantEntry(self._layout.dead, epoch, letter.copy_id, 0) for letter in letters],
            invisibility_seconds=0.0,
            max_deliveries=None,
            mode_generation=self._group.spec.mode_generation,
        )
        mine: list[tuple[Letter, LeaseRecord]] = []
        begun: list[tuple[Letter, LeaseRecord]] = []
        over: list[Letter] = []
        for letter, (status, _, record) in zip(letters, await self._context.leases.grant(request), strict=True):
            if record is None:
                raise refused(status, self._layout)
            if status is GrantStatus.GRANTED:
                mine.append((letter, record))
            elif status is GrantStatus.MOVING:
                begun.append((letter, record))
            elif status is GrantStatus.SETTLED:
                over.append(letter)
        walk.ack(over)
        return mine, begun

    async def _begin(self, mine: Sequence[tuple[Letter, LeaseRecord]], route: Route) -> list[_Move]:
        entries: list[SettleEntry] = []
        for letter, record in mine:
            copy_id = self._context.mint_copy_id()
            entries.append(
                SettleEntry(
                    self._layout.dead,
                    letter.copy_id,
                    record.lease_id,
                    SettleAction.MOVE,
                    target=route(letter, copy_id),
                    target_copy_id=copy_id,
                    reason=REASON,
                )
            )
        answers = await self._context.leases.settle(entries) if entries else []
        return [
            _Move(letter, answer.record, answer.status is SettleStatus.DONE)
            for (letter, _), answer in zip(mine, answers, strict=True)
            if answer.record is not None and answer.status is not SettleStatus.LOST
        ]

    async def _finish(self, walk: DeadWalk, moves: Sequence[_Move]) -> Moved:
        if not moves:
            return Moved()
        outcomes = await self._publish(moves)
        stored, undone, stuck = list[_Move](), list[_Move](), list[_Move]()
        why, unknown = "", False
        for move, outcome in zip(moves, outcomes, strict=True):
            if outcome.status is PublishStatus.PUBLISHED:
                stored.append(move)
                continue
            why = outcome.detail
            if outcome.status is PublishStatus.FAILED:
                unknown = True
            elif move.is_new or outcome.unfit or outcome.status is PublishStatus.UNROUTED:
                undone.append(move)  # no queue has the copy: if an earlier attempt stored it, its queue was deleted
            else:
                stuck.append(move)  # an earlier attempt may have stored the copy: a retry must use the same copy id
        moved = [move.letter for move in stored]
        self._note(EventKind.REDRIVEN, moved, [move.record for move in stored])
        await self._settle(
            [(move.letter, move.record, SettleAction.MOVED) for move in stored]
            + [(move.letter, move.record, SettleAction.UNDO) for move in undone]
        )
        walk.ack(moved)
        return Moved(moved, [move.letter for move in (*undone, *stuck)], unknown, why)

    async def _publish(self, moves: Sequence[_Move]) -> list[PublishOutcome]:
        """Publish the copies. Return one outcome for each move, in the same order.

        While the copies for a topic are published, the gate prevents changes of that topic's queues.
        """
        outcomes = [PublishOutcome(status=PublishStatus.FAILED)] * len(moves)
        by_topic: dict[TopicName, list[tuple[int, Outgoing]]] = {}
        for place, move in enumerate(moves):
            topic, outgoing = self._outgoing(move)
            missing = self._missing(outgoing)
            if missing is None:
                by_topic.setdefault(topic, []).append((place, outgoing))
            else:
                # Not UNROUTED: the copy of an earlier attempt may be in the queue of another group.
                outcomes[place] = PublishOutcome(
                    status=PublishStatus.REFUSED, detail=f"queue {missing} does not exist on the broker"
                )
        for topic, part in by_topic.items():
            async with self._gate.entered(topic):
                answers = await self._context.broker.publish([outgoing for _, outgoing in part])
            for (place, _), answer in zip(part, answers, strict=True):
                outcomes[place] = answer
        return outcomes

    def _outgoing(self, move: _Move) -> tuple[TopicName, Outgoing]:
        record, message = move.record, move.letter.message
        assert record.target is not None, "a moving record names its target"
        assert record.target_copy_id is not None, "a moving record names its copy"
        copy = message._replace(copy_id=record.target_copy_id, headers=publisher_headers(message.headers))
        of_topic = topic_of_queue(record.target)
        if of_topic is None:
            return self._group.name.topic, Outgoing(message=copy, queue=record.target)
        topic, index = of_topic
        return topic, Outgoing(message=copy, topic=topic, index=index, once=True)

    def _missing(self, outgoing: Outgoing) -> BrokerQueue | None:
        """Return the deleted queue, if any, that would prevent the copy from reaching every group of its topic."""
        if not self._context.missing_queues:
            return None
        if outgoing.queue is not None:
            return outgoing.queue if outgoing.queue in self._context.missing_queues else None
        begin, end = f"popgate:{outgoing.topic}:", f":{outgoing.index}"
        return next((one for one in self._context.missing_queues if one.startswith(begin) and one.endswith(end)), None)

    async def _settle(self, wanted: Sequence[tuple[Letter, LeaseRecord, SettleAction]]) -> list[SettleStatus]:
        if not wanted:
            return []
        answers = await self._context.leases.settle(
            [
                SettleEntry(self._layout.dead, letter.copy_id, record.lease_id, action)
                for letter, record, action in wanted
            ]
        )
        return [answer.status for answer in answers]

    def _note(self, kind: EventKind, letters: Sequence[Letter], moved_by: Sequence[LeaseRecord] = ()) -> None:
        """Journal an event for each dead letter. ``moved_by``: the records of the moves, if they were moved."""
        subjects: list[_LetterSubject] = []
        for letter in letters:
            note = dead_letter_details(letter.message.headers)
            subjects.append(_LetterSubject(letter.copy_id, letter.message, note.queue or 0, note.delivery_count or 0))
        self._context.journal.record(
            kind,
            self._group.name,
            subjects,
            self._context.clock.wall(),
            details=[_topic_of_target(record) for record in moved_by],
            new_copy_ids=[CopyId(record.target_copy_id or "") for record in moved_by],
        )


def _topic_of_target(record: LeaseRecord) -> str:
    """Return the target topic of a move, or an empty string if the dead letter returns to its own subscription."""
    target = None if record.target is None else topic_of_queue(record.target)
    return "" if target is None else target[0]
