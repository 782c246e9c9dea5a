"""Admits requests: proves who the caller is, and whether the caller may do this, before the body is read.

Theory of operation. Every request passes here, also the requests that other proxies forward. ``access`` says which
action on which resource an operation needs. An operation that is not in that table is refused. A caller whose
credential is revoked or expires loses access at the next request. The gate also looks through the requests in progress
several times a second: those that wait stop waiting, and those whose bodies have not arrived completely are refused.

    head --unknown caller--> 401    --not permitted--> 403    --limit--> 429    --> body --revoked meanwhile--> 401
      '--public operation--> served                                               '--> served

Decisions are remembered by a hash of the credential, the method and the path, until credentials change.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from popgate.api.access import ACCESS, Access
from popgate.api.body import announced_bytes, received_part
from popgate.api.connection import EXTENSION, Connection
from popgate.api.problems import HttpError, NotFound, problem_answer
from popgate.api.requests import REQUEST_BYTES_MAX
from popgate.api.scope_keys import CALLER, FORWARDING, PROVE_CALLER, VISIT
from popgate.api.usage import Usage, Usages
from popgate.api.visit import Visit
from popgate.api.whole_answers import send_answer
from popgate.auth.audit_log import AuditEvent, AuditEventKind
from popgate.auth.credentials import Credentials
from popgate.auth.denial_log import AuditSink
from popgate.domain.errors import Forbidden, PopgateError, Unauthenticated
from popgate.domain.permissions import SERVER, Action, Caller, Resource, forbidden

_log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
"""Seconds between two checks of the requests in progress."""
REMEMBERED_MAX = 8_192
"""Maximum number of decisions that are remembered."""
ENDED_AT_ONCE_MAX = 100
"""Maximum number of requests that are ended before the event loop serves others."""
REMEMBERED_BYTES_MAX = 4 << 10
"""Maximum size of a path and a credential whose decision is remembered. Larger ones could take much memory."""
CREDENTIAL_BYTES_MAX = 16 << 10
_BEARER = b"bearer "
_OK = 200


class _Pass(NamedTuple):
    """A positive decision. ``caller`` is None for a public operation."""

    caller: Caller | None
    access: Access
    resource: Resource | None


class Gate:
    """Serves ``app`` to callers that ``credentials`` knows.

    ``topics`` returns the names of the existing topics. ``count`` is called with the operation and the status of each
    refused request. ``audit`` records changes and refusals. ``run`` must run as long as requests are served.
    """

    def __init__(
        self,
        app: ASGIApp,
        credentials: Credentials,
        *,
        topics: Callable[[], Iterable[str]],
        count: Callable[[str, int], None] = lambda _operation, _status: None,
        audit: AuditSink | None = None,
    ) -> None:
        self._app = app
        self._credentials = credentials
        self._topics = topics
        self._count = count
        self._audit = audit
        self._usages = Usages()
        self._known: dict[tuple[bytes, str, str], _Pass] = {}
        self._version = credentials.version
        self._visits: set[Visit] = set()
        self._checked_version: int | None = None
        """The version of the credentials under which the requests in progress were last checked."""
        self._next_expiry = float("inf")
        """No caller of a request in progress expires before this time (Unix seconds)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
        try:
            passed = await self._admit(scope, connection)
            if passed.caller is None:
                scope[PROVE_CALLER] = self._caller_if_known
                await self._app(scope, receive, send)
                return
            visit = self._begin(passed, passed.caller, scope, connection)
        except PopgateError as error:
            await self._refuse(error, scope, send, connection)
            return
        scope[CALLER], scope[VISIT] = passed.caller, visit

        async def receive_while_valid() -> Message:
            event = await (receive() if connection is None else received_part(receive, connection))
            visit.is_cut = event["type"] == "http.disconnect"
            visit.check()
            return event

        try:
            await self._app(
                scope, receive_while_valid, self._recording(send, visit, scope) if visit.access.is_change else send
            )
        finally:
            self._end(visit)
            if visit.access.is_change and not visit.is_recorded and not visit.is_cut:
                # The client has gone, but the change may be made. Without its whole body, a request changes nothing.
                self._note(AuditEventKind.ADMIN, scope, visit.caller, None)
            for resource in visit.created if visit.is_done else ():
                self._note_action(scope, visit, Action.CREATE, resource, AuditEventKind.ADMIN, None)

    # -- admission ------------------------------------------------------------------------------------------------

    async def _admit(self, scope: Scope, connection: Connection | None) -> _Pass:
        """Return the decision about a request. Raises: Unauthenticated, Forbidden, NotFound, MethodNotAllowed."""
        method, path = scope["method"], scope["path"]
        if FORWARDING in scope:  # the other proxy knows the caller; this proxy checks the permission itself
            return _authorised(scope.get(CALLER), *_operation(method, path))
        credential = _credential(scope)
        if self._version != self._credentials.version:
            self._version = self._credentials.version
            self._known.clear()
        key = (b"" if credential is None else sha256(credential).digest(), method, path)
        passed = self._known.get(key)
        if passed is None or (passed.caller is not None and _has_expired(passed.caller)):
            passed = await self._decide(credential, connection, scope)
            is_current = self._version == self._credentials.version  # verifying a token may have taken a while
            is_small = credential is not None and len(credential) + len(path) <= REMEMBERED_BYTES_MAX
            if passed.caller is not None and is_current and is_small:
                if len(self._known) >= REMEMBERED_MAX:
                    del self._known[next(iter(self._known))]
                self._known[key] = passed
        return passed

    async def _decide(self, credential: bytes | None, connection: Connection | None, scope: Scope) -> _Pass:
        access, resource, unknown = _operation(scope["method"], scope["path"])
        if access is not None and access.is_public:
            return _Pass(None, access, None)
        caller = scope[CALLER] = await self._caller(credential, connection)
        return _authorised(caller, access, resource, unknown)

    async def _caller(self, credential: bytes | None, connection: Connection | None) -> Caller:
        if credential is not None:
            return await self._credentials.caller(_token_in(credential))
        certificate = None if connection is None else connection.certificate
        if certificate is None:
            raise Unauthenticated("give a key or a token: Authorization: Bearer pg_...")
        return self._credentials.caller_by_certificate(certificate.names, certificate.expires_at)

    async def _caller_if_known(self, scope: Scope) -> Caller | None:
        """Return the caller of a public operation, or None if it has not proved who it is."""
        connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
        try:
            return await self._caller(_credential(scope), connection)
        except PopgateError:
            return None

    # -- visits -----------------------------------------------------------------------------------------------------

    def _begin(self, passed: _Pass, caller: Caller, scope: Scope, connection: Connection | None) -> Visit:
        """Return the visit of an admitted request, which counts from now on. Raises: LimitExceeded."""
        usage = None
        if FORWARDING not in scope:
            usage = self._usages.of(caller.principal)
            usage.take_request()
            if connection is not None:
                _attribute(connection, usage)
        note = partial(self._note_action, scope)
        visit = Visit(caller, passed.access, passed.resource, connection, usage, self._topics, note)
        if usage is not None:
            if usage.limits.bytes_in_flight is not None:
                size = announced_bytes(scope["headers"], REQUEST_BYTES_MAX)
                usage.check_bytes(size)
                visit.held_bytes = size
                usage.bytes_in_flight += size
            usage.requests += 1
        self._visits.add(visit)
        if caller.expires_at is not None:
            self._next_expiry = min(self._next_expiry, caller.expires_at)
        return visit

    def _end(self, visit: Visit) -> None:
        self._visits.discard(visit)
        if visit.usage is not None:
            visit.usage.requests -= 1
            visit.usage.bytes_in_flight -= visit.held_bytes
            visit.usage.parked -= visit.is_parked

    async def run(self) -> None:
        """End the visits of callers that lose their credentials or permissions, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            version = self._credentials.version
            if self._checked_version == version and time.time() < self._next_expiry:
                continue
            self._next_expiry = float("inf")
            await self._check_visits()
            self._checked_version = version

    async def _check_visits(self) -> None:
        """End the visits of callers without access, and note the time at which the next caller expires."""
        ended_count = 0
        present: dict[int, Caller | None] = {}
        """The callers of today, by the identity of the caller that was admitted."""
        for visit in [*self._visits]:
            if visit.usage is None or visit not in self._visits:
                continue  # forwarded: the other proxy ends it, whose keys may be newer. Or it has ended meanwhile
            if id(visit.caller) not in present:
                present[id(visit.caller)] = self._credentials.current(visit.caller)
            caller = present[id(visit.caller)]
            # The permissions of an unchanged caller are still the ones with which it was admitted.
            if caller is not None and (caller is visit.caller or _may(caller, visit.access, visit.resource)):
                visit.caller = caller
                self._next_expiry = min(self._next_expiry, caller.expires_at or float("inf"))
                continue
            gone = Unauthenticated("the credential is no longer valid")
            _end_visit(visit, gone if caller is None else _forbidden(caller, visit.access, visit.resource))
            ended_count += 1
            if ended_count % ENDED_AT_ONCE_MAX == 0:
                await asyncio.sleep(0)

    # -- answers ----------------------------------------------------------------------------------------------------

    async def _refuse(self, error: PopgateError, scope: Scope, send: Send, connection: Connection | None) -> None:
        status, headers, body = problem_answer(error)
        self._count("refused", status)
        if isinstance(error, (Unauthenticated, Forbidden)):
            self._note(AuditEventKind.DENIED, scope, scope.get(CALLER), status, error)
        await send_answer(send, connection, status, headers, body)

    def _recording(self, send: Send, visit: Visit, scope: Scope) -> Send:
        """Return ``send``, which also records the outcome of a change."""

        async def recording(message: Message) -> None:
            if message["type"] == "http.response.start":
                visit.is_recorded = True
                self._note(AuditEventKind.ADMIN, scope, visit.caller, message["status"])
            await send(message)

        return recording

    def _note(
        self,
        kind: AuditEventKind,
        scope: Scope,
        caller: Caller | None,
        status: int | None,
        error: PopgateError | None = None,
    ) -> None:
        """Record an operation. ``status`` None: its outcome is not known."""
        if self._audit is None or FORWARDING in scope:  # the proxy that forwards a request also records it
            return
        access, resource, _ = _operation(scope["method"], scope["path"])
        action = error.action if isinstance(error, Forbidden) else None if access is None else access.action
        self._write(kind, scope, caller, access, action, resource, status)

    def _note_action(
        self,
        scope: Scope,
        visit: Visit,
        action: Action,
        resource: Resource,
        kind: AuditEventKind = AuditEventKind.DENIED,
        status: int | None = HTTPStatus.FORBIDDEN,
    ) -> None:
        """Record a further action of a request: it was not permitted, or has created something by use."""
        if self._audit is not None:  # also of a forwarded request: only this proxy has made the check
            self._write(kind, scope, visit.caller, visit.access, action, resource, status)

    def _write(
        self,
        kind: AuditEventKind,
        scope: Scope,
        caller: Caller | None,
        access: Access | None,
        action: str | None,
        resource: Resource | None,
        status: int | None,
    ) -> None:
        assert self._audit is not None, "otherwise nothing is recorded"
        client = scope["client"]
        self._audit.note(
            AuditEvent(
                event=kind,
                principal=None if caller is None else caller.principal.name,
                key=None if caller is None else caller.credential,
                action=action,
                operation=None if access is None else access.operation,
                resource=str(resource or SERVER),
                outcome=status,
                is_unchanged=_is_unchanged(caller, access, resource, status),
                address=None if client is None else client[0],
            )
        )


def _end_visit(visit: Visit, why: Unauthenticated | Forbidden) -> None:
    """End a visit. If that fails, log it: the error of one request must not keep those of others going."""
    try:
        visit.end(why)
    except Exception:
        _log.exception("a request that waits could not be ended")


def _is_unchanged(caller: Caller | None, access: Access | None, resource: Resource | None, status: int | None) -> bool:
    """Whether a caller that may create, but not change, has asked for what exists already."""
    if caller is None or access is None or access.action is not Action.CREATE or status != _OK:
        return False
    return not caller.principal.may(Action.ADMIN, resource or SERVER)


def _operation(method: str, path: str) -> tuple[Access | None, Resource | None, HttpError | None]:
    """Return what the operation needs and its resource, or the error if there is no such operation."""
    if not path.isprintable():  # Starlette's patterns also match before a line end
        return None, None, NotFound(path)
    try:
        access, parameters = ACCESS.find(method, path)
    except HttpError as error:
        return None, None, error
    return access, None if access.resource is None else access.resource(parameters), None


def _authorised(
    caller: Caller | None, access: Access | None, resource: Resource | None, unknown: HttpError | None
) -> _Pass:
    """Return the decision about a known caller. Raises: Unauthenticated, Forbidden, NotFound, MethodNotAllowed."""
    if caller is None:
        raise Unauthenticated(
            "the proxy that has forwarded this request does not authenticate callers; give it the same keys"
        )
    if access is None:
        assert unknown is not None, "an operation is known or not"
        raise unknown
    if not _may(caller, access, resource):
        raise _forbidden(caller, access, resource)
    return _Pass(caller, access, resource)


def _forbidden(caller: Caller, access: Access, resource: Resource | None) -> Forbidden:
    assert access.action is not None, "every caller may do what needs no action"
    return forbidden(caller.principal, access.action, SERVER if resource is None else resource)


def _may(caller: Caller, access: Access, resource: Resource | None) -> bool:
    if access.action is None:
        return True
    if resource is None:
        return any(grant.allows(access.action) for grant in caller.principal.grants)
    actions = [access.action] if access.or_action is None else [access.action, access.or_action]
    return caller.principal.may_any(actions, resource)


def _has_expired(caller: Caller) -> bool:
    return caller.expires_at is not None and time.time() >= caller.expires_at


def _credential(scope: Scope) -> bytes | None:
    """Return the value of the ``Authorization`` header, or None if there is none. Raises: Unauthenticated if there are
    several, because a machine in between may have checked another one."""
    found: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            if found is not None:
                raise Unauthenticated("there is more than one Authorization header; send one")
            found = value
    return found


def _token_in(credential: bytes) -> str:
    """Return the token in an ``Authorization`` header. Raises: Unauthenticated."""
    if credential[: len(_BEARER)].lower() != _BEARER or len(credential) > CREDENTIAL_BYTES_MAX:
        raise Unauthenticated("the Authorization header must be: Bearer, and a key or a token")
    try:
        return credential[len(_BEARER) :].strip().decode("ascii")
    except UnicodeDecodeError as error:
        raise Unauthenticated("the Authorization header must be: Bearer, and a key or a token") from error


def _attribute(connection: Connection, usage: Usage) -> None:
    """Count the connection for the principal that uses it now. Raises: LimitExceeded."""
    if connection.user is usage or connection.gone:
        return
    usage.check_connection()
    if connection.user is not None:
        connection.user.connections -= 1
    connection.user = usage
    usage.connections += 1
