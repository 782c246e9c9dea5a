"""Exports spans to a collector, with OTLP over HTTP.

The standard variables of OpenTelemetry configure it: OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME,
OTEL_TRACES_SAMPLER and others. Spans wait in a bounded queue for a thread, which sends them in batches. A collector
that is away or slow costs spans, never a request.
"""

import asyncio
import contextlib
import threading

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer


class Exporting:
    """Exports the spans of ``tracer``. ``instance`` is the id of this proxy."""

    def __init__(self, instance: str, version: str) -> None:
        resource = Resource.create({"service.instance.id": instance, "service.version": version})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "popgate"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer: Tracer = self._provider.get_tracer("popgate", version)

    async def stop(self) -> None:
        """Send the spans that wait. If this is cancelled, the rest is lost. Idempotent."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop is closed: this has taken too long
                loop.call_soon_threadsafe(ended.set)

        # Not a thread of an executor, which would delay the exit: the interpreter waits for those.
        threading.Thread(target=shut_down, name="popgate-traces", daemon=True).start()
        await ended.wait()
