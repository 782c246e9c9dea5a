"""Traces locks: the acquire, verify, renew and release of a client is a span with a link to the acquire.

OpenTelemetry has no conventions for locks. So these are server spans, whose names don't contain the lock, because there
may be many locks. A client without a lock waits in its ``acquire`` span, and one that got none has
``popgate.lock.acquired`` false. The proxy that holds the lock makes the spans, because the other proxies forward all
requests with a token to it. Neither tokens nor their digests are in a span.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Span, SpanKind

from popgate.adapters.tracing.attributes import Attributes
from popgate.adapters.tracing.contexts import LeaseContexts, RememberedLeases
from popgate.adapters.tracing.spans import Spans, links_to
from popgate.domain.errors import LockLost
from popgate.locks.hosted import HostedLocks
from popgate.locks.hosted_grants import HostedGrant
from popgate.locks.lock_waiter import LockWaiter

NAME, HOLDER, ACQUIRED = "popgate.lock.name", "popgate.lock.holder", "popgate.lock.acquired"


class TracedLocks(HostedLocks):
    """Locks whose requests are traced."""

    def __init__(self, spans: Spans, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._spans = spans
        self._acquired = RememberedLeases()
        """The contexts of the acquires, by the digests of the tokens."""

    async def acquire(
        self, name: str, holder: str, *, ttl_seconds: float, wait_seconds: float, waiter: LockWaiter
    ) -> tuple[str, HostedGrant] | None:
        with self._span("acquire", name, None) as span:
            span.set_attribute(HOLDER, holder)
            given = await super().acquire(
                name, holder, ttl_seconds=ttl_seconds, wait_seconds=wait_seconds, waiter=waiter
            )
            span.set_attribute(ACQUIRED, given is not None)
            if given is not None:
                span.set_attributes(_attributes(given[1]))
                acquired = LeaseContexts("", None, span.get_span_context())
                self._acquired.remember(given[1].digest.hex(), acquired)
            return given

    async def verify(self, name: str, token: str) -> HostedGrant:
        with self._span("verify", name, self._held(name, token)) as span:
            hosted = await super().verify(name, token)
            span.set_attributes(_attributes(hosted))
            return hosted

    async def renew(self, name: str, token: str, ttl_seconds: float | None) -> HostedGrant:
        with self._span("renew", name, self._held(name, token)) as span:
            hosted = await super().renew(name, token, ttl_seconds)
            span.set_attributes(_attributes(hosted))
            return hosted

    async def release(self, name: str, token: str) -> bool:
        held = self._held(name, token)
        with self._span("release", name, held) as span:
            if held is not None:
                span.set_attributes(_attributes(held))
            was_held = await super().release(name, token)
            span.set_attribute("popgate.lock.was_held", was_held)
            if held is not None:
                self._acquired.forget(held.digest.hex())
            return was_held

    def _held(self, name: str, token: str) -> HostedGrant | None:
        try:
            return self.grants.find(name, token)
        except LockLost:
            return None

    @contextmanager
    def _span(self, operation: str, name: str, held: HostedGrant | None) -> Generator[Span]:
        acquired = None if held is None else self._acquired.get(held.digest.hex())
        links = [] if acquired is None else links_to([acquired])
        with self._spans.span(f"{operation} lock", SpanKind.SERVER, {NAME: name}, links) as span:
            yield span


def _attributes(hosted: HostedGrant) -> Attributes:
    return {
        "popgate.lock.kind": hosted.definition.kind.value,
        "popgate.lock.slot": hosted.slot,
        "popgate.lock.fencing_token": hosted.fencing_token,
        HOLDER: hosted.holder,
    }
