"""Encodes messages in answers. A message that can't be encoded is shown without its contents, and all others are shown
whole.

JSON and MessagePack can express every header that the brokers' adapters accept. This module handles headers that the
adapters have overlooked. Otherwise one such message would make each pop fail that leases it, and the client would not
get the other messages of the same pop.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from popgate.domain.dead_letter import bare
from popgate.domain.message import Message

Failed = Callable[[int, Message, Exception], None]
"""A function that is called with the number of the queue, the message that can't be encoded, and the error."""


class _HasMessage(Protocol):
    @property
    def message(self) -> Message: ...
    @property
    def queue(self) -> int: ...
    def _replace(self, *, message: Message) -> Any: ...


OneT = TypeVar("OneT", bound=_HasMessage)


class MessageEncoder:
    """Encodes messages. ``show`` converts a message to the object that ``encode`` encodes. ``failed`` is called for
    messages that can't be encoded."""

    def __init__(self, show: Callable[[Any], Any], encode: Callable[[Any], bytes], failed: Failed) -> None:
        self._show = show
        self._encode = encode
        self._failed = failed

    def many(self, found: Sequence[_HasMessage], answer: Callable[[list[Any]], Any]) -> bytes:
        """Convert the messages, pass them to ``answer``, and return its result encoded."""
        try:
            return self._encode(answer([self._show(one) for one in found]))
        except Exception:
            return self._encode(answer([self._show(self.readable(one)) for one in found]))

    def one(self, one: _HasMessage) -> bytes:
        """Return one encoded message."""
        try:
            return self._encode(self._show(one))
        except Exception as error:
            return self._encode(self._show(self._bared(one, error)))

    def readable(self, one: OneT) -> OneT:
        """Return the message ``one`` or, if it can't be encoded, the message without its contents."""
        try:
            self._encode(self._show(one))
        except Exception as error:
            return self._bared(one, error)
        return one

    def _bared(self, one: OneT, error: Exception) -> OneT:
        self._failed(one.queue, one.message, error)
        bared: OneT = one._replace(message=bare(one.message))  # pyright: ignore[reportPrivateUsage]  # a NamedTuple's
        return bared
