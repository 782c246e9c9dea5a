"""Version 2 of the protocol between proxies, as a next release may bring it. It exists only in these tests.

It differs from version 1 in every byte except the number: values have positions instead of names, and each message
contains its sending time, for which version 1 has no field.

    a message   {version, said: [kind, sender, sent_at, {its fields, of which all below are by place}]}
    an answer   {version, answered: [answer]} or {version, failed: {kind, detail, ...}}
"""

import time
from collections.abc import Mapping
from typing import Any, get_args

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType
from msgspec.msgpack import Decoder, Encoder

from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.ports.peers import MESSAGES, PeerMessage
from popgate.wire.errors import NotUnderstood
from popgate.wire.version_1.failures import Failure, error_of, failure_of

VERSION = 2


class _Envelope(Struct, frozen=True, array_like=True):
    kind: str
    sender: InstanceId
    sent_at: float
    fields: Raw


class _Said(Struct, frozen=True):
    version: int
    said: _Envelope


class _Answered(Struct, frozen=True, omit_defaults=True):
    version: int
    answered: tuple[Raw] | UnsetType = UNSET
    failed: Failure | UnsetType = UNSET


def _answer_type(family: type[PeerMessage[Any]]) -> Any:
    (port,) = vars(family)["__orig_bases__"]
    (answer,) = get_args(port)
    return answer


_encode = Encoder(enc_hook=str).encode
_decode_said, _decode_answered = Decoder(_Said).decode, Decoder(_Answered).decode
_kinds = {family: kind for kind, family in MESSAGES.items()}
_messages: Mapping[str, Decoder[Any]] = {kind: Decoder(family) for kind, family in MESSAGES.items()}
_answers: Mapping[str, Decoder[Any]] = {kind: Decoder(_answer_type(family)) for kind, family in MESSAGES.items()}
_UNREADABLE = (DecodeError, UnicodeDecodeError, RecursionError, KeyError)


def encode_message(sender: InstanceId, message: PeerMessage[Any]) -> bytes:
    said = _Envelope(_kinds[type(message)], sender, time.time(), Raw(_encode(message)))
    return _encode(_Said(VERSION, said))


def decode_message(data: bytes) -> tuple[InstanceId, PeerMessage[Any]]:
    try:
        said = _decode_said(data).said
        return said.sender, _messages[said.kind].decode(said.fields)
    except _UNREADABLE as error:
        raise NotUnderstood(f"not a message of version {VERSION} between proxies: {error}") from error


def encode_answer(message: PeerMessage[Any], answer: Any) -> bytes:
    return _encode(_Answered(VERSION, answered=(Raw(_encode(answer)),)))


def encode_error(error: PopgateError) -> bytes:
    return _encode(_Answered(VERSION, failed=failure_of(error)))


def decode_answer(message: PeerMessage[Any], data: bytes) -> Any:
    try:
        answered = _decode_answered(data)
        if answered.failed is not UNSET:
            raise error_of(answered.failed)
        if answered.answered is UNSET:
            raise NotUnderstood(f"an answer of version {VERSION} without an answer")
        return _answers[_kinds[type(message)]].decode(answered.answered[0])
    except _UNREADABLE as error:
        raise NotUnderstood(f"not an answer of version {VERSION}: {error}") from error
