"""Selects the messages that a pop may get. There is one class of selections for each kind of request.

A selection defines the consume mode in which it is served and the limits that apply to it. It takes messages from the
ready messages (``ready_messages``). A pop without a filter and a purge take the oldest messages. A pop with a filter
takes the oldest messages that pass the filter. A pop for a lease group also takes the messages directly behind members
of the group. A pull takes the next messages of one queue.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from popgate.domain.filters import HeaderFilter
from popgate.domain.message import Message
from popgate.domain.names import LeaseId
from popgate.domain.topics import ConsumeMode
from popgate.engine.lease.pull_lease import PullLease
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.host import QueueHost
from popgate.ports.leases import GroupPart

KEYS_MAX = 1_000
"""Maximum number of ordering keys without further messages that a lease group remembers."""
ANSWER_BYTES_MAX = 32 * 1024 * 1024
COMPARED_AT_ONCE_MAX = 1_000
"""Maximum number of ready messages that are compared with the filters of new pops in one turn of the event loop."""


class Basket:
    """Collects the messages for one pop: at most ``count_max``, and at most as many as fit into the answer.

    ``answer_bytes`` returns an upper bound for the size of the given message in the answer. The first message is added
    whatever its size.
    """

    __slots__ = ("_answer_bytes", "_left", "_size", "taken")

    def __init__(self, count_max: int, answer_bytes: Callable[[Message], int]) -> None:
        self.taken: list[BufferedMessage] = []
        self._left = count_max
        self._size = 0
        self._answer_bytes = answer_bytes

    def add(self, buffered: BufferedMessage) -> bool:
        """Add ``buffered``, and set its state to GRANTING. Return False if there is no room for it."""
        if self._left <= 0:
            return False
        assert buffered.message is not None, "what is offered is here"
        if self.taken and not self._has_room(buffered.message):
            self._left = 0
            return False
        self._left -= 1
        buffered.enter(MessageState.GRANTING)
        self.taken.append(buffered)
        return True

    def _has_room(self, another: Message) -> bool:
        """Add the size of ``another`` message. Return whether the answer has room for it.

        The first message is measured only if there is a second one, because measuring reads a large body several times.
        """
        first = self.taken[0].message
        if not self._size and first is not None:
            self._size = self._answer_bytes(first)
        self._size += self._answer_bytes(another)
        return self._size <= ANSWER_BYTES_MAX


class Ready(Protocol):
    """The ready messages of a subscription, from which a selection takes messages."""

    def are_many(self) -> bool:
        """Whether there are more than ``COMPARED_AT_ONCE_MAX`` messages, or messages that were ready before."""
        ...

    def has_any(self) -> bool:
        """Whether a pop without a filter would get a message."""
        ...

    def can_be_taken(self, buffered: BufferedMessage) -> bool:
        """Whether ``buffered`` is ready, has its body in memory, and has not expired."""
        ...

    def offered(self) -> list[BufferedMessage]:
        """Return all ready messages that are the first of their ordering key or have no ordering key."""
        ...

    def take_oldest(self, basket: Basket, followers: Iterable[BufferedMessage] = ()) -> None:
        """Add the oldest of the ready messages and ``followers`` to ``basket``, in order of rank.

        When a message is taken, the next message of its ordering key may be taken as well.
        """
        ...

    def take_of(self, many: Iterable[BufferedMessage], basket: Basket, passes: HeaderFilter | None) -> None:
        """Add the messages of ``many`` that pass the filter to ``basket``, in order of rank.

        When a message is taken, the next message of its ordering key may be taken as well, if it passes the filter.
        """
        ...


class Selection:
    """Selects any message, for a pop without a filter. Base class of all other selections."""

    mode: ConsumeMode | None = ConsumeMode.POP
    """The consume mode in which this selection is served. None: it is served in every mode."""
    is_limited = True
    """Whether this selection gets no messages during a pause or when ``max_in_flight`` is reached."""
    is_choosy = False
    """Whether this selection may get a message when a pop without a filter gets none, or the reverse."""

    @property
    def filter(self) -> HeaderFilter | None:
        """The filter for the message headers, or None."""
        return None

    @property
    def lease_id(self) -> LeaseId | None:
        """The lease id that the messages share with messages of other pops. None: the pop uses a new lease id."""
        return None

    @property
    def part(self) -> GroupPart | None:
        """The lease group of which the messages become members, and the request that forms it. None: no lease group."""
        return None

    def has(self, ready: Ready) -> bool:
        """Whether there is a ready message for this selection."""
        return ready.has_any()

    def take(self, ready: Ready, basket: Basket) -> None:
        """Add ready messages for this selection to ``basket``, in order."""
        ready.take_oldest(basket)

    def hosts(self, hosts: Sequence[QueueHost]) -> Sequence[QueueHost]:
        """Return those of a subscription's queue ``hosts`` whose queues this selection reads."""
        return hosts


ANY = Selection()


class FilteredSelection(Selection):
    """Selects the messages whose headers pass a filter, if there are few messages to compare."""

    is_choosy = True

    def __init__(self, wanted: HeaderFilter) -> None:
        self._filter = wanted

    @property
    def filter(self) -> HeaderFilter:
        return self._filter

    def has(self, ready: Ready) -> bool:
        return not ready.are_many() and any(
            ready.can_be_taken(buffered) and buffered.message is not None and self._filter(buffered.message.headers)
            for buffered in ready.offered()
        )

    def take(self, ready: Ready, basket: Basket) -> None:
        if not ready.are_many():
            ready.take_of(ready.offered(), basket, self._filter)


class AdminSelection(Selection):
    """Selects any message, for a purge.

    It is served in every mode, during a pause, and when ``max_in_flight`` is reached.
    """

    mode = None
    is_limited = False
    is_choosy = True


class GroupSelection(Selection):
    """Selects messages that become members of a lease group. All members have the group's lease id.

    For each ordering key, the message directly behind the last member may become a member, too.
    """

    is_choosy = True

    def __init__(self, part: GroupPart, lease_id: LeaseId) -> None:
        self._part = part
        self._lease_id = lease_id
        self._tails: dict[tuple[int, str], BufferedMessage] = {}
        """For each ordering key, the last member that an earlier pop for the group has taken."""
        self.taken_count = 0
        """Number of messages that earlier pops for the group have taken."""

    @property
    def lease_id(self) -> LeaseId:
        return self._lease_id

    @property
    def part(self) -> GroupPart:
        return self._part

    def has(self, ready: Ready) -> bool:
        return any(map(ready.can_be_taken, self._followers())) or ready.has_any()

    def take(self, ready: Ready, basket: Basket) -> None:
        ready.take_oldest(basket, self._followers())
        self.taken_count += len(basket.taken)
        for buffered in basket.taken:
            if buffered.key is not None:
                self._tails[buffered.queue_index, buffered.key] = buffered

    def _followers(self) -> Iterator[BufferedMessage]:
        """Return the messages directly behind the last member of each ordering key.

        If more than ``KEYS_MAX`` ordering keys have no further messages, these keys are forgotten.
        """
        ended: list[tuple[int, str]] = []
        for key, tail in self._tails.items():
            behind = tail.next_of_key()
            if behind is None:
                ended.append(key)
            elif tail.state is MessageState.LEASED and tail.lease_id == self.lease_id:
                yield behind
        if len(ended) > KEYS_MAX:
            for key in ended:
                del self._tails[key]


class PullSelection(Selection):
    """Selects the next messages of one queue in order, without skipping any, for the client of ``lease``."""

    mode = ConsumeMode.PULL
    is_choosy = True

    def __init__(self, lease: PullLease) -> None:
        self._lease = lease

    @property
    def lease_id(self) -> LeaseId:
        return self._lease.lease_id

    def has(self, ready: Ready) -> bool:
        following = next(self._lease.candidates(), None)
        return following is not None and ready.can_be_taken(following)

    def take(self, ready: Ready, basket: Basket) -> None:
        for buffered in self._lease.candidates():
            if not ready.can_be_taken(buffered) or not basket.add(buffered):
                break

    def hosts(self, hosts: Sequence[QueueHost]) -> Sequence[QueueHost]:
        return [self._lease.host]
