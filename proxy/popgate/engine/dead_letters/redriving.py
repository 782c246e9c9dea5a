"""The request for a redrive, and the redrive's progress.

This module holds values only; ``dead_letters`` does the work. A redrive moves only letters that are in the queue when
it starts. Otherwise a message that is dead-lettered again during the redrive would be moved again and again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from popgate.domain.names import CopyId, TopicName
from popgate.engine.dead_letters.dead_moves import BATCH_BYTES_MAX, BATCH_COUNT_MAX, Moved, Route
from popgate.engine.dead_letters.dead_walk import DeadWalk, Letter

RATE_SLICES = 4
"""Batches a second of a redrive with a rate. At a low rate there are fewer, because a batch has at least one letter."""
SKIPPED_MAX = 1_000
"""Number of letters that can't be moved at which a redrive ends."""
SKIPPED_IN_VAIN_MAX = 16
"""Number of letters that can't be moved at which a redrive ends that has moved no letter."""


class RedriveState(StrEnum):
    RUNNING = "running"
    CANCELLING = "cancelling"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterChoice:
    """Selects letters by id, message id or age, or selects all. ``before``: dead-lettered before this Unix time."""

    ids: frozenset[CopyId] | None = None
    message_ids: frozenset[str] | None = None
    before: float | None = None

    @property
    def is_all(self) -> bool:
        return self.ids is None and self.message_ids is None and self.before is None

    def takes(self, letter: Letter) -> bool:
        if self.ids is not None and letter.copy_id not in self.ids:
            return False
        if self.message_ids is not None and letter.message.message_id not in self.message_ids:
            return False
        return self.before is None or letter.dead_lettered_at < self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class RedriveOrder:
    """The parameters of a redrive.

    ``max_messages`` None: all chosen letters. ``target_topic`` None: each letter returns to its own subscription.
    """

    choice: LetterChoice
    max_messages: int | None = None
    target_topic: TopicName | None = None
    rate_per_second: float | None = None


class Redrive:
    """One redrive: its order and its progress. Times are Unix seconds."""

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
        """The reason why the redrive failed, or, while the redrive runs, why it waits."""
        self.skipped: set[CopyId] = set()
        """Letters that can't be moved. The redrive does not try them again."""
        self.ids_left = set(order.choice.ids) if order.choice.ids is not None else None
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()

    @property
    def is_running(self) -> bool:
        return self.ended_at is None

    @property
    def not_found(self) -> int | None:
        """The number of named ids that no letter has; None before it is known, or if no ids were named."""
        if self.ids_left is None or self.state is not RedriveState.DONE or self.order.max_messages is not None:
            return None
        return len(self.ids_left)

    def found(self, dead: int) -> None:
        """Set the total at the start of the redrive, from the number of letters in the queue (``dead``)."""
        if self.total is None:
            order, wanted = self.order, dead
            if order.choice.message_ids is not None:
                return  # it is unknown how many letters have these message ids
            if order.choice.ids is not None:
                wanted = min(wanted, len(order.choice.ids))
            self.total = wanted if order.max_messages is None else min(wanted, order.max_messages)

    def batch_count(self) -> int:
        """Return the maximum number of letters in the next batch; 0 if nothing is left to do."""
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
        """Return the letters to move: the chosen letters, and all letters whose moves another redrive has begun."""
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
        """Whether too many letters can't be moved."""
        return self.failed >= SKIPPED_MAX or (self.failed >= SKIPPED_IN_VAIN_MAX and not self.moved)

    def end(self, state: RedriveState, at: float) -> None:
        self.state, self.ended_at = state, at
        self.ended.set()


def first_batch(letters: Sequence[Letter], count_max: int) -> list[Letter]:
    """Return the first of ``letters``: at most ``count_max`` and ``BATCH_BYTES_MAX`` bytes, but at least one letter."""
    taken: list[Letter] = []
    size = 0
    for letter in letters[:count_max]:
        size += len(letter.message.body)
        if taken and size > BATCH_BYTES_MAX:
            break
        taken.append(letter)
    return taken


class RedriveProgress:
    """Holds a redrive's place in its walk."""

    def __init__(self, redrive: Redrive, route: Route) -> None:
        self.redrive = redrive
        self.route = route
        self.walk: DeadWalk | None = None
        self.pending: list[Letter] = []
        """Chosen letters that are not moved yet."""
        self._bound: int | None = None

    def begin(self, walk: DeadWalk) -> None:
        """Continue with a walk that is at the front. Letters that arrived after the redrive's start are not read."""
        self.walk, self.pending = walk, []
        if self._bound is None:
            self._bound = walk.dead
            self.redrive.found(self._bound)
        order = self.redrive.order
        slowly = order.rate_per_second is not None and order.choice.is_all
        walk.limit(self._bound - self.redrive.moved, slowly=slowly)
