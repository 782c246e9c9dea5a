"""Remembers the heads of requests, because clients send the same head again and again.

Theory of operation. Usually a whole request arrives in one read, and its head has the same bytes as that of an earlier
request. Then nothing that depends only on the head has to be done again: parsing, checking the size, finding the route,
and choosing the format of the answer.

A head is learned only from the parser, after it has read exactly one whole request, which was the whole data of one
read. Its body must have the length that the head announces. So equal bytes at the beginning of a later request mean the
same to the parser. A head that changes how the connection is used is not learned: one with ``Expect``, ``Upgrade``,
``Transfer-Encoding`` or ``Connection: close``, or of HTTP/1.0. A head with the id of a request or of a trace is not
learned either, because it is different each time. All other requests are parsed.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from popgate.wire.admission import REQUEST_ID

KNOWN_HEAD = "popgate.known_head"
"""The key in the scope of a request under which its ``KnownHead`` is found, if it has one."""
WHOLE_BODY = "popgate.whole_body"
"""The key in the scope of a request under which its body is found, if the whole request has arrived in one read."""

REMEMBERED_MAX = 1024
HEAD_BYTES_MAX = 2 << 10
"""Maximum size of a head that is remembered."""
UNCOUNTED_BYTES_MAX = 16 << 10
"""Maximum size of a body, or of data behind a request in progress, that the limiter does not count as memory if it
arrives in one read. The head of a request with a larger body is not learned."""
_END = b"\r\n\r\n"
OBSERVED = frozenset({REQUEST_ID})
OBSERVED_TRACED = OBSERVED | {b"traceparent"}
"""Headers of requests that the observed application serves, also if requests are traced."""
_NOT_LEARNED = frozenset({b"expect", b"upgrade", b"transfer-encoding"}) | OBSERVED_TRACED


class KnownHead:
    """What a head means. ``scope`` contains the entries of the ASGI scope that depend on the head.

    ``plan`` belongs to the application: it keeps there what it has decided about requests with this head.
    """

    __slots__ = ("body_bytes", "headers", "plan", "scope")

    def __init__(self, scope: Mapping[str, Any], headers: Sequence[tuple[bytes, bytes]], body_bytes: int) -> None:
        self.scope = scope
        self.headers = headers
        self.body_bytes = body_bytes
        self.plan: Any = None


class KnownHeads:
    """The heads that the connections of one socket have received lately."""

    def __init__(self) -> None:
        self._known: dict[bytes, KnownHead] = {}

    def find(self, data: bytes) -> tuple[KnownHead, bytes] | None:
        """Return the head and the body of the request that ``data`` consists of. Return None if its head is not known,
        or if ``data`` is not exactly one request."""
        end = data.find(_END) + len(_END)
        known = self._known.get(data[:end])
        return (known, data[end:]) if known is not None and len(data) - end == known.body_bytes else None

    def learn(self, data: bytes, scope: Mapping[str, Any], body_bytes: int) -> None:
        """Remember the head of a request. The parser has read the request from ``data``, which contains nothing else.
        Its body has ``body_bytes`` bytes."""
        end = data.find(_END) + len(_END)
        headers = scope["headers"]
        names = [name for name, _ in headers]
        is_usual = (
            end <= HEAD_BYTES_MAX
            and len(data) - end == body_bytes <= UNCOUNTED_BYTES_MAX
            and names.count(b"content-length") == 1
            and (b"content-length", b"%d" % body_bytes) in headers
            and _NOT_LEARNED.isdisjoint(names)
            and scope["method"] != "CONNECT"
        )
        if not is_usual:
            return
        if len(self._known) >= REMEMBERED_MAX:
            del self._known[next(iter(self._known))]
        named = {name: scope[name] for name in ("http_version", "method", "path", "raw_path", "query_string")}
        self._known[data[:end]] = KnownHead(named, tuple(headers), body_bytes)


class HttpConfig(uvicorn.Config):
    """uvicorn's configuration for one socket, and the heads that its connections share.

    ``observed_app`` serves the requests that have one of ``observed_headers``, and all others while ``observe`` says
    so. If it is None, one application serves all requests.
    """

    def __init__(
        self,
        *arguments: Any,
        observed_app: ASGIApp | None = None,
        observed_headers: AbstractSet[bytes] = OBSERVED,
        **settings: Any,
    ) -> None:
        super().__init__(*arguments, **settings)
        self.known_heads = KnownHeads()
        self.observed_app = observed_app
        self.observed_headers = observed_headers
        self._plain_app: Any = None

    def observe(self, *, everything: bool) -> None:
        """From now on, the observed application serves all requests of new connections, or only those with an id."""
        if not self.loaded:
            self.load()
        if self._plain_app is None:
            self._plain_app = cast("Any", self).loaded_app
        if self.observed_app is not None:
            self.loaded_app = self.observed_app if everything else self._plain_app
