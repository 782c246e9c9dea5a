"""Sends answers whose bytes are all known.

uvicorn checks and writes the header fields of each answer one by one. A usual answer is written here in one step, with
the same bytes and the same effects on uvicorn's state. All other answers go through uvicorn: answers that must wait
until the client has read earlier bytes, answers to HEAD, and answers that end the connection.
"""

from collections.abc import Sequence

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from popgate.api.body import announced_bytes
from popgate.api.connection import Connection
from popgate.api.protocol import FAREWELL_BYTES_MAX

Headers = Sequence[tuple[bytes, bytes]]


async def send_answer(send: Send, connection: Connection | None, status: int, headers: Headers, body: bytes) -> None:
    """Send a whole answer. ``headers`` must contain the length of ``body``."""
    if connection is not None:
        connection.writes()
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


def _wrote(cycle: RequestResponseCycle, status: int, headers: Headers, body: bytes) -> bool:
    """Write a usual answer, and return whether it was one."""
    if cycle.flow.write_paused or cycle.disconnected or cycle.response_started or not cycle.keep_alive:
        return False
    if cycle.access_log or cycle.scope["method"] == "HEAD":
        return False
    fields = [*cycle.default_headers, *headers]
    lines = b"".join([b"%b: %b\r\n" % field for field in fields])
    is_usual = (
        lines.count(b"\n") == lines.count(b"\r") == len(fields)  # no value can add a field
        and b"content-length: %d\r\n" % len(body) in lines
        and b"connection: " not in lines
        and b"transfer-encoding: " not in lines
    )
    if not is_usual:
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    cycle.transport.write(b"%b%b\r\n" % (STATUS_LINE[status], lines))
    cycle.transport.write(body)
    cycle.message_event.set()
    cycle.on_response()
    return True
