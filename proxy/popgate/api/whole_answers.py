"""Sends answers whose bytes are all known.

uvicorn checks and writes the header fields of each answer one by one. A usual answer is written here in one step, with
the same bytes and the same effects on uvicorn's state. All other answers go through uvicorn: answers that must wait
until the client has read earlier bytes, answers to HEAD, and answers that end the connection.
"""

from collections.abc import Sequence
from functools import lru_cache

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from popgate.api.body import announced_bytes
from popgate.api.connection import Connection
from popgate.api.joined_writes import JOINED_BYTES_MAX
from popgate.api.protocol import FAREWELL_BYTES_MAX

Header = tuple[bytes, bytes]


def length_of(body: bytes) -> Header:
    """Return the header with the length of ``body``."""
    return b"content-length", b"%d" % len(body)


async def send_answer(
    send: Send, connection: Connection | None, status: int, headers: Sequence[Header], body: bytes
) -> None:
    """Send a whole answer. ``headers`` must contain the length of ``body``."""
    if connection is not None:
        connection.writes()
        connection.transport.is_corked = True
    cycle = getattr(send, "__self__", None)
    is_written = False
    if isinstance(cycle, RequestResponseCycle):
        if cycle.more_body and announced_bytes(cycle.scope["headers"], FAREWELL_BYTES_MAX + 1) > FAREWELL_BYTES_MAX:
            cycle.keep_alive = False  # the connection ends: a proxy in front must not send another request on it
        is_written = _wrote(cycle, status, headers, body)
    if not is_written:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
    if connection is not None:
        connection.was_written()


def wrote_success(send: Send, connection: Connection | None, content_type: Header, body: bytes) -> bool:
    """Write an answer with status 200, and return whether this was possible. If not, use ``send_answer``."""
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle) or cycle.more_body or not _can_write(cycle):
        return False
    if connection is not None:
        connection.writes()
    head = b"%b%d\r\n\r\n" % (_success(content_type, *cycle.default_headers), len(body))
    if len(body) <= JOINED_BYTES_MAX:
        cycle.transport.write(head + body)
    else:
        cycle.transport.write(head)
        cycle.transport.write(body)
    _complete(cycle)
    if connection is not None:
        connection.was_written()
    return True


@lru_cache(16)
def _success(content_type: Header, *others: Header) -> bytes:
    """Return the head of an answer with status 200, up to the length of its body."""
    lines = b"".join(b"%b: %b\r\n" % field for field in (*others, content_type))
    return b"%b%bcontent-length: " % (STATUS_LINE[200], lines)


def _can_write(cycle: RequestResponseCycle) -> bool:
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_started or not cycle.keep_alive:
        return False
    return not cycle.access_log and cycle.scope["method"] != "HEAD"


def _wrote(cycle: RequestResponseCycle, status: int, headers: Sequence[Header], body: bytes) -> bool:
    """Write a usual answer, and return whether it was one."""
    fields = [*cycle.default_headers, *headers]
    lines = b"".join([b"%b: %b\r\n" % field for field in fields])
    is_usual = (
        _can_write(cycle)
        and lines.count(b"\n") == lines.count(b"\r") == len(fields)  # no value can add a field
        and b"content-length: %d\r\n" % len(body) in lines
        and b"connection: " not in lines
        and b"transfer-encoding: " not in lines
    )
    if is_usual:
        cycle.transport.write(b"%b%b\r\n" % (STATUS_LINE[status], lines))
        cycle.transport.write(body)
        _complete(cycle)
    return is_usual


def _complete(cycle: RequestResponseCycle) -> None:
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.message_event.set()
    cycle.on_response()
