"""Converts messages between proxies to bytes and back, in every protocol version that this proxy supports.

In all versions, a message is a MessagePack map with the field ``version``. The other fields depend on the version. The
answer to a message has the same version as the message. A proxy accepts messages in all versions that it supports,
because the version that the cluster uses may have changed while the message was in transit.
"""

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from msgspec import DecodeError, Struct
from msgspec.msgpack import Decoder

from popgate.cluster.protocols import Protocols, span
from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.ports.peers import PeerMessage
from popgate.wire import version_1
from popgate.wire.errors import NotUnderstood

AnswerT = TypeVar("AnswerT")


class Version(Protocol):
    """The functions of one protocol version.

    Each version is a separate module that shares no code with other versions.
    """

    def encode_message(self, sender: InstanceId, message: PeerMessage[Any]) -> bytes: ...
    def decode_message(self, data: bytes) -> tuple[InstanceId, PeerMessage[Any]]: ...
    def encode_answer(self, message: PeerMessage[Any], answer: Any) -> bytes: ...
    def encode_error(self, error: PopgateError) -> bytes: ...
    def decode_answer(self, message: PeerMessage[Any], data: bytes) -> Any: ...


class _Head(Struct, frozen=True):
    version: int


_decode_head = Decoder(_Head).decode


class Codec:
    """Encodes and decodes messages in each of ``versions``. The version numbers must be consecutive."""

    def __init__(self, versions: Mapping[int, Version]) -> None:
        self._versions = versions
        self.protocols: Protocols = (min(versions), max(versions))
        lowest, highest = self.protocols
        assert len(versions) == highest - lowest + 1, "members publish only the range of their versions"

    def encode_message(self, version: int, sender: InstanceId, message: PeerMessage[Any]) -> bytes:
        """Return ``message`` as bytes. Raises: NotUnderstood if this proxy does not support ``version``."""
        return self._spoken(version).encode_message(sender, message)

    def decode_message(self, data: bytes) -> tuple[int, InstanceId, PeerMessage[Any]]:
        """Return the version, the sender and the message that ``data`` contains. Raises: NotUnderstood."""
        version = _version_of(data)
        return version, *self._spoken(version).decode_message(data)

    def encode_answer(self, version: int, message: PeerMessage[AnswerT], answer: AnswerT) -> bytes:
        """Return ``answer`` as bytes. ``version`` is the version of ``message``. Raises: NotUnderstood."""
        return self._spoken(version).encode_answer(message, answer)

    def encode_error(self, version: int, error: PopgateError) -> bytes:
        """Return an answer that reports ``error``. ``version`` is the version of the message. Raises: NotUnderstood."""
        return self._spoken(version).encode_error(error)

    def decode_answer(self, message: PeerMessage[AnswerT], data: bytes) -> AnswerT:
        """Return the answer to ``message`` that ``data`` contains.

        Raises: NotUnderstood, or the PopgateError that ``data`` reports.
        """
        answer: AnswerT = self._spoken(_version_of(data)).decode_answer(message, data)
        return answer

    def _spoken(self, version: int) -> Version:
        spoken = self._versions.get(version)
        if spoken is None:
            only = span(self.protocols)
            raise NotUnderstood(f"this proxy does not speak version {version} of the peer protocol, only {only}")
        return spoken


def _version_of(data: bytes) -> int:
    try:
        return _decode_head(data).version
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotUnderstood(f"not a message of the peer protocol: {error}") from error


CODEC = Codec({1: version_1})
"""The codec of this release of popgate. A new protocol version is added here. All versions of the previous release must
stay in it, so that both releases can run in one cluster."""
