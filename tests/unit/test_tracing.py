"""The trace context of messages and leases, and a proxy on which the packages for traces are missing."""

import contextlib
import sys
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanContext

from popgate.adapters.tracing.contexts import LeaseContexts, RememberedLeases, context_in, within_trace
from popgate.bootstrap.tracing import made_engine
from popgate.config import serve_options
from popgate.domain.errors import StartupError

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


def ids(context: SpanContext | None) -> tuple[str, str] | None:
    return None if context is None else (f"{context.trace_id:032x}", f"{context.span_id:016x}")


def test_a_message_carries_its_context_in_its_headers() -> None:
    found = context_in({"traceparent": TRACEPARENT, "tracestate": "vendor=1", "x": 1})
    assert ids(found) == (TRACE_ID, SPAN_ID)
    assert found is not None
    assert found.trace_state.get("vendor") == "1"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"tracestate": "vendor=1"},
        {"traceparent": ""},
        {"traceparent": "00-1-2-01"},
        {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-01"},
        {"traceparent": TRACEPARENT.upper()},
        {"traceparent": 7},
        {"traceparent": None},
        {"traceparent": b"\xff"},
        {"traceparent": "x" * 100_000},
    ],
)
def test_anything_else_is_no_context(headers: dict[str, Any]) -> None:
    assert context_in(headers) is None


def test_a_long_state_of_other_vendors_is_left_out() -> None:
    long = ",".join(f"vendor{number}={'x' * 100}" for number in range(20))
    found = context_in({"traceparent": TRACEPARENT, "tracestate": long})
    assert (ids(found), found and len(found.trace_state)) == ((TRACE_ID, SPAN_ID), 0)
    with within_trace([(b"traceparent", TRACEPARENT.encode()), (b"tracestate", long.encode())]):
        assert len(trace.get_current_span().get_span_context().trace_state) == 0


@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"00-1-2-3", TRACEPARENT.encode()])
def test_the_headers_of_a_request_never_fail_it(value: bytes) -> None:
    with within_trace([(b"traceparent", value), (b"tracestate", b"\xff=,=")]):
        pass


def test_the_oldest_leases_are_forgotten() -> None:
    leases = RememberedLeases(leases_max=2)
    context = context_in({"traceparent": TRACEPARENT})
    assert context is not None
    for number in range(3):
        leases.remember(str(number), LeaseContexts("m", None, context))
    assert [leases.get(str(number)) is not None for number in range(3)] == [False, True, True]
    leases.forget("2")
    leases.forget("2")
    assert leases.get("2") is None


def test_a_proxy_without_the_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "popgate.adapters.tracing.exporting", None)
    options = serve_options({"tracing": "true"}, {}, None)
    context: Any = None
    with pytest.raises(StartupError, match=r"^--tracing needs packages that are not installed .*popgate\[tracing\]"):
        made_engine(options, context, contextlib.AsyncExitStack())
