"""Defines the routing table of the data plane, which maps a method and a path to a handler, and the arguments of a
handler."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from starlette.types import Scope

from popgate.api.connection import Connection
from popgate.api.formats import Format
from popgate.api.paths import PathTree
from popgate.api.requests import SMALL_REQUEST_BYTES_MAX, WAITING_REQUEST_BYTES_MAX
from popgate.api.scope_keys import Forwarding
from popgate.api.visit import Sight, Visit
from popgate.domain.errors import MessageTooLarge
from popgate.domain.permissions import Permit, Resource
from popgate.ports.peers import ForwardedAnswer


class Call(NamedTuple):
    """A request, as its handler receives it.

    ``path`` contains the values of the parameters in the path, in order: first the topic and the group (if the path
    contains one), or the lock. ``query`` contains the values in the query that the route reads.

    In a cluster, ``forwarding`` is set if another proxy has forwarded the request. ``scope`` is set if this proxy may
    forward the request. ``visit`` is None if this proxy does not authenticate callers.
    """

    path: tuple[str, ...]
    query: Mapping[str, str]
    body: bytes
    form: Format
    connection: Connection | None
    forwarding: Forwarding | None = None
    scope: Scope | None = None
    visit: Visit | None = None

    @property
    def permit(self) -> Permit:
        """The check for actions that depend on what exists, or on the body."""
        return Sight(self.visit).permit

    def sees(self, resource: Resource) -> bool:
        """Return whether a list may show the resource to the caller."""
        return Sight(self.visit).sees(resource)

    def park(self) -> None:
        """Record that the request is about to wait. Raises: Unauthenticated, LimitExceeded, MessageTooLarge."""
        self.check_may_wait()
        if self.visit is not None:
            self.visit.park()

    def check_may_wait(self) -> None:
        """Raises: MessageTooLarge if the body is too large to be kept while the request waits."""
        if len(self.body) > WAITING_REQUEST_BYTES_MAX:
            limit = f"{WAITING_REQUEST_BYTES_MAX >> 10} KiB"
            raise MessageTooLarge(
                f"a request of more than {limit} can't wait; send less, or set wait_seconds to 0", field="wait_seconds"
            )

    def check(self) -> None:
        """Raises: Unauthenticated if the caller has lost its credential or its permission meanwhile."""
        if self.visit is not None:
            self.visit.check()


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer of unknown length, which is sent part by part. If ``parts`` raises, the answer must not be ended
    properly, so that the client notices the interruption."""

    content_type: tuple[bytes, bytes]
    parts: AsyncGenerator[bytes]


Handler: TypeAlias = Callable[[Call], Awaitable[bytes | ForwardedAnswer | Streamed]]
"""Returns the encoded body of an answer with status 200, another proxy's whole answer, or the parts of an answer."""


class Route(NamedTuple):
    """One row of the routing table. ``operation`` is the name of the route in the metrics. ``template`` is the path,
    with {} in place of each parameter.

    ``query`` lists the permitted names in the query. If ``query`` is None, the query of a request is ignored.
    """

    operation: str
    method: str
    template: str
    handler: Handler
    query: tuple[str, ...] | None = ()
    bytes_max: int = SMALL_REQUEST_BYTES_MAX
    """Maximum size of the body."""


class Routes(PathTree[Route]):
    """The routing table of the data plane."""

    def __init__(self, routes: Iterable[Route]) -> None:
        super().__init__((route.method, route.template, route) for route in routes)
