"""Defines the ASGI application that serves the whole HTTP interface.

Theory of operation. The application serves the data plane itself, as a raw ASGI dispatcher: it splits the path, reads
the body, calls one handler and sends the answer in two ASGI messages. Between a client and the engine there is no
framework, no middleware and no additional task. The application passes all other requests to the FastAPI application
of ``control``. Both use the same table of errors in ``problems``. If callers must prove who they are, a ``gate`` in
front of the application admits each request. Other proxies use a socket of their own (``peers``).
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import chain
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from popgate.api.asked import query_values
from popgate.api.body import ClientGone, read_body
from popgate.api.browsers import BrowserGuard
from popgate.api.connection import EXTENSION, Connection
from popgate.api.control import ControlPlane
from popgate.api.dead_letters import dead_letters_proxy
from popgate.api.features import FeatureFilter
from popgate.api.formats import Format, negotiate
from popgate.api.forwarded_locks import LockPeers
from popgate.api.forwarding import ForwardingMiddleware
from popgate.api.known_heads import KNOWN_HEAD, WHOLE_BODY, KnownHead
from popgate.api.lease_groups import LeaseGroupHandlers
from popgate.api.locks import LockHandlers
from popgate.api.metrics import METRICS_PATH, AccessFigures, metrics_proxy
from popgate.api.native import Native
from popgate.api.paths import LOCKS
from popgate.api.problems import HttpError, internal_problem, problem_answer
from popgate.api.process_metrics import ProcessFigures
from popgate.api.pulls import PullHandlers
from popgate.api.readiness import Readiness
from popgate.api.request_counts import RequestCounts
from popgate.api.requests import REQUEST_BYTES_MAX
from popgate.api.routes import Call, Route, Routes, Streamed
from popgate.api.scope_keys import forwarding_of
from popgate.api.subscription_state import SubscriptionStates
from popgate.api.visit import Visit, visit_of
from popgate.api.whole_answers import length_of, send_answer, wrote_success
from popgate.backup.hosted import HostedBackup
from popgate.doctor.examination import Checkup
from popgate.domain.errors import BrokerUnavailable, PopgateError
from popgate.domain.features import ALL_FEATURES, Feature
from popgate.domain.hosts import ANY_HOST
from popgate.domain.names import InstanceId
from popgate.engine.engine import Engine
from popgate.journal.counters import EventCounters
from popgate.journal.figures import JournalFigures
from popgate.journal.reports import ReportFolder
from popgate.locks.hosted import HostedLocks
from popgate.ports.peers import ForwardedAnswer, Peers
from popgate.replicas.view import CachedReplicaView
from popgate.runtime.log_levels import LogLevels
from popgate.runtime.single_run import SingleRun

_log = logging.getLogger(__name__)

PREFIXES = ("/v1/topics/", f"{LOCKS}/")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOptions:
    """Settings of the HTTP interface."""

    request_bytes_max: int = REQUEST_BYTES_MAX
    allowed_hosts: Collection[str] = (ANY_HOST,)
    """Host names that a client may use for this proxy. ``ANY_HOST`` allows all names. localhost and IP addresses are
    always allowed."""


class ClusterFace(NamedTuple):
    """The objects that connect a proxy with the other proxies of its cluster.

    ``peers`` sends requests to the other proxies, and ``locks`` forwards requests about locks that another proxy holds.
    ``unready_reason`` returns why this proxy can't be a member of the cluster now, or None if it is one.
    """

    peers: Peers
    locks: LockPeers | None = None
    unready_reason: Callable[[], str | None] = lambda: None


class _Plan(NamedTuple):
    """What the head of a request of the data plane determines: its headers by name, its route, the parameters in the
    path, those in the query, and the formats."""

    headers: Mapping[bytes, bytes]
    route: Route
    path: tuple[str, ...]
    query: Mapping[str, str]
    form: Format


class PopgateApp:
    """The whole HTTP interface as one ASGI application. It does not start or stop the engine."""

    def __init__(
        self,
        engine: Engine,
        locks: HostedLocks,
        counters: EventCounters,
        options: ApiOptions,
        cluster: ClusterFace | None = None,
        offered: Collection[Feature] = ALL_FEATURES,
        journal: Callable[[], JournalFigures] | None = None,
        replicas: CachedReplicaView | None = None,
        requests: RequestCounts | None = None,
        access: AccessFigures | None = None,
        process: ProcessFigures | None = None,
        levels: LogLevels | None = None,
        backup: HostedBackup | None = None,
        doctor: SingleRun[Checkup] | None = None,
        reports: ReportFolder | None = None,
    ) -> None:
        self._requests = requests or RequestCounts()
        peers = None if cluster is None else cluster.peers
        self._routes = Routes(
            chain(
                Native(engine, peers).routes(),
                SubscriptionStates(engine, counters, peers).routes(),
                PullHandlers(engine, peers).routes(),
                LeaseGroupHandlers(engine).routes(),
                LockHandlers(locks, None if cluster is None else cluster.locks).routes(),
            )
        )
        self._control = ControlPlane(
            engine,
            locks,
            counters,
            self._requests,
            around=_forwarding(engine, peers),
            peers=peers,
            readiness=Readiness(engine, None if cluster is None else cluster.unready_reason),
            offered=offered,
            journal=journal,
            replicas=replicas,
            access=access,
            process=process,
            levels=levels,
            backup=backup,
            doctor=doctor,
            reports=reports,
        )
        self._limit = options.request_bytes_max
        self._browser_guard = BrowserGuard(options.allowed_hosts)
        self._is_member = cluster is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._control(scope, receive, send)
            return
        head: KnownHead | None = scope.get(KNOWN_HEAD)
        plan: _Plan | None = None if head is None else head.plan
        if plan is None:
            try:
                self._browser_guard.check(scope["method"], dict(scope["headers"]))
            except HttpError as error:
                await self._refuse(error, send)
                return
            if not (scope["path"].startswith(PREFIXES) or scope["path"] == LOCKS):
                await self._control(scope, receive, send)
                return
        connection: Connection | None = scope.get("extensions", _NONE).get(EXTENSION)
        operation, status = "unknown", 200
        headers: Sequence[tuple[bytes, bytes]] | None = None
        cancelled: asyncio.CancelledError | None = None
        try:
            if plan is None:
                route, path = self._routes.find(scope["method"], scope["path"])
                operation = route.operation
                plan = _plan(scope, route, path)
                if head is not None:
                    head.plan = plan
            operation = plan.route.operation
            forwarding = forwarding_of(scope)
            limit = min(self._limit, plan.route.bytes_max)
            body: bytes | None = scope.get(WHOLE_BODY)
            if body is None or len(body) > limit:
                body = await read_body(receive, plan.headers, limit)
            may_forward = scope if self._is_member and forwarding is None else None
            call = Call(plan.path, plan.query, body, plan.form, connection, forwarding, may_forward, visit_of(scope))
            answer = await plan.route.handler(call)
            if isinstance(answer, ForwardedAnswer):
                status, headers, answer = _forwarded(answer)
        except ClientGone:
            return
        except asyncio.CancelledError as error:  # the proxy is stopping, and this request took too long
            cancelled = error
            cut_off = BrokerUnavailable("popgate is shutting down", outcome_unknown=operation == "publish")
            status, headers, answer = problem_answer(cut_off)
        except PopgateError as error:
            status, headers, answer = problem_answer(error)
        except Exception as error:
            status, headers, answer = internal_problem(error, operation=operation)
        self._requests.count(operation, status)
        if (visit := visit_of(scope)) is not None:
            visit.is_done = status < HTTPStatus.BAD_REQUEST
        if isinstance(answer, Streamed):
            await _send_stream(answer, send, connection, operation, visit)
        elif headers is not None:
            await send_answer(send, connection, status, headers, answer)
        else:
            assert plan is not None, "a request without a plan has failed"
            await _send_success(send, connection, plan.form.content_type, answer)
        if cancelled is not None:
            raise cancelled

    async def _refuse(self, error: HttpError, send: Send) -> None:
        status, headers, body = problem_answer(error)
        self._requests.count("refused", status)
        await send_answer(send, None, status, headers, body)


_NONE: dict[str, Any] = {}


def _plan(scope: Scope, route: Route, path: tuple[str, ...]) -> _Plan:
    """Read the rest of a head. Raises: InvalidRequest, UnsupportedMediaType."""
    headers = dict(scope["headers"])
    query = query_values(scope["query_string"], *route.query) if route.query is not None else _NONE
    return _Plan(headers, route, path, query, negotiate(headers))


async def _send_success(
    send: Send, connection: Connection | None, content_type: tuple[bytes, bytes], answer: bytes
) -> None:
    if not wrote_success(send, connection, content_type, answer):
        await send_answer(send, connection, HTTPStatus.OK, (content_type, length_of(answer)), answer)


def _forwarded(answer: ForwardedAnswer) -> tuple[int, Sequence[tuple[bytes, bytes]], bytes]:
    return answer.status, [*answer.headers, length_of(answer.body)], answer.body


def _forwarding(engine: Engine, peers: Peers | None) -> Callable[[ASGIApp], ASGIApp]:
    """Return a function that wraps the control plane. The wrapper forwards requests about dead letters to the proxy
    that owns these dead letters, and requests for another proxy's metrics to that proxy. A proxy that runs alone has no
    wrapper."""
    if peers is None:
        return lambda app: app

    def where(scope: Scope) -> InstanceId | None:
        return metrics_proxy(engine, scope) if scope["path"] == METRICS_PATH else dead_letters_proxy(engine, scope)

    return lambda app: ForwardingMiddleware(app, peers, where, sent=engine.count_forwarded)


async def _send_stream(
    answer: Streamed, send: Send, connection: Connection | None, operation: str, visit: Visit | None
) -> None:
    """Send a streamed answer part by part.

    If reading a part fails, or the visit ends, the answer is not ended properly, and the server closes the connection.
    The client then detects that the answer is incomplete.
    """
    if visit is not None:
        visit.is_streaming = True
    headers = [answer.content_type]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        async for part in answer.parts:
            if (connection is not None and connection.gone) or (visit is not None and visit.ended is not None):
                return
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except PopgateError as error:
        _log.warning("an answer was interrupted", extra={"operation": operation, "error": error.detail})
        return
    finally:
        await answer.parts.aclose()
    await send({"type": "http.response.body", "body": b""})


def build_app(
    engine: Engine,
    locks: HostedLocks,
    counters: EventCounters,
    options: ApiOptions | None = None,
    *,
    cluster: ClusterFace | None = None,
    offered: Collection[Feature] = ALL_FEATURES,
    journal: Callable[[], JournalFigures] | None = None,
    replicas: CachedReplicaView | None = None,
    requests: RequestCounts | None = None,
    access: AccessFigures | None = None,
    process: ProcessFigures | None = None,
    levels: LogLevels | None = None,
    backup: HostedBackup | None = None,
    doctor: SingleRun[Checkup] | None = None,
    reports: ReportFolder | None = None,
) -> ASGIApp:
    """Build the application. ``counters`` must receive the engine's journal events; /metrics shows its counts.

    ``cluster`` connects the proxy with the other proxies, or is None for a proxy that runs alone. ``offered`` lists the
    features that clients may use. ``journal`` returns the journal's figures for /metrics, or is None if no journal is
    written. ``replicas`` is None for a proxy without a replica keeper. ``requests`` counts the answered requests. The
    server may use the same object to count requests that it refuses before they reach the application. ``access`` and
    ``process`` are shown by /metrics. ``levels`` is the level of the process' log, which a request may change.
    ``backup`` takes backups of the data folder, or is None without one. ``doctor`` is None for a proxy without
    RabbitMQ, and ``reports`` is None without a folder of reports.

    Serve the application with ``server.server_config``. With another configuration of the server, the application does
    not notice that a client has disconnected.
    """
    app = PopgateApp(
        engine,
        locks,
        counters,
        options or ApiOptions(),
        cluster,
        offered,
        journal,
        replicas,
        requests,
        access,
        process,
        levels,
        backup,
        doctor,
        reports,
    )
    return app if set(ALL_FEATURES) <= set(offered) else FeatureFilter(app, offered)
