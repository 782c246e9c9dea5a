"""Reads the fields and values of hashes in Redis, into which another program may have written anything."""

from collections.abc import Sequence

import msgspec

from popgate.runtime.logs import OnceLogger

NOT_TEXT = "\ufffd"
"""Stands for a value that is not UTF-8. It is not JSON, so it is treated like every other entry that can't be read."""


def read_pairs(packed: msgspec.Raw, unreadable: OnceLogger, *, spoilt: str | None = None) -> list[tuple[str, str]]:
    """Return the fields and values of a hash that a script has packed. Leave out those that are not UTF-8.

    ``spoilt`` stands for values that are not UTF-8. By default, they are left out, too.
    """
    try:
        flat: Sequence[str | None] = msgspec.msgpack.decode(packed, type=list[str])
    except ValueError:
        flat = [_text(one) for one in msgspec.msgpack.decode(packed, type=list[msgspec.Raw])]
    pairs: list[tuple[str, str]] = []
    for field, text in zip(flat[::2], flat[1::2], strict=True):
        value = spoilt if text is None else text
        if field is None or value is None:
            unreadable.warn("a name" if field is None else field, "not UTF-8")
        else:
            pairs.append((field, value))
    return pairs


def read_text(packed: msgspec.Raw) -> str | None:
    """Return the value of a field that a script has packed, ``NOT_TEXT`` if it is not UTF-8, or None for no value."""
    try:
        return msgspec.msgpack.decode(packed, type=str | None)
    except ValueError:
        return NOT_TEXT


def _text(packed: msgspec.Raw) -> str | None:
    try:
        return msgspec.msgpack.decode(packed, type=str)
    except ValueError:
        return None
