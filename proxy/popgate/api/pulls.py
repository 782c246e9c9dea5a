"""Serves pull clients over HTTP (decision 11): assignment, pull, commit, leave.

Below, ``S`` is ``/v1/topics/{topic}/groups/{group}``. This module defines the paths below ``S/assignment`` and
``S/queues``. It forwards each request to the proxy that must answer: the owner of the queue or, for assignments, the
owner of the first queue. If the owner changes during a request, the request is sent to the new owner, because all these
requests may be repeated. This module makes no decisions: the engine does.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial

from msgspec import UNSET

from popgate.api import answers
from popgate.api import pull_models as models
from popgate.api.asked import whole
from popgate.api.formats import Reader
from popgate.api.forwarding import forward_request, forwarded_request, is_refused_for_now
from popgate.api.message_encoder import MessageEncoder
from popgate.api.paths import GROUP
from popgate.api.problems import NotFound
from popgate.api.routes import Call, Route
from popgate.domain.errors import PeerUnavailable
from popgate.domain.names import QUEUES_MAX, client_name
from popgate.domain.topics import ConsumeMode
from popgate.engine.context.routing import while_owners_change
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased, Presence
from popgate.engine.pull.pulling import PullOrder
from popgate.ports.peers import ForwardedAnswer, Peers

SEGMENTS = frozenset({"assignment", "queues"})

_ASSIGNMENT, _PULL, _COMMIT = Reader(models.AssignmentRequest), Reader(models.PullRequest), Reader(models.CommitRequest)
_NUMBER = re.compile(r"[0-9]{1,3}")


class PullHandlers:
    """The handlers for the pull clients of one engine. ``peers`` sends requests to the other proxies of a cluster."""

    def __init__(self, engine: Engine, peers: Peers | None) -> None:
        self._engine = engine
        self._pulls = engine.pulls
        self._peers = peers

    def routes(self) -> Iterator[Route]:
        """Return the routes of pull clients."""
        yield Route("assignment", "POST", f"{GROUP}/assignment", self.assign)
        yield Route("assignment_leave", "DELETE", f"{GROUP}/assignment/{{}}", self.leave)
        yield Route("pull", "POST", f"{GROUP}/queues/{{}}/pull", self.pull)
        yield Route("commit", "POST", f"{GROUP}/queues/{{}}/commit", self.commit)

    async def assign(self, call: Call) -> bytes | ForwardedAnswer:
        (topic, group), form = call.path, call.form
        asked = _ASSIGNMENT.read(call.body, form.packed)
        client = client_name(asked.client_id)
        supports = [ConsumeMode(mode) for mode in dict.fromkeys(asked.supports)]
        shown = None if asked.generation is UNSET else whole(asked.generation, "generation")

        async def here(_: float) -> bytes:
            told = await self._pulls.heard(topic, group, client, supports, shown, call.permit)
            return form.encode(models.AssignmentAnswer(**told._asdict()))

        return await self._answered(call, 0, here)

    async def leave(self, call: Call) -> bytes | ForwardedAnswer:
        topic, group, client_id = call.path
        client = client_name(client_id)

        async def here(_: float) -> bytes:
            await self._pulls.left(topic, group, client)
            return call.form.encode(models.AssignmentLeft(True))

        return await self._answered(call, 0, here)

    async def pull(self, call: Call) -> bytes | ForwardedAnswer:
        (topic, group, queue), form, connection, forwarding = call.path, call.form, call.connection, call.forwarding
        number = _number(queue)
        asked = _PULL.read(call.body, form.packed)
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
                if wait_seconds:
                    call.park()
                pulled = await self._pulls.pull(
                    topic, group, number, replace(order, wait_seconds=wait_seconds), presence
                )
            finally:
                if connection is not None:
                    connection.presence = None
            if not pulled:
                call.check()
            return encoder.many(pulled, models.PullAnswer)

        wait_seconds = None if forwarding is None else forwarding.wait_seconds
        return await self._answered(
            call, number, here, (asked.wait_seconds or 0.0) if wait_seconds is None else wait_seconds
        )

    async def commit(self, call: Call) -> bytes | ForwardedAnswer:
        topic, group, queue = call.path
        number = _number(queue)
        asked = _COMMIT.read(call.body, call.form.packed)
        client, generation = client_name(asked.client_id), whole(asked.generation, "generation")

        async def here(_: float) -> bytes:
            committed = await self._pulls.commit(topic, group, number, client, generation, asked.receipt_handle)
            return call.form.encode(models.CommitAnswer(committed))

        return await self._answered(call, number, here)

    async def _answered(
        self, call: Call, number: int, here: Callable[[float], Awaitable[bytes]], wait_seconds: float = 0.0
    ) -> bytes | ForwardedAnswer:
        """Return the answer of the owner of queue ``number``, which may be this proxy. ``here`` answers at this proxy;
        its argument is the maximum number of seconds to wait."""
        scope, peers, until = call.scope, self._peers, self._engine.monotonic() + wait_seconds
        topic, group, *_ = call.path
        if scope is None or peers is None:
            return await here(wait_seconds)

        async def once() -> bytes | ForwardedAnswer:
            left = max(0.0, until - self._engine.monotonic())
            to = self._pulls.owner(topic, group, number)
            if to is None:
                return await here(left)
            if left:
                call.park()
            self._engine.count_forwarded(to)
            request = forwarded_request(scope, call.body, scope["headers"])
            answer = await forward_request(
                peers, to, request, wait_seconds=left, connection=call.connection, visit=call.visit
            )
            if is_refused_for_now(answer):
                raise PeerUnavailable(f"proxy {to} does not own this queue any more")
            return answer

        return await while_owners_change(once)


def _number(queue: str) -> int:
    """Parse a queue's number. Raises: NotFound."""
    if not _NUMBER.fullmatch(queue):
        raise NotFound(f"queues/{queue}")
    return min(int(queue), QUEUES_MAX)


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
