"""Pull clients over HTTP (design: section 3, "Pull fallback"): assignment, pull, commit, leave.

This module owns the paths below ``S/assignment`` and ``S/queues``, and passes requests on to the proxy that has to
answer: the owner of the queue, or of the first queue for assignments. If the owner changes meanwhile, the request
follows it; all these requests may be repeated. It decides nothing.
"""

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from msgspec import UNSET
from starlette.types import Scope

from popgate.api import answers
from popgate.api import pull_models as models
from popgate.api.asked import allow, query_values, whole
from popgate.api.connection import Connection
from popgate.api.formats import Format, Reader
from popgate.api.message_encoder import MessageEncoder
from popgate.api.passing import is_refused_for_now, pass_on_request, passed_answer
from popgate.api.peers import Passed
from popgate.api.problems import NotFound
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import QUEUES_MAX, client_name
from popgate.domain.topics import ConsumeMode
from popgate.engine.context.routing import while_owners_change
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased, Presence
from popgate.engine.pull.pulling import PullOrder
from popgate.ports.peers import PassedAnswer, Peers

SEGMENTS = frozenset({"assignment", "queues"})

_ASSIGNMENT, _PULL, _COMMIT = Reader(models.AssignmentRequest), Reader(models.PullRequest), Reader(models.CommitRequest)
_NUMBER = re.compile(r"[0-9]{1,3}")


class _Way(NamedTuple):
    """The way to answer a request.

    ``scope``: the request may be passed on; None: it was passed on already, or the proxy runs alone. ``wait_seconds``
    overrides the request's own value.
    """

    scope: Scope | None = None
    wait_seconds: float | None = None


_STAYS = _Way()


@dataclass(frozen=True, slots=True)
class PullCall:
    """A handler with the parameters from its path."""

    handler: Callable[[str, str, bytes, Format, Connection | None, _Way], Awaitable[bytes | PassedAnswer]]
    way: _Way = _STAYS

    def by_way_of(self, scope: Scope, passed: Passed | None) -> "PullCall":
        """Return this call for use in a cluster; ``passed`` is set if another proxy has passed it on."""
        return replace(self, way=_Way(scope) if passed is None else _Way(None, passed.wait_seconds))

    async def __call__(
        self, topic: str, group: str, body: bytes, form: Format, connection: Connection | None
    ) -> bytes | PassedAnswer:
        return await self.handler(topic, group, body, form, connection, self.way)


class PullHandlers:
    """The handlers for one engine. ``peers``: the other proxies of a cluster."""

    def __init__(self, engine: Engine, peers: Peers | None) -> None:
        self._engine = engine
        self._pulls = engine.pulls
        self._peers = peers

    def route(self, method: str, parts: Sequence[str], query: bytes) -> tuple[str, PullCall]:
        """Return the operation's name in the metrics, and its handler. ``parts`` begin with one of ``SEGMENTS``.

        Raises: NotFound, MethodNotAllowed, InvalidRequest.
        """
        match parts:
            case ["assignment"]:
                allow(method, "POST")
                return "assignment", PullCall(self.assign)
            case ["assignment", client_id]:
                allow(method, "DELETE")
                query_values(query)
                return "assignment_leave", PullCall(partial(self.leave, client_id))
            case ["queues", number, "pull" | "commit" as verb] if _NUMBER.fullmatch(number):
                allow(method, "POST")
                handler = self.pull if verb == "pull" else self.commit
                return verb, PullCall(partial(handler, min(int(number), QUEUES_MAX)))
            case _:
                raise NotFound("/".join(parts))

    async def assign(
        self, topic: str, group: str, body: bytes, form: Format, connection: Connection | None, way: _Way
    ) -> bytes | PassedAnswer:
        asked = _ASSIGNMENT.read(body, form.packed)
        client = client_name(asked.client_id)
        supports = [ConsumeMode(mode) for mode in dict.fromkeys(asked.supports)]
        shown = None if asked.generation is UNSET else whole(asked.generation, "generation")

        async def here(_: float) -> bytes:
            told = await self._pulls.heard(topic, group, client, supports, shown)
            return form.encode(models.AssignmentAnswer(**told._asdict()))

        return await self._answered(topic, group, 0, here, body, connection, way, 0.0)

    async def leave(
        self,
        client_id: str,
        topic: str,
        group: str,
        body: bytes,
        form: Format,
        connection: Connection | None,
        way: _Way,
    ) -> bytes | PassedAnswer:
        client = client_name(client_id)

        async def here(_: float) -> bytes:
            await self._pulls.left(topic, group, client)
            return form.encode(models.AssignmentLeft(True))

        return await self._answered(topic, group, 0, here, body, connection, way, 0.0)

    async def pull(
        self, number: int, topic: str, group: str, body: bytes, form: Format, connection: Connection | None, way: _Way
    ) -> bytes | PassedAnswer:
        asked = _PULL.read(body, form.packed)
        order = PullOrder(
            client_id=client_name(asked.client_id),
            generation=whole(asked.generation, "generation"),
            max_messages=whole(asked.max_messages or 1.0, "max_messages"),
            after=None if asked.after is UNSET else asked.after,
            answer_bytes=answers.packed_bytes if form.answer_packed else answers.json_bytes,
        )
        encoder = MessageEncoder(
            _packed if form.answer_packed else _in_json,
            form.encode,
            partial(self._engine.message_failed, topic, group),
        )

        async def here(wait_seconds: float) -> bytes:
            presence = Presence()
            if connection is not None:
                connection.presence = presence
                if connection.gone:
                    presence.leave()
            try:
                pulled = await self._pulls.pull(
                    topic, group, number, replace(order, wait_seconds=wait_seconds), presence
                )
            finally:
                if connection is not None:
                    connection.presence = None
            return encoder.many(pulled, models.PullAnswer)

        wait_seconds = (asked.wait_seconds or 0.0) if way.wait_seconds is None else way.wait_seconds
        return await self._answered(topic, group, number, here, body, connection, way, wait_seconds)

    async def commit(
        self, number: int, topic: str, group: str, body: bytes, form: Format, connection: Connection | None, way: _Way
    ) -> bytes | PassedAnswer:
        asked = _COMMIT.read(body, form.packed)
        client, generation = client_name(asked.client_id), whole(asked.generation, "generation")

        async def here(_: float) -> bytes:
            committed = await self._pulls.commit(topic, group, number, client, generation, asked.receipt_handle)
            return form.encode(models.CommitAnswer(committed))

        return await self._answered(topic, group, number, here, body, connection, way, 0.0)

    async def _answered(
        self,
        topic: str,
        group: str,
        number: int,
        here: Callable[[float], Awaitable[bytes]],
        body: bytes,
        connection: Connection | None,
        way: _Way,
        wait_seconds: float,
    ) -> bytes | PassedAnswer:
        """Return the answer of the owner of queue ``number``, which may be this proxy. ``here`` takes the time that
        it may wait."""
        scope, peers, until = way.scope, self._peers, self._engine.monotonic() + wait_seconds
        if scope is None or peers is None:
            return await here(wait_seconds)

        async def once() -> bytes | PassedAnswer:
            left = max(0.0, until - self._engine.monotonic())
            to = self._pulls.owner(topic, group, number)
            if to is None:
                return await here(left)
            self._engine.count_passed_on(to)
            request = pass_on_request(scope, body, scope["headers"])
            answer = await passed_answer(peers, to, request, wait_seconds=left, connection=connection)
            if is_refused_for_now(answer):
                raise PeerUnavailable(f"proxy {to} does not own this queue any more")
            return answer

        return await while_owners_change(once)


def _packed(one: Leased) -> models.PulledMessage:
    message = one.message
    return models.PulledMessage(
        message_id=message.message_id or UNSET,
        receipt_handle=one.receipt_handle,
        body=message.body,
        headers=message.headers,
        ordering_key=UNSET if message.ordering_key is None else message.ordering_key,
        queue=one.queue,
        delivery_count=one.delivery_count,
        published_at=message.published_at or UNSET,
        first_delivered_at=one.first_delivered_at,
    )


def _in_json(one: Leased) -> models.PulledMessage:
    return answers.in_json(_packed(one), one.message.body)
