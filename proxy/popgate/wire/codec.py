"""Messages between proxies as bytes and back, in every version that this proxy speaks.

What all versions have in common is a MessagePack map that says its ``version``; the rest is each version's own.
"""

from typing import Any, Protocol, TypeVar

from msgspec import DecodeError, Struct
from msgspec.msgpack import Decoder

from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.ports.peers import PeerMessage
from popgate.wire import version_1
from popgate.wire.errors import NotUnderstood
from popgate.wire.versions import check_version

AnswerT = TypeVar("AnswerT")


class _Version(Protocol):
    """One version: a module of its own, and of no other one's."""

    def encode_message(self, sender: InstanceId, message: PeerMessage[Any]) -> bytes: ...
    def decode_message(self, data: bytes) -> tuple[InstanceId, PeerMessage[Any]]: ...
    def encode_answer(self, message: PeerMessage[Any], answer: Any) -> bytes: ...
    def encode_error(self, error: PopgateError) -> bytes: ...
    def decode_answer(self, message: PeerMessage[Any], data: bytes) -> Any: ...


class _Head(Struct, frozen=True):
    version: int


_SPOKEN: dict[int, _Version] = {version_1.VERSION: version_1}
_decode_head = Decoder(_Head).decode


def encode_message(version: int, sender: InstanceId, message: PeerMessage[Any]) -> bytes:
    """Raises: NotUnderstood, where this proxy does not speak ``version``."""
    return _spoken(version).encode_message(sender, message)


def decode_message(data: bytes) -> tuple[int, InstanceId, PeerMessage[Any]]:
    """(version, sender, message). Raises: NotUnderstood."""
    version = _version_of(data)
    return version, *_spoken(version).decode_message(data)


def encode_answer(version: int, message: PeerMessage[AnswerT], answer: AnswerT) -> bytes:
    """The answer to ``message``, in the version in which that was asked. Raises: NotUnderstood."""
    return _spoken(version).encode_answer(message, answer)


def encode_error(version: int, error: PopgateError) -> bytes:
    """An error instead of an answer, in the version in which was asked. Raises: NotUnderstood."""
    return _spoken(version).encode_error(error)


def decode_answer(message: PeerMessage[AnswerT], data: bytes) -> AnswerT:
    """What ``message`` was answered with. Raises: NotUnderstood, and the PopgateError that it was answered with."""
    answer: AnswerT = _spoken(_version_of(data)).decode_answer(message, data)
    return answer


def _version_of(data: bytes) -> int:
    try:
        return _decode_head(data).version
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotUnderstood(f"not what proxies say to each other: {error}") from error


def _spoken(version: int) -> _Version:
    check_version(version)
    return _SPOKEN[version]
