"""Orders the messages of each ordering key in one queue: only the head of a key may be handed out.

The messages of a key form a chain (a linked list): each message links to the next one. So a key needs one table entry,
no matter how many messages it has. A message stays in its chain from its delivery until it is dropped, whatever its
state. If a message is dropped before it is the head, the chain skips it.

At first, a redelivered message has no place in its chain, because the broker may deliver redelivered messages in a
different order. For example, if a channel ends before all of them were delivered on it, RabbitMQ puts the delivered
messages behind the rest. So a redelivered message waits until all redelivered messages have arrived. Then its position
in the queue determines its place.

RabbitMQ delivers redelivered messages ahead of others. But a message that was sent to a consumer during the consumer's
cancellation can arrive behind messages that were published later. So a redelivered message is also inserted in front of
messages with later positions that no client has received.
"""

from collections.abc import Iterable

from popgate.domain.message import Message, place_of
from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import UNSEEN, BufferedMessage, MessageState


class OrderingKeys:
    """The chains of all ordering keys in one queue. ``append`` must be called in queue order."""

    def __init__(self) -> None:
        self._last: dict[str, BufferedMessage] = {}
        self._deferred: list[tuple[tuple[int, CopyId], str, BufferedMessage]] = []

    @property
    def is_ordered(self) -> bool:
        """Whether every message has its place in its chain."""
        return not self._deferred

    def append(self, message: BufferedMessage, key: str) -> None:
        """Append a message to the chain of its ordering key."""
        last = self._last.get(key)
        message.key = key
        message.is_head = last is None
        if last is not None:
            last.next = message
        self._last[key] = message

    def defer(self, message: BufferedMessage, key: str, delivered: Message) -> None:
        """Remember a redelivered message without a place until all redelivered messages have arrived."""
        message.is_head = False
        self._deferred.append((place_of(delivered), key, message))

    def order_deferred(self, known: Iterable[BufferedMessage]) -> list[BufferedMessage]:
        """Insert each deferred message into its chain, and assign the ranks in the same order.

        ``known``: all messages of the queue. Return the deferred messages that become heads of their chains.
        """
        deferred = [one for one in self._deferred if one[2].state is not MessageState.DROPPED]
        deferred.sort(key=lambda one: (_is_new(one[2]), one[0]))
        self._deferred = []
        ranks = sorted(message.rank for _, _, message in deferred)
        overtaken = {key for _, key, _ in deferred} & self._last.keys()
        heads = {message.key: message for message in known if message.is_head and message.key in overtaken}
        for (place, key, message), rank in zip(deferred, ranks, strict=True):
            message.rank = rank
            if (head := heads.get(key)) is None:
                self.append(message, key)
            elif self._insert(message, key, place, head):
                heads[key] = message
        return [message for _, _, message in deferred if message.is_head]

    def _insert(self, message: BufferedMessage, key: str, place: tuple[int, CopyId], head: BufferedMessage) -> bool:
        """Insert a message in front of the first message that no client has received and that is behind ``place``.

        Return whether the inserted message is the new head of its chain.
        """
        before: BufferedMessage | None = None
        following: BufferedMessage | None = head
        while following is not None and not _is_behind(following, place):
            before, following = following, following.next_of_key()
        if following is None:
            self.append(message, key)
            return False
        message.key, message.next = key, following
        message.rank = min(message.rank, following.rank)
        message.is_head = before is None
        if before is None:
            following.is_head = False
        else:
            before.next = message
        return message.is_head

    def remove(self, message: BufferedMessage) -> BufferedMessage | None:
        """Remove a dropped message from its chain. If this makes another message the head, return that message."""
        if message.key is None or not message.is_head:
            return None
        key, following = message.key, message.next_of_key()
        message.key = message.next = None
        if following is None:
            del self._last[key]
        else:
            following.is_head = True
        return following

    def clear(self) -> bool:
        """Delete all chains, because the broker will deliver every message again.

        Return whether there were any chains.
        """
        were_any = bool(self._last or self._deferred)
        self._last.clear()
        self._deferred.clear()
        return were_any


def _is_behind(message: BufferedMessage, place: tuple[int, CopyId]) -> bool:
    """Whether no client has received ``message``, and its position in the queue is behind ``place``."""
    return _is_new(message) and message.message is not None and place_of(message.message) > place


def _is_new(message: BufferedMessage) -> bool:
    """Whether no client has ever received ``message``. Received messages stay in front of all others."""
    return message.state in UNSEEN and not message.delivery_count
