"""Represents one authenticated request in progress: its caller, and what the caller may still do."""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import Depends, Request

from popgate.api.access import Access
from popgate.api.connection import Connection
from popgate.api.problems import RequestTimeout
from popgate.api.scope_keys import VISIT
from popgate.api.usage import Usage, check_topic_limit
from popgate.domain.errors import Forbidden, Unauthenticated
from popgate.domain.permissions import Action, Caller, Permit, Resource, permit_all
from popgate.engine.catalog.topics import Topics
from popgate.engine.lease.pop_request import Presence

_CHANGES = (Action.CREATE, Action.ADMIN)


class Visit:
    """One request of ``caller``. The gate ends the visit if the caller loses its credential or the permission.

    ``usage`` is None for a request that another proxy has forwarded: that proxy enforces the caller's limits. ``note``
    records in the audit log that a further action was not permitted.
    """

    __slots__ = (
        *("_note", "_topics", "access", "caller", "connection", "created", "ended", "held_bytes"),
        *("is_cut", "is_done", "is_parked", "is_recorded", "is_streaming", "resource", "usage"),
    )

    def __init__(
        self,
        caller: Caller,
        access: Access,
        resource: Resource | None,
        connection: Connection | None,
        usage: Usage | None,
        topics: Callable[[], Iterable[str]],
        note: Callable[["Visit", Action, Resource], None],
    ) -> None:
        self.caller = caller
        self.access = access
        self.resource = resource
        self.connection = connection
        self.usage = usage
        self.ended: Unauthenticated | Forbidden | None = None
        """Why the visit has ended."""
        self.is_parked = False
        self.held_bytes = 0
        self._topics = topics
        self._note = note
        self.is_recorded = self.is_streaming = False
        """Whether the audit log has the outcome of this request, and whether a streamed answer has begun."""
        self.is_done = self.is_cut = False
        """Whether the request was carried out, and whether its client has left before its whole body had arrived."""
        self.created: list[Resource] = []
        """What the request creates by use, if it is carried out."""

    def check(self) -> None:
        """Raises: Unauthenticated or Forbidden if the visit has ended."""
        if self.ended is not None:
            raise self.ended

    def park(self) -> None:
        """Record that the request is about to wait. Raises: LimitExceeded, and the errors of ``check``."""
        self.check()
        if self.usage is not None and not self.is_parked:
            self.usage.check_parked()
            self.usage.parked += 1
            self.is_parked = True

    def permit(self, action: Action, resource: Resource) -> None:
        """Check another action that the request needs, at the moment when it is done.

        Raises: Forbidden; LimitExceeded; those of ``check``; RequestTimeout if the client has left before a change, so
        that its changes don't keep others waiting.
        """
        self.check()
        if action in _CHANGES and self.connection is not None and self.connection.gone:
            raise RequestTimeout("the client has disconnected before this could be changed")
        try:
            self.caller.require(action, resource)
        except Forbidden:
            self._note(self, action, resource)
            raise
        if action is Action.CREATE and resource.group is None and self.usage is not None:
            check_topic_limit(self.caller.principal, self._topics)
        if action is Action.CREATE and not self.access.is_change:
            self.created.append(resource)

    def own_name(self, name: str) -> str:
        """Return ``name`` in a form that the names of other principals never have."""
        return f"{self.caller.principal.name}\n{name}"

    def end(self, why: Unauthenticated | Forbidden) -> None:
        """End the visit: if the request waits, it stops waiting. A streamed answer is cut off. A request that is being
        carried out is completed."""
        self.ended = why
        if self.connection is None:
            return
        if self.connection.presence is not None:
            self.connection.presence.leave()
        if self.is_streaming:  # it may wait for a client that reads slowly
            self.connection.transport.abort()


def visit_of(scope: Mapping[str, Any]) -> Visit | None:
    """Return the visit of a request, or None if this proxy does not authenticate callers."""
    visit: Visit | None = scope.get(VISIT)
    return visit


class Sight:
    """What the caller of a request may see and do. Without authentication, this is everything."""

    def __init__(self, visit: Visit | None) -> None:
        self._visit = visit

    @property
    def permit(self) -> Permit:
        """The check for actions that depend on what exists, or on the body of the request."""
        return permit_all if self._visit is None else self._visit.permit

    def sees(self, resource: Resource) -> bool:
        """Return whether a list may show the resource to the caller."""
        return self.may(Action.INSPECT, resource)

    def may(self, action: Action, resource: Resource) -> bool:
        """Return whether the caller has a permission. Without it, nothing is recorded."""
        return self._visit is None or self._visit.caller.principal.may(action, resource)

    def park_behind(self, topics: Topics) -> None:
        """Record that a change waits, if another change of topics or groups is in progress.

        Raises: LimitExceeded, and the errors of ``Visit.check``.
        """
        if self._visit is not None and topics.is_changing:
            self._visit.park()

    @contextmanager
    def waiting(self, stop: Callable[[], None]) -> Generator[None]:
        """Within the context, the request waits. ``stop`` is called if it must stop waiting, because its client or its
        permission has gone. Raises: LimitExceeded, and at the end of the context, the errors of ``Visit.check``."""
        visit = self._visit
        if visit is None or visit.connection is None:
            yield
            return
        visit.park()
        presence = visit.connection.presence = Presence()
        presence.on_leave = stop
        try:
            yield
        finally:
            visit.connection.presence = None
        visit.check()


def _sight(request: Request) -> Sight:
    return Sight(visit_of(request.scope))


SightOfCaller = Annotated[Sight, Depends(_sight)]
"""The type of an argument of a FastAPI route that needs the ``Sight`` of its caller."""
