"""Implements version 1 of the peer protocol: MessagePack maps with field names.

    a message   {version, sender, message: {type, ...its fields}}
    an answer   {version, answer} or {version, error: {kind, detail, ...}}

Each later version gets a separate package beside this one. Once a version is released, only the changes that ``fields``
describes are permitted.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType
from msgspec.msgpack import Decoder, Encoder

from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.ports.peers import PeerMessage
from popgate.wire.errors import NotUnderstood
from popgate.wire.version_1.failures import Failure, error_of, failure_of
from popgate.wire.version_1.fields import MessageOnWire
from popgate.wire.version_1.kinds import KINDS

VERSION = 1


class _Said(Struct, frozen=True):
    version: int
    sender: InstanceId
    message: MessageOnWire


class _Answered(Struct, frozen=True, omit_defaults=True):
    version: int
    answer: Any = UNSET
    error: Failure | UnsetType = UNSET


class _ReadAnswer(Struct, frozen=True):
    version: int
    answer: Raw | UnsetType = UNSET
    error: Failure | UnsetType = UNSET


# Other applications may publish header values of types that MessagePack can't represent. Clients receive such values as
# text.
_encode = Encoder(enc_hook=str).encode
_decode_said = Decoder(_Said).decode
_decode_answered = Decoder(_ReadAnswer).decode
_by_wire_type = {kind.wire_type: kind for kind in KINDS.values()}
_answer_decoders: Mapping[type[PeerMessage[Any]], Decoder[Any]] = {
    family: Decoder(kind.answer_type) for family, kind in KINDS.items()
}
_UNREADABLE = (DecodeError, UnicodeDecodeError, RecursionError)


def encode_message(sender: InstanceId, message: PeerMessage[Any]) -> bytes:
    return _encode(_Said(VERSION, sender, KINDS[type(message)].write(message)))  # type: ignore[arg-type]  # one of them


def decode_message(data: bytes) -> tuple[InstanceId, PeerMessage[Any]]:
    """Return the sender and the message that ``data`` contains. Raises: NotUnderstood."""
    try:
        said = _decode_said(data)
    except _UNREADABLE as error:
        raise NotUnderstood(f"not a message of version {VERSION} of the peer protocol: {error}") from error
    return said.sender, _by_wire_type[type(said.message)].read(said.message)


def encode_answer(message: PeerMessage[Any], answer: Any) -> bytes:
    return _encode(_Answered(VERSION, answer=KINDS[type(message)].write_answer(answer)))


def encode_error(error: PopgateError) -> bytes:
    return _encode(_Answered(VERSION, error=failure_of(error)))


def decode_answer(message: PeerMessage[Any], data: bytes) -> Any:
    """Return the answer to ``message`` that ``data`` contains.

    Raises: NotUnderstood, or the PopgateError that ``data`` reports.
    """
    family = type(message)
    try:
        answered = _decode_answered(data)
        if answered.error is not UNSET:
            raise error_of(answered.error)
        if answered.answer is UNSET:
            raise NotUnderstood(f"an answer of version {VERSION} with neither an answer nor an error")
        answer = _answer_decoders[family].decode(answered.answer)
    except _UNREADABLE as error:
        raise NotUnderstood(f"not an answer of version {VERSION} to {family.__name__}: {error}") from error
    return KINDS[family].read_answer(answer)
