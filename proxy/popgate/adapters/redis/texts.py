"""Reads the fields and values of hashes in Redis, into which another program may have written anything."""

from collections.abc import Sequence

import msgspec

from popgate.runtime.logs import OnceLogger


def read_pairs(packed: msgspec.Raw, unreadable: OnceLogger) -> list[tuple[str, str]]:
    """Return the fields and values of a hash that a script has packed. Leave out those that are not UTF-8."""
    try:
        flat: Sequence[str | None] = msgspec.msgpack.decode(packed, type=list[str])
    except ValueError:
        flat = [_text(one) for one in msgspec.msgpack.decode(packed, type=list[msgspec.Raw])]
    pairs: list[tuple[str, str]] = []
    for field, value in zip(flat[::2], flat[1::2], strict=True):
        if field is None or value is None:
            unreadable.warn("a name" if field is None else field, "not UTF-8")
        else:
            pairs.append((field, value))
    return pairs


def _text(packed: msgspec.Raw) -> str | None:
    try:
        return msgspec.msgpack.decode(packed, type=str)
    except ValueError:
        return None
