"""Calls any of several proxies, and fails over to the next if one does not answer.

Owns the connections of one process or task. The exchanges of `popgate_client` decide what is sent and what may be
repeated; all requests of this package may be.
"""

import time
from types import TracebackType
from typing import Self

import httpx

from popgate_client.errors import RetryLater, ServerUnreachable
from popgate_client.exchange import Attempt, Exchange, Exchanges
from popgate_client.lease_groups import LeaseStream
from popgate_client.transport import call, connection, without_password
from popgate_client.wire import Reply, T
from popgate_spark.options import Place

JSON = "application/json"
ARROW = "application/vnd.apache.arrow.stream"
_GATEWAY_STATUSES = frozenset({502, 503, 504})


class Proxies:
    """Connections to the proxies of a `Place`; `first` spreads tasks over them. A context manager that closes them.

    Calls raise the same errors as `Client`; RetryLater only after the place's `retry_seconds`.
    """

    def __init__(self, place: Place, *, accept: str = JSON, first: int = 0, retry_seconds: float | None = None) -> None:
        self._place = place
        self._retry_seconds = place.retry_seconds if retry_seconds is None else retry_seconds
        self.exchanges = Exchanges(retry_seconds_max=self._retry_seconds)
        self._clients: list[httpx.Client] = []
        for url in place.urls:
            arguments = connection(url, place.token_source)
            arguments["headers"] = {**arguments["headers"], "accept": accept, "user-agent": "popgate-spark"}
            self._clients.append(httpx.Client(**arguments))
        self._turn = first % len(self._clients)

    def lease_stream(self, group: str, stream: str) -> LeaseStream:
        return LeaseStream(self, self.exchanges, self._place.topic, group, stream)

    def perform(self, exchange: Exchange[T]) -> T:
        """Run one exchange to its result, or to the error that it raises."""
        try:
            attempt = next(exchange)
            while True:
                attempt = exchange.send(self._attempt(attempt))
        except StopIteration as finished:
            result: T = finished.value
            return result
        except ServerUnreachable as error:
            urls = ", ".join(map(without_password, self._place.urls))
            detail = f"no proxy of {urls} answered for {self._retry_seconds:g} s; is popgate running? The last error: "
            raise RetryLater(error.code, detail + error.detail, error.status) from error

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _attempt(self, attempt: Attempt) -> Reply:
        if attempt.delay_seconds:
            time.sleep(attempt.delay_seconds)
        try:
            answer = call(self._clients[self._turn], attempt.request)
        except httpx.RequestError as error:
            self._next()
            return error
        if answer.status_code in _GATEWAY_STATUSES:
            self._next()
        return answer

    def _next(self) -> None:
        self._turn = (self._turn + 1) % len(self._clients)
