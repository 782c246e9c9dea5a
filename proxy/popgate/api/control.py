"""Serves the control plane with FastAPI: all requests that are not for the data plane or from other proxies.

This module defines the small routes (index, health, metrics), and converts FastAPI's errors to the form of all other
errors.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from popgate import __version__
from popgate.api.admin import admin_router
from popgate.api.admin_models import PATTERNS_IN_WORDS, HealthAnswer, IndexAnswer, ProtocolRange
from popgate.api.backup import backup_router
from popgate.api.body import ClientGone, read_body
from popgate.api.callers import callers_router
from popgate.api.cluster import cluster_router
from popgate.api.complaints import QUOTED_LENGTH_MAX, unknown_field
from popgate.api.console import add_console
from popgate.api.consume_mode import consume_mode_router
from popgate.api.dead_letters import dead_letters_router
from popgate.api.doctor import doctor_router
from popgate.api.documentation import add_documentation
from popgate.api.explain import explain_router
from popgate.api.formats import JSON, MSGPACK_TYPES, check_json, media_type
from popgate.api.log_level import log_level_router
from popgate.api.metrics import OPEN_METRICS, AccessFigures, Metrics, metrics_proxy
from popgate.api.openapi import DESCRIPTION, allowed_methods, complete
from popgate.api.openapi_errors import problem_responses
from popgate.api.problems import (
    HttpError,
    MethodNotAllowed,
    NotFound,
    ProblemAnswer,
    UnsupportedMediaType,
    internal_problem,
    problem_answer,
)
from popgate.api.process_metrics import ProcessFigures
from popgate.api.readiness import Readiness
from popgate.api.replicas import replicas_router
from popgate.api.reports import reports_router
from popgate.api.request_counts import RequestCounts
from popgate.backup.hosted import HostedBackup
from popgate.doctor.examination import Checkup
from popgate.domain.errors import BrokerUnavailable, InvalidRequest, PopgateError
from popgate.domain.features import ALL_FEATURES, Feature
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.journal.figures import JournalFigures
from popgate.journal.reports import ReportFolder
from popgate.locks.hosted import HostedLocks
from popgate.ports.peers import Peers
from popgate.replicas.view import CachedReplicaView
from popgate.runtime.log_levels import LogLevels
from popgate.runtime.single_run import SingleRun

REQUEST_BYTES_MAX = 1024 * 1024
PROTOCOL_MIN = PROTOCOL_MAX = 1

_ANSWERED = "popgate.answered"
_WITH_BODY = frozenset({"POST", "PUT", "PATCH", "DELETE"})
"""Methods that change something: not before the whole request has arrived, because the rest may be invalid."""
_READS = frozenset({"GET", "HEAD"})
_PROBES = frozenset({"/healthz", "/readyz"})
"""Paths that also accept HEAD, because load balancers send it. uvicorn omits the body of the answer."""
_OPERATIONS = {
    "/v1/admin/": "admin",
    "/metrics": "metrics",
    "/healthz": "healthz",
    "/readyz": "readyz",
    "/docs": "docs",
    "/openapi.json": "docs",
    "/console": "console",
}
"""For each prefix of a path, the name of the operation in the metrics."""


class ControlPlane:
    """The ASGI application of the control plane. It limits bodies, counts answers, and answers every error with a
    problem document.

    ``around`` wraps the FastAPI application. ``peers`` is None for a proxy that runs alone. ``offered`` lists the
    features that GET /v1 shows. ``journal`` returns the journal's figures, or is None if there is no journal.
    ``replicas`` is None for a proxy without a replica keeper.
    """

    def __init__(
        self,
        engine: Engine,
        locks: HostedLocks,
        counters: EventCounters,
        requests: RequestCounts,
        *,
        around: Callable[[ASGIApp], ASGIApp] = lambda app: app,
        peers: Peers | None = None,
        readiness: Readiness | None = None,
        offered: Collection[Feature] = ALL_FEATURES,
        journal: Callable[[], JournalFigures] | None = None,
        replicas: CachedReplicaView | None = None,
        access: AccessFigures | None = None,
        process: ProcessFigures | None = None,
        levels: LogLevels | None = None,
        backup: HostedBackup | None = None,
        doctor: SingleRun[Checkup] | None = None,
        reports: ReportFolder | None = None,
    ) -> None:
        self._requests = requests
        framework = _Framework()
        _add_errors(framework)
        framework.include_router(admin_router(engine, counters))
        framework.include_router(consume_mode_router(engine, peers))
        framework.include_router(dead_letters_router(engine))
        framework.include_router(explain_router(engine, peers))
        framework.include_router(cluster_router(engine))
        framework.include_router(replicas_router(engine, replicas))
        framework.include_router(log_level_router(engine, peers, levels or LogLevels("info")))
        framework.include_router(backup_router(backup))
        framework.include_router(doctor_router(doctor))
        framework.include_router(reports_router(reports))
        keeper = None if replicas is None else replicas.keeper
        metrics = Metrics(engine, locks, counters, requests, journal, keeper, access, process)
        _add_small_routes(framework, engine, readiness or Readiness(engine), metrics, offered)
        framework.include_router(callers_router(is_insecure=access is not None and access.is_insecure))
        add_documentation(framework)
        add_console(framework)
        self._app = around(framework)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        operation = next((name for begin, name in _OPERATIONS.items() if path.startswith(begin)), "other")
        started = False

        async def counting_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._requests.count(operation, message["status"])
            await send(message)

        try:
            if scope["method"] in _WITH_BODY:
                scope, receive = await _with_bounded_body(scope, receive)
            await self._app(scope, receive, counting_send)
        except ClientGone:
            return
        except asyncio.CancelledError:  # the proxy is stopping, and this request took too long
            if not started:
                cut_off = BrokerUnavailable("popgate is shutting down", outcome_unknown=scope["method"] not in _READS)
                await _send_problem(problem_answer(cut_off), counting_send)
            raise
        except PopgateError as error:
            await _send_problem(problem_answer(error), counting_send)
        except Exception as error:
            if _ANSWERED in scope:
                return  # FastAPI has answered, and raises the error again
            answer = internal_problem(error, operation=operation)
            if not started:
                await _send_problem(answer, counting_send)


class _Framework(FastAPI):
    """FastAPI without its own documentation pages. Its OpenAPI schema also describes the data plane."""

    def __init__(self) -> None:
        super().__init__(
            title="popgate",
            version=__version__,
            description=DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
        )

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema


async def _with_bounded_body(scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
    """Read the body of a request, up to a limit. Return the request with the content type JSON, because ``curl -d``
    sends another one.

    Raises: MessageTooLarge, UnsupportedMediaType, InvalidRequest, ClientGone.
    """
    headers = dict(scope["headers"])
    kind = media_type(headers.get(b"content-type", b""))
    if kind in MSGPACK_TYPES or headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise UnsupportedMediaType(f"this path reads {JSON}, not compressed")
    body = await read_body(receive, headers, REQUEST_BYTES_MAX)
    if body:
        check_json(body)

    async def replay() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", JSON.encode())]}, replay


async def _send_problem(answer: ProblemAnswer, send: Send) -> None:
    status, headers, body = answer
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


# -- small routes -----------------------------------------------------------------------------------------------------


def _add_small_routes(
    app: FastAPI, engine: Engine, readiness: Readiness, metrics: Metrics, offered: Collection[Feature]
) -> None:
    @app.get("/v1", tags=["server"], responses=problem_responses())
    async def index() -> IndexAnswer:
        """Describe this server and its features. A client checks here whether the server supports a feature before
        using the feature."""
        features = [feature.value for feature in ALL_FEATURES if feature in offered]
        if engine.capabilities.adopts_queues:
            features.append("adopt")
        if engine.auto_create:
            features.append("auto_create")
        return IndexAnswer(
            service="popgate",
            version=__version__,
            protocol=ProtocolRange(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
            broker=engine.capabilities.name,
            features=features,
        )

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz", tags=["server"], responses=problem_responses())
    async def healthz() -> HealthAnswer:
        """Return 200 while the process answers requests."""
        return HealthAnswer(status="ok")

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz", tags=["server"], responses=problem_responses(503))
    async def readyz(request: Request) -> HealthAnswer:
        """Return 200 while messages can be published and consumed. Otherwise return 503. If the proxy has keys, only a
        caller with the permission metrics, inspect or admin sees the reason."""
        await readiness.check(request.scope)
        return HealthAnswer(status="ok")

    text = {
        "description": "Prometheus' text format, or OpenMetrics if the header Accept names it",
        "content": {kind: {"schema": {"type": "string"}} for kind in ("text/plain", OPEN_METRICS)},
    }

    @app.get(
        "/metrics", tags=["server"], response_class=Response, responses={200: text, **problem_responses(400, 404, 503)}
    )
    async def scrape(
        request: Request,
        proxy: Annotated[
            str | None, Query(description="id of another proxy of the cluster, to return its metrics")
        ] = None,
    ) -> Response:
        """Return counters, gauges and histograms for Prometheus. Workers share a port, so name each worker with
        ``proxy``."""
        metrics_proxy(engine, request.scope)  # another proxy would answer: this one checks the name
        content, content_type = await metrics.render(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})


# -- the framework's errors -------------------------------------------------------------------------------------------


def _add_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, PopgateError), "registered for this class"
        return _response(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for this class"
        path = request.url.path
        if error.status_code == 404:
            return _response(NotFound(path))
        if error.status_code == 405:
            undescribed = (error.headers or {}).get("Allow", "GET").split(", ")
            allowed = "GET, HEAD" if path in _PROBES else allowed_methods(app.openapi(), path)
            return _response(MethodNotAllowed(allowed or ", ".join(sorted(undescribed))))
        return _response(HttpError(error.status_code, "invalid_request", str(error.detail)))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError), "registered for this class"
        return _response(_first_complaint(error.errors()))

    async def unexpected(request: Request, error: Exception) -> Response:
        request.scope[_ANSWERED] = True
        return _as_response(internal_problem(error, operation=request.url.path))

    app.add_exception_handler(Exception, unexpected)
    app.add_exception_handler(PopgateError, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)


def _response(error: PopgateError) -> Response:
    return _as_response(problem_answer(error))


def _as_response(answer: ProblemAnswer) -> Response:
    status, headers, body = answer
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


def _first_complaint(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Convert pydantic's first error to the form of the data plane's errors."""
    first = errors[0]
    field = ""
    for step in first["loc"][1:]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}"
    field = field.removeprefix(".")[:QUOTED_LENGTH_MAX]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return InvalidRequest(f"the body is not valid JSON ({reason})", field="")
    if first["type"] == "extra_forbidden":
        return unknown_field(field)
    if first["type"] == "string_pattern_mismatch":
        words = PATTERNS_IN_WORDS.get(first["ctx"]["pattern"], first["msg"])
        return InvalidRequest(f"{field} {words}", field=field)
    if first["type"] == "missing":
        return InvalidRequest(f"{field or 'the body'} is required", field=field)
    return InvalidRequest(f"{field or 'the body'}: {first['msg']}", field=field)
