"""Hooks that `schemathesis run` loads for test_http_schema: MessagePack, and limits that keep a run short.

The hooks change no valid value to an invalid one: waits become short, queues few, and names come from a small set, so
that requests meet each other's topics.
"""

import re
from typing import Any, cast
from zlib import crc32

import msgspec
import schemathesis

from popgate.domain.names import NAME_PATTERN

MSGPACK = "application/msgpack"
NAMES = ("a", "b.c", "d_e-f")
WAIT_SECONDS_MAX = 0.01
QUEUES_MAX = 2
SLOTS_MAX = 2
QUEUES_PATH_MAX = 256


@schemathesis.serializer(MSGPACK)
def to_msgpack(context: schemathesis.SerializationContext, value: Any) -> Any:
    if isinstance(value, bytes):
        return value
    try:
        return msgspec.msgpack.encode(value, enc_hook=str)
    except OverflowError:  # an invalid number that MessagePack can't even encode: replaced by other invalid data
        return b"\xc1"


@schemathesis.deserializer(MSGPACK)
def from_msgpack(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return _as_json(msgspec.msgpack.decode(response.content))


def _as_json(value: Any) -> Any:
    """Return a value with texts in place of bytes: schemathesis remembers answers as JSON, which has no bytes."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in cast("dict[str, Any]", value).items()}
    return [_as_json(one) for one in cast("list[object]", value)] if isinstance(value, list) else value


@schemathesis.hook  # pyright: ignore[reportUnknownMemberType]  # not annotated there
def before_call(context: schemathesis.HookContext, case: schemathesis.Case[Any], kwargs: dict[str, Any]) -> None:
    for name, value in case.path_parameters.items():
        if isinstance(value, str) and re.fullmatch(NAME_PATTERN, value):
            case.path_parameters[name] = NAMES[crc32(value.encode()) % len(NAMES)]
        elif name == "queue" and isinstance(value, int) and 0 <= value < QUEUES_PATH_MAX:
            case.path_parameters[name] = 0  # every topic has that one
        elif name == "epoch" and value == 0:
            case.path_parameters[name] = 1  # only epoch 0 is ever acked: a schema can't say that it is gone then
    if isinstance(case.body, dict):
        _bound(case.body, "wait_seconds", WAIT_SECONDS_MAX, 30)
        _bound(case.body, "queues", QUEUES_MAX, 256)
        _bound(case.body, "slots", SLOTS_MAX, 64)
        _bound(case.body, "through_epoch", 0, 2**63 - 1)
        if isinstance(retry := case.body.get("retry"), dict):
            _bound(retry, "initial_seconds", 0, 43_200)  # at most max_seconds, which a schema can't express
        most = case.body.get("max_lease_seconds")
        if isinstance(most, (int, float)) and not isinstance(most, bool) and 1 <= most <= 43_200:
            case.body["max_lease_seconds"] = 43_200  # at least invisibility_seconds, likewise


def _bound(body: dict[str, Any], name: str, limit: float, valid: float) -> None:
    """Lower a valid value that is above ``limit``; leave an invalid one unchanged."""
    value = body.get(name)
    if isinstance(value, (int, float)) and limit < value <= valid:
        body[name] = limit
