"""Defines the request for a redrive, and tracks the progress of a redrive.

This module does no I/O; ``dead_letters`` moves the dead letters. A redrive moves only dead letters that are in the
queue when the redrive starts. Otherwise a message that is dead-lettered again during the redrive would be moved
repeatedly.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from popgate.domain.letter_filter import LetterFilter
from popgate.domain.names import CopyId, TopicName
from popgate.engine.dead_letters.dead_moves import BATCH_BYTES_MAX, BATCH_COUNT_MAX, Moved, Route
from popgate.engine.dead_letters.dead_walk import DeadWalk, Letter

RATE_SLICES = 4
"""Number of batches per second in a redrive with a rate limit. If the limit is lower than this number, each batch has
one dead letter, and there are fewer batches."""
SKIPPED_MAX = 1_000
"""A redrive fails when it has found this many dead letters that can't be moved."""
SKIPPED_IN_VAIN_MAX = 16
"""A redrive that has moved no dead letter fails when it has found this many that can't be moved."""


class RedriveState(StrEnum):
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterChoice:
    """Selects dead letters that meet all of the given conditions. Without conditions, it selects all of them.

    ``ids``: the copy id is one of these. ``before``: the message was dead-lettered before this Unix time. ``filter``:
    the dead letter meets these conditions.
    """

    ids: frozenset[CopyId] | None = None
    message_ids: frozenset[str] | None = None
    before: float | None = None
    filter: LetterFilter | None = None

    @property
    def is_all(self) -> bool:
        return self.ids is None and self.message_ids is None and self.before is None and self.filter is None

    def takes(self, letter: Letter) -> bool:
        if self.ids is not None and letter.copy_id not in self.ids:
            return False
        if self.message_ids is not None and letter.message.message_id not in self.message_ids:
            return False
        if self.before is not None and letter.dead_lettered_at >= self.before:
            return False
        return self.filter is None or letter.meets(self.filter)


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveOrder:
    """The parameters of a redrive.

    ``max_messages``: the number of dead letters after which the redrive ends; None: no limit. ``target_topic`` None:
    each dead letter returns to its own subscription. ``rate_per_second`` None: as fast as possible.
    """

    choice: LetterChoice
    max_messages: int | None = None
    target_topic: TopicName | None = None
    rate_per_second: float | None = None


class Redrive:
    """One redrive: its parameters (``order``) and its progress. Times are Unix seconds."""

    def __init__(self, redrive_id: str, order: RedriveOrder, started_at: float) -> None:
        self.id = redrive_id
        self.order = order
        self.state = RedriveState.RUNNING
        self.started_at = started_at
        self.ended_at: float | None = None
        self.total: int | None = None
        self.moved = 0
        self.failed = 0
        self.trouble = ""
        """The reason why the redrive failed, why it waits, or why the last dead letter could not be moved."""
        self.skipped: set[CopyId] = set()
        """Dead letters that could not be moved. The redrive does not try them again."""
        self.ids_left = set(order.choice.ids) if order.choice.ids is not None else None
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self.ended_at is None

    @property
    def not_found(self) -> int | None:
        """The number of requested ids that no dead letter has.

        None if the request has no ids or has ``max_messages``, and as long as the redrive is not done.
        """
        if self.ids_left is None or self.state is not RedriveState.DONE or self.order.max_messages is not None:
            return None
        return len(self.ids_left)

    def found(self, dead: int) -> None:
        """Set ``total``, at the start of the redrive, from the number of dead letters in the queue (``dead``)."""
        if self.total is None:
            order, wanted = self.order, dead
            if order.choice.message_ids is not None or order.choice.filter is not None:
                return  # it is unknown how many dead letters these are
            if order.choice.ids is not None:
                wanted = min(wanted, len(order.choice.ids))
            self.total = wanted if order.max_messages is None else min(wanted, order.max_messages)

    def batch_count(self) -> int:
        """Return the maximum number of dead letters in the next batch; 0 if nothing is left to do."""
        count = BATCH_COUNT_MAX
        if self.order.max_messages is not None:
            count = min(count, self.order.max_messages - self.moved - self.failed)
        if self.ids_left is not None:
            count = min(count, len(self.ids_left))
        if self.order.rate_per_second is not None:
            count = min(count, max(1, int(self.order.rate_per_second / RATE_SLICES)))
        return max(0, count)

    def pause_seconds(self, elapsed_seconds: float) -> float:
        """Return the seconds to wait until the rate allows the next batch."""
        rate = self.order.rate_per_second
        return 0.0 if rate is None else max(0.0, (self.moved + self.failed) / rate - elapsed_seconds)

    def chosen(self, letters: Sequence[Letter]) -> list[Letter]:
        """Return the dead letters to move: those that the order selects, and all whose moves were begun earlier."""
        return [
            letter
            for letter in letters
            if letter.copy_id not in self.skipped and (letter.is_half_moved or self.order.choice.takes(letter))
        ]

    def done(self, moved: Moved) -> None:
        """Add the outcome of a batch to the progress."""
        self.moved += len(moved.moved)
        self.failed += len(moved.stay)
        self.skipped.update(letter.copy_id for letter in moved.stay)
        if self.ids_left is not None:
            self.ids_left.difference_update(letter.copy_id for letter in (*moved.moved, *moved.stay))
        if self.failed:
            self.trouble = moved.why or self.trouble
        else:
            self.trouble = ""

    @property
    def is_hopeless(self) -> bool:
        """Whether so many dead letters could not be moved that the redrive must end."""
        return self.failed >= SKIPPED_MAX or (self.failed >= SKIPPED_IN_VAIN_MAX and not self.moved)

    def end(self, state: RedriveState, at: float) -> None:
        self.state, self.ended_at = state, at
        self.ended.set()


def first_batch(letters: Sequence[Letter], count_max: int) -> list[Letter]:
    """Return the dead letters at the beginning of ``letters`` that fit into one batch, but at least one of them.

    A batch has at most ``count_max`` dead letters, whose bodies have at most ``BATCH_BYTES_MAX`` bytes.
    """
    taken: list[Letter] = []
    size = 0
    for letter in letters[:count_max]:
        size += len(letter.message.body)
        if taken and size > BATCH_BYTES_MAX:
            break
        taken.append(letter)
    return taken


class RedriveProgress:
    """Tracks which dead letters a redrive has read, and which of these it still has to move."""

    def __init__(self, redrive: Redrive, route: Route) -> None:
        self.redrive = redrive
        self.route = route
        self.walk: DeadWalk | None = None
        self.pending: list[Letter] = []
        """Dead letters that were read and selected, but not moved yet."""
        self._bound: int | None = None

    def begin(self, walk: DeadWalk) -> None:
        """Continue with a new walk, from the front of the queue. Limit it to messages that were there at the start."""
        self.walk, self.pending = walk, []
        if self._bound is None:
            self._bound = walk.dead
            self.redrive.found(self._bound)
        order = self.redrive.order
        slowly = order.rate_per_second is not None and order.choice.is_all
        walk.limit(self._bound - self.redrive.moved, slowly=slowly)
