"""Begins requests that have arrived as a whole, with a head that is known, without parsing them.

They have the same effects on uvicorn's state as requests that its parser has read. Of the others, those that name an id
or a trace are served by the observed application.
"""

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from popgate.api.known_heads import KNOWN_HEAD, OBSERVED, WHOLE_BODY, HttpConfig, KnownHead, KnownHeads
from popgate.api.rare_waits import RareEvent


class WholeRequestProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol of one connection, which can also begin a request that was not parsed."""

    app: Any
    scope: Any
    logger: Any
    access_logger: Any

    __slots__ = ("begun_count", "known_heads", "observed_app", "observed_headers")

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.known_heads = config.known_heads if isinstance(config, HttpConfig) else KnownHeads()
        self.observed_app = config.observed_app if isinstance(config, HttpConfig) else None
        self.observed_headers = config.observed_headers if isinstance(config, HttpConfig) else OBSERVED
        self.begun_count = 0
        """Number of requests that the parser has begun to read. Set it to 0 to count those in the next data."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.begun_count += 1

    def on_headers_complete(self) -> None:
        usual = self.app
        if self.observed_app is not None and not self.observed_headers.isdisjoint(dict(self.headers)):
            self.app = self.observed_app
        super().on_headers_complete()
        self.app = usual

    def learn(self, data: bytes, body_bytes: int) -> None:
        """Remember the head of the request that the parser has read from ``data``, if this was one whole request with a
        body of ``body_bytes`` bytes."""
        if self.begun_count == 1 and self.cycle.keep_alive and not self.cycle.response_complete:
            self.known_heads.learn(data, self.scope, body_bytes)

    def begin(self, known: KnownHead, body: bytes, *, extensions: dict[str, Any]) -> None:
        """Begin a request. No other request of the connection may be in progress."""
        self.headers = [*known.headers]
        self.scope = {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": self.root_path,
            **known.scope,
            "headers": self.headers,
            "extensions": extensions,
            "state": self.app_state.copy(),
            KNOWN_HEAD: known,
            WHOLE_BODY: body,
        }
        self.cycle = cycle = RequestResponseCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=RareEvent(),
            expect_100_continue=False,
            keep_alive=True,
            on_response=self.on_response_complete,
        )
        cycle.body, cycle.more_body = bytearray(body), False
        cycle.message_event.set()
        self._start_asgi_task(cycle, self.app)
