"""Serves the state of a subscription: its messages now, and what has happened to its messages so far.

The numbers of messages come from the owners of the queues. Every proxy of a cluster counts the events that it carries
out itself, so the counts of all proxies are added up: this proxy asks the others with the same request, which they
answer with their own counts only. The counts of a proxy that does not answer are missing. They start at 0 when a proxy
starts.
"""

import asyncio
from collections.abc import Iterator, Sequence

from msgspec import DecodeError, Struct, json
from msgspec.structs import asdict

from popgate.api import answers
from popgate.api.forwarding import forwarded_request
from popgate.api.native import policy_state
from popgate.api.paths import GROUP
from popgate.api.request_ids import id_headers
from popgate.api.routes import Call, Route
from popgate.domain.errors import PopgateError
from popgate.domain.names import InstanceId
from popgate.engine.engine import Engine
from popgate.engine.publish.publishing import publishers_of
from popgate.journal.counters import OTHER, EventCounters
from popgate.ports.journal import EventKind
from popgate.ports.peers import ForwardedRequest, Peers
from popgate.runtime.current_request import carried

_OK = 200
_DONE = (EventKind.ACKED, EventKind.DEAD_LETTERED, EventKind.DISCARDED)
"""The events with which a message is done. A rejected message is dead-lettered, too."""


class CountsHere(Struct, kw_only=True):
    """What one proxy has counted for a subscription. The counts are None if the group has no counts of its own."""

    pollers: int = 0
    polls_count: int = 0
    published_count: int | None = None
    delivered_count: int | None = None
    settled_count: int | None = None
    expired_count: int | None = None
    redelivered_count: int | None = None
    dead_lettered_count: int | None = None


class SubscriptionStates:
    """The handler for the state of a subscription. ``peers`` are the other proxies of a cluster, or None."""

    def __init__(self, engine: Engine, counters: EventCounters, peers: Peers | None = None) -> None:
        self._engine = engine
        self._counters = counters
        self._peers = peers

    def routes(self) -> Iterator[Route]:
        """Return the route."""
        yield Route("state", "GET", GROUP, self.state, query=None)

    async def state(self, call: Call) -> bytes:
        """Return the state of a subscription, or this proxy's counts if another proxy asks."""
        topic, group = call.path
        here = self._counts_here(topic, group)
        if call.forwarding is not None:
            return call.form.encode(here)
        status, others = await asyncio.gather(carried(self._engine.status(topic, group)), self._counts_elsewhere(call))
        policy = self._engine.topics.subscription(topic, group).spec.policy
        return call.form.encode(
            answers.SubscriptionState(
                mode=status.mode,
                ready=status.ready,
                in_flight=status.in_flight,
                backlog=status.ready + status.in_flight,
                delayed=status.delayed,
                blocked=status.blocked,
                dead=status.dead,
                oldest_age_seconds=status.oldest_age_seconds,
                **asdict(_sum([here, *others])),
                queues=[answers.QueueState(**queue._asdict()) for queue in status.queues],
                policy=policy_state(policy),
            )
        )

    def _counts_here(self, topic: str, group: str) -> CountsHere:
        """Return the counts of this proxy. Raises: TopicNotFound, GroupNotFound."""
        served = self._engine.topics.subscription(topic, group)
        name, counts = served.name, self._counters.counts
        here = CountsHere(pollers=served.parked_pops, polls_count=served.polls)
        if self._counters.named(name) == OTHER:
            return here
        timings = self._counters.timings.get(name)
        here.published_count = counts.get((EventKind.PUBLISHED, publishers_of(name.topic)), 0)
        here.delivered_count = counts.get((EventKind.DELIVERED, name), 0)
        here.settled_count = sum(counts.get((kind, name), 0) for kind in _DONE)
        here.expired_count = counts.get((EventKind.EXPIRED, name), 0)
        here.redelivered_count = 0 if timings is None else timings.redelivered_count
        here.dead_lettered_count = counts.get((EventKind.DEAD_LETTERED, name), 0)
        return here

    async def _counts_elsewhere(self, call: Call) -> list[CountsHere]:
        if self._peers is None or call.scope is None:
            return []
        request = forwarded_request(call.scope, b"", id_headers(call.scope["headers"]))
        members = self._engine.other_members()
        return await asyncio.gather(*(_ask(self._peers, member, request) for member in members))


async def _ask(peers: Peers, member: InstanceId, request: ForwardedRequest) -> CountsHere:
    try:
        answer = await peers.forward(member, request, wait_seconds=0.0)
        return _read(answer.body) if answer.status == _OK else CountsHere()
    except (PopgateError, DecodeError):
        return CountsHere()


_read = json.Decoder(CountsHere).decode


def _sum(many: Sequence[CountsHere]) -> CountsHere:
    """Add up the counts of several proxies. A count that no proxy has is None."""
    found: dict[str, int | None] = {}
    for name in CountsHere.__struct_fields__:
        known = [count for one in many if (count := getattr(one, name)) is not None]
        found[name] = sum(known) if known else None
    return CountsHere(**found)  # type: ignore[arg-type]
