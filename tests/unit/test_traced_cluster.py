"""What proxies with tracing tell each other about leases, and what happens if another proxy does not answer."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import msgpack
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import SpanContext

from popgate.adapters.tracing import other_leases
from popgate.adapters.tracing.contexts import LeaseContexts, RememberedLeases, context_in, with_context, within_trace
from popgate.adapters.tracing.other_leases import OtherLeases
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import InstanceId
from popgate.ports.peers import ForwardedAnswer, ForwardedRequest
from popgate.runtime.background import Background

CREATED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LEASED = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = InstanceId("other")


def context_of(traceparent: str) -> SpanContext:
    found = context_in({"traceparent": traceparent})
    assert found is not None
    return found


class Peer:
    """Another proxy, which remembers one lease, and answers as `says` says."""

    def __init__(self) -> None:
        leases = RememberedLeases()
        leases.remember("known", LeaseContexts("m-1", context_of(CREATED), context_of(LEASED)))
        self._answers = OtherLeases(context_without(self), leases, topics())
        self.says: ForwardedAnswer | Exception | float | None = None
        self.asked: list[ForwardedRequest] = []

    async def forward(self, to: InstanceId, request: ForwardedRequest, *, wait_seconds: float) -> ForwardedAnswer:
        self.asked.append(request)
        if isinstance(self.says, Exception):
            raise self.says
        if isinstance(self.says, ForwardedAnswer):
            return self.says
        await asyncio.sleep(self.says or 0.0)
        return ForwardedAnswer(200, [], self._answers.answer(request.body))


def context_without(peer: Peer, background: Background | None = None) -> Any:
    """Return what `OtherLeases` uses of the engine's context."""
    router = SimpleNamespace(cluster=SimpleNamespace(peers=peer), other_members=lambda: [OTHER])
    options = SimpleNamespace(secrets=[b"a secret of these tests"])
    return SimpleNamespace(router=router, options=options, background=background)


def topics() -> Any:
    return SimpleNamespace(served={})


class Ended(SpanProcessor):
    """The spans that have ended."""

    def __init__(self) -> None:
        self.spans: asyncio.Queue[ReadableSpan] = asyncio.Queue()

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.put_nowait(span)


class Bench:
    """This proxy, which asks the peer."""

    def __init__(self, background: Background) -> None:
        self.peer = Peer()
        self.leases = OtherLeases(context_without(self.peer, background), RememberedLeases(), topics())
        self._ended, provider = Ended(), TracerProvider()
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("test")

    async def ended(self, *keys: str) -> Any:
        """End a span after asking for these keys, and return it."""
        self.leases.end_after_asking_all(self._tracer.start_span("ack t"), keys)
        return await asyncio.wait_for(self._ended.spans.get(), 5)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    background = Background()
    yield Bench(background)
    await background.stop()


async def test_a_span_is_linked_to_what_another_proxy_remembers_and_ends_when_it_ended(bench: Bench) -> None:
    bench.peer.says = 0.05
    span = await bench.ended("unknown", "known")
    assert [one.context for one in span.links] == [context_of(CREATED), context_of(LEASED)]
    assert [one.attributes for one in span.links] == [{"messaging.message.id": "m-1"}] * 2
    assert span.end_time - span.start_time < 50_000_000


@pytest.mark.parametrize(
    "says",
    [
        PeerUnavailable("it is gone"),
        ForwardedAnswer(404, [], b"it does not trace"),
        ForwardedAnswer(200, [], b"\xc1"),
        ForwardedAnswer(200, [], msgpack.encode([["m", "x", "y"]])),
        30.0,
    ],
    ids=["unavailable", "without tracing", "not MessagePack", "no contexts", "too slow"],
)
async def test_a_span_ends_without_links_if_another_proxy_does_not_help(
    bench: Bench, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(other_leases, "ASK_SECONDS", 0.02)
    bench.peer.says = says
    assert (await bench.ended("known")).links == ()


async def test_only_some_spans_wait_for_answers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_leases, "ASKING_MAX", 0)
    assert (await bench.ended("known")).links == ()
    assert not bench.peer.asked


@pytest.mark.parametrize("body", [b"", b"\xc1", msgpack.encode({"a": 1}), msgpack.encode([1])])
async def test_another_body_is_refused(bench: Bench, body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        bench.leases.answer(body)


def test_the_leases_of_a_pulled_message_and_those_before_it_are_found() -> None:
    leases, leased = RememberedLeases(), context_of(LEASED)
    for handle, after in (("a", ""), ("b", "a"), ("c", "b"), ("loop", "loop")):
        leases.remember(handle, LeaseContexts(handle, None, leased, after))
    assert [*leases.through("b")] == ["b", "a"]
    assert [*leases.through("loop")] == ["loop"]
    leases.forget("b")
    assert [*leases.through("c")] == ["c"]
    assert leases.through("unknown") == {}


def test_a_forwarded_request_continues_the_present_trace() -> None:
    given = [(b"accept", b"x"), (b"traceparent", CREATED.encode()), (b"tracestate", b"a=1")]
    assert with_context(given) == given
    with within_trace(given), trace.use_span(trace.NonRecordingSpan(context_of(LEASED))):
        assert with_context(given) == [(b"accept", b"x"), (b"traceparent", LEASED.encode())]
    with within_trace(given):
        assert with_context(given) == given
