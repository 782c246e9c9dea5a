"""Reads the body of a request, up to a limit."""

import asyncio
from collections.abc import Iterable, Mapping
from functools import partial

from starlette.types import Message, Receive

from popgate.api.connection import Connection
from popgate.domain.errors import MessageTooLarge
from popgate.engine.lease.pop_request import Presence
from popgate.runtime.timeouts import expire_now

_DIGITS_MAX = 18


class ClientGone(Exception):
    """The client disconnected before it had sent its whole request, so no answer is possible."""


async def read_body(receive: Receive, headers: Mapping[bytes, bytes], limit: int) -> bytes:
    """Return the whole body of a request.

    Raises: MessageTooLarge if the body is larger than ``limit`` bytes (the rest of it is not read); ClientGone.
    """
    announced = headers.get(b"content-length", b"")
    if announced.isdigit() and (len(announced) > _DIGITS_MAX or int(announced) > limit):
        raise _too_large(limit)
    body = b""
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        event = await receive()
        if event["type"] != "http.request":
            raise ClientGone
        body = event.get("body", b"")
        more = event.get("more_body", False)
        size += len(body)
        if size > limit:
            raise _too_large(limit)
        if more or parts:
            parts.append(body)
    return b"".join(parts) if parts else body


def announced_bytes(headers: Iterable[tuple[bytes, bytes]], limit: int) -> int:
    """Return the size of a request's body, as its head announces it. A body of unknown length counts as ``limit``."""
    given = dict(headers)
    announced = given.get(b"content-length", b"0" if b"transfer-encoding" not in given else b"")
    announced = announced.lstrip(b"0") or announced[:1]
    return int(announced) if announced.isdigit() and len(announced) <= _DIGITS_MAX else limit


def _too_large(limit: int) -> MessageTooLarge:
    shown = f"{limit >> 20} MiB" if limit >= 1 << 20 else f"{limit >> 10} KiB"
    return MessageTooLarge(f"the request is larger than {shown}; send less at a time", field="")


async def received_part(receive: Receive, connection: Connection) -> Message:
    """Return the next part of a body. If the rest does not arrive, the end of the visit ends the wait, too."""
    if not connection.transport.is_receiving:
        return await receive()
    limit = asyncio.timeout(None)
    presence = connection.presence = Presence()
    presence.on_leave = partial(expire_now, limit)
    try:
        async with limit:
            return await receive()
    except TimeoutError:
        return {"type": "http.disconnect"}
    finally:
        connection.presence = None
