"""A collector of OpenTelemetry that keeps the spans it gets: an OTLP/HTTP server with the official protobuf types."""

import gzip
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from support.processes import wait_until


@dataclass(frozen=True, kw_only=True)
class CollectedSpan:
    """A span as a collector gets it. `links` are pairs of a trace id and a span id, `context` is such a pair."""

    name: str
    kind: int
    context: tuple[str, str]
    parent: str
    attributes: Mapping[str, Any]
    links: tuple[tuple[str, str], ...]
    link_attributes: tuple[Mapping[str, Any], ...]
    is_error: bool
    resource: Mapping[str, Any]


class Collector:
    """Receives spans on a free port, and returns them by name."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        collector = self

        class Receiver(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.spans += _spans_in(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def named(self, name: str) -> list[CollectedSpan]:
        return [span for span in self.spans if span.name == name]

    def having(self, attribute: str, value: object, *, count: int) -> list[CollectedSpan]:
        """Wait for `count` spans with this attribute."""

        def found() -> list[CollectedSpan]:
            return [span for span in self.spans if span.attributes.get(attribute) == value]

        wait_until(lambda: len(found()) >= count, timeout_seconds=10, what=f"{count} spans with {attribute} {value!r}")
        return found()

    def one(self, name: str) -> CollectedSpan:
        """Wait for the one span of this name."""
        wait_until(lambda: bool(self.named(name)), timeout_seconds=10, what=f"the span {name!r}")
        (span,) = self.named(name)
        return span

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def _spans_in(body: bytes) -> list[CollectedSpan]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        CollectedSpan(
            name=span.name,
            kind=span.kind,
            context=(span.trace_id.hex(), span.span_id.hex()),
            parent=span.parent_span_id.hex(),
            attributes=_values(span.attributes),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            link_attributes=tuple(_values(link.attributes) for link in span.links),
            is_error=span.status.code == 2,
            resource=_values(resource.resource.attributes),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _values(pairs: Any) -> Mapping[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
