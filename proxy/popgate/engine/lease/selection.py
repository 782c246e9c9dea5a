"""Selects the messages that a pop may get. Each kind of caller has its own selection.

A selection defines the consume mode and the limits that apply, and takes its messages from the ready messages
(``ready_messages``). A pop without a filter, and a purge, take the oldest messages. A pop with a filter takes the
oldest messages that pass the filter. A lease group also takes the messages directly behind its members. A pull takes
the next messages of one queue.
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


class Basket:
    """The messages that one pop takes: at most ``count_max``, and at most as many as fit into its answer.

    ``answer_bytes`` returns the maximum size of a message in the answer. The first message is taken whatever its size.
    """

    __slots__ = ("_answer_bytes", "_left", "_size", "taken")

    def __init__(self, count_max: int, answer_bytes: Callable[[Message], int]) -> None:
        self.taken: list[BufferedMessage] = []
        self._left = count_max
        self._size = 0
        self._answer_bytes = answer_bytes

    def add(self, buffered: BufferedMessage) -> bool:
        """Take ``buffered`` and make it GRANTING. Return False if there is no room for it."""
        if self._left <= 0:
            return False
        assert buffered.message is not None, "what is offered is here"
        self._size += self._answer_bytes(buffered.message)
        if self.taken and self._size > ANSWER_BYTES_MAX:
            self._left = 0
            return False
        self._left -= 1
        buffered.enter(MessageState.GRANTING)
        self.taken.append(buffered)
        return True


class Ready(Protocol):
    """The ready messages, from which a selection takes."""

    def has_any(self) -> bool:
        """Whether there is a message for a pop without a filter."""
        ...

    def can_be_taken(self, buffered: BufferedMessage) -> bool:
        """Whether ``buffered`` is ready, is here, and has not expired."""
        ...

    def offered(self) -> list[BufferedMessage]:
        """Return all ready heads of ordering keys."""
        ...

    def take_oldest(self, basket: Basket, followers: Iterable[BufferedMessage] = ()) -> None:
        """Take the oldest messages and ``followers``, in order of rank.

        When a message is taken, the next message of its ordering key may be taken as well.
        """
        ...

    def take_of(self, many: Iterable[BufferedMessage], basket: Basket, passes: HeaderFilter | None) -> None:
        """Take messages of ``many`` that pass the filter.

        When a message is taken, the next message of its ordering key may be taken as well, if it passes.
        """
        ...


class Selection:
    """Selects any message: the selection of a pop without a filter, and the base of all others."""

    mode: ConsumeMode | None = ConsumeMode.POP
    """The consume mode that serves this selection; None: every mode."""
    is_limited = True
    """Whether a pause and ``max_in_flight`` apply."""
    is_choosy = False
    """Whether the selection may find a message when plain pops find none, or find none when they find one."""

    @property
    def filter(self) -> HeaderFilter | None:
        """The filter on the headers; None: no filter."""
        return None

    @property
    def lease_id(self) -> LeaseId | None:
        """The lease id that the messages share with messages of other pops; None: the pop gets a new lease id."""
        return None

    @property
    def part(self) -> GroupPart | None:
        """The part of a lease group that the messages become members of; None: no lease group."""
        return None

    def has(self, ready: Ready) -> bool:
        """Whether there is a ready message for this selection."""
        return ready.has_any()

    def take(self, ready: Ready, basket: Basket) -> None:
        """Take messages in order."""
        ready.take_oldest(basket)

    def hosts(self, hosts: Sequence[QueueHost]) -> Sequence[QueueHost]:
        """Return the ``hosts`` of a subscription whose queues this selection reads."""
        return hosts


ANY = Selection()


class FilteredSelection(Selection):
    """Selects the messages whose headers pass a filter."""

    is_choosy = True

    def __init__(self, wanted: HeaderFilter) -> None:
        self._filter = wanted

    @property
    def filter(self) -> HeaderFilter:
        return self._filter

    def has(self, ready: Ready) -> bool:
        return any(
            ready.can_be_taken(buffered) and buffered.message is not None and self._filter(buffered.message.headers)
            for buffered in ready.offered()
        )

    def take(self, ready: Ready, basket: Basket) -> None:
        ready.take_of(ready.offered(), basket, self._filter)


class AdminSelection(Selection):
    """Selects any message in every mode. Neither a pause nor ``max_in_flight`` stops it."""

    mode = None
    is_limited = False
    is_choosy = True


class GroupSelection(Selection):
    """Selects messages that become members of a lease group. All members have the group's lease id.

    The message directly behind the last member of an ordering key may become a member, too.
    """

    is_choosy = True

    def __init__(self, part: GroupPart, lease_id: LeaseId) -> None:
        self._part = part
        self._lease_id = lease_id
        self._tails: dict[tuple[int, str], BufferedMessage] = {}
        """The last member of each ordering key that an earlier pop for the group has taken."""

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
        for buffered in basket.taken:
            if buffered.key is not None:
                self._tails[buffered.queue_index, buffered.key] = buffered

    def _followers(self) -> Iterator[BufferedMessage]:
        """Return the messages directly behind members. Forget keys without further messages if there are many."""
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
