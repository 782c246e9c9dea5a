"""Tracks a channel's unsettled deliveries, its settlements to write, and which acks the broker has certainly applied.

This module writes nothing to the channel itself.

Proof. With prefetch W, the broker sends delivery number d only if fewer than W of the earlier deliveries are unsettled.
So delivery d proves that the broker has applied d - W settlements. The broker applies settlements in the order in which
they were written. Settlements are counted in groups, one for each write, because the order within a write is not
preserved. A change of the prefetch begins a new consumer. Deliveries to the new consumer prove only settlements of
deliveries to the same consumer. But if such a settlement is proved, all earlier writes are proved, too.
"""

from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

_SETTLE = Struct(">BHIHHQBB").pack
_BASIC, _ACK, _NACK = 60, 80, 120
_ONE, _MULTIPLE, _REQUEUE = 0, 1, 2
_ALL = 0
"""The delivery tag that means all unsettled deliveries of the channel."""


def return_all_frame(channel_number: int) -> bytes:
    """Return the frame that requeues all unsettled deliveries of a channel."""
    return _SETTLE(1, channel_number, 13, _BASIC, _NACK, _ALL, _MULTIPLE | _REQUEUE, 0xCE)


class _Group(NamedTuple):
    """One write to the channel. ``acks`` is the number of acks that have been recorded up to this write.

    The write is proved when ``threshold`` settlements of the present consumer's deliveries are proved.
    """

    threshold: int
    acks: int


class Settlements:
    def __init__(self, channel_number: int) -> None:
        self._number = channel_number
        self._unsettled: set[int] = set()
        self._last = 0
        self._lowest = 1
        """No lower tag is unsettled."""
        self._acks: list[int] = []
        self._requeues: list[int] = []
        self._window = 0
        self._boundary = 0
        """All deliveries to the present consumer have tags that are higher than this one."""
        self._own_settled = 0
        self._acks_given = 0
        self._acks_proved = 0
        self._groups: deque[_Group] = deque()

    # ------------------------------------------------------------ deliveries

    def begin(self, window: int) -> None:
        """Record that a new consumer begins with the prefetch ``window``. Only its deliveries prove settlements."""
        self._window = window
        self._rebase(self._last)

    def deliver(self, tag: int, *, present: bool) -> None:
        """Record a delivery. `present` is False if the broker sent it to the former consumer."""
        self._unsettled.add(tag)
        self._last = tag
        if not present:
            self._rebase(tag)

    def _rebase(self, boundary: int) -> None:
        self._boundary = boundary
        self._own_settled = 0
        if self._groups:
            acks = self._groups[-1].acks
            self._groups.clear()
            self._groups.append(_Group(1, acks))

    def __len__(self) -> int:
        return len(self._unsettled)

    # ------------------------------------------------------------ settlements

    def ack(self, tags: Sequence[int]) -> None:
        """Record acks for the next write.

        Tags of deliveries that are already settled are skipped. If one were sent, the broker would close the channel.
        """
        self._acks_given += len(tags)
        self._settle(tags, self._acks)

    def requeue(self, tags: Sequence[int]) -> None:
        self._settle(tags, self._requeues)

    def _settle(self, tags: Sequence[int], into: list[int]) -> None:
        unsettled = self._unsettled
        for tag in tags:
            if tag in unsettled:
                unsettled.remove(tag)
                into.append(tag)

    def take_frames(self) -> bytes:
        """Return the frames for all settlements since the previous call. The caller must write the frames at once."""
        acks, requeues = self._acks, self._requeues
        if not acks and not requeues:
            return b""
        self._acks, self._requeues = [], []
        self._close_group(acks, requeues)
        unsettled, lowest, last = self._unsettled, self._lowest, self._last
        while lowest <= last and lowest not in unsettled:
            lowest += 1
        self._lowest = lowest
        number = self._number
        # Requeues are first: a requeued message below the tag of an ack for many must be returned before this ack.
        frames = [_SETTLE(1, number, 13, _BASIC, _NACK, tag, _REQUEUE, 0xCE) for tag in requeues]
        below = [tag for tag in acks if tag < lowest]
        if len(below) > 1:  # nothing below `lowest` is unsettled: one frame settles them all
            frames.append(_SETTLE(1, number, 13, _BASIC, _ACK, max(below), _MULTIPLE, 0xCE))
            acks = [tag for tag in acks if tag >= lowest]
        frames += [_SETTLE(1, number, 13, _BASIC, _ACK, tag, _ONE, 0xCE) for tag in acks]
        return b"".join(frames)

    def _close_group(self, acks: list[int], requeues: list[int]) -> None:
        boundary = self._boundary
        own = sum(1 for tag in acks if tag > boundary) + sum(1 for tag in requeues if tag > boundary)
        self._own_settled += own
        # Settlements of earlier consumers' deliveries are proved by the next settlement of the present consumer's
        # deliveries.
        foreign = own < len(acks) + len(requeues)
        self._groups.append(_Group(self._own_settled + foreign, self._acks_given))

    def proved_acks(self) -> int:
        """Return how many of the acks recorded so far, in their order, the broker has certainly applied."""
        proved = self._last - self._boundary - self._window
        groups = self._groups
        while groups and groups[0].threshold <= proved:
            self._acks_proved = groups.popleft().acks
        return self._acks_proved
