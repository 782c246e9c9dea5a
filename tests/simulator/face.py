"""Client requests to a proxy, and pops forwarded from one proxy to another: the part of ``api`` without HTTP.

Each request runs in the proxy's process. Answers are those of the HTTP interface, as far as the audit reads them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from popgate.domain.dead_letter import dead_letter_details
from popgate.domain.errors import (
    Conflict,
    GroupNotFound,
    PeerUnavailable,
    PopgateError,
    RetryLater,
    TooManyInFlight,
    TopicNotFound,
)
from popgate.domain.names import CopyId, InstanceId, TopicName
from popgate.engine.cluster.remote_pops import PeerPop
from popgate.engine.dead_letters.dead_pages import PageRequest
from popgate.engine.dead_letters.redriving import LetterChoice, RedriveOrder
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.publish.publishing import NewMessage
from popgate.engine.settle.orders import SettleOrder, Verb
from simulator.network import Answered, Network
from simulator.peers import ANSWER_SECONDS, SimulatedPeers
from simulator.processes import Process
from support.audit import Audit
from support.engines import filtered

LETTERS_PER_PAGE = 64


class Served(Protocol):
    """A proxy, as clients and other proxies see it."""

    @property
    def me(self) -> InstanceId: ...
    @property
    def process(self) -> Process: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def peers(self) -> SimulatedPeers: ...


_Answer = dict[str, Any]


class Face:
    """The requests of one group of one topic. ``proxies``: all since the start of the run, by instance."""

    def __init__(
        self, topic: str, group: str, audit: Audit, network: Network, proxies: Mapping[InstanceId, Served]
    ) -> None:
        self.topic = topic
        self._group = group
        self._audit = audit
        self._network = network
        self._proxies = proxies

    async def publish(self, proxy: Served, messages: Sequence[Mapping[str, Any]]) -> Answered[_Answer]:
        new = [
            NewMessage(
                one["body"].encode(),
                one.get("headers", {}),
                message_id=one["message_id"],
                ordering_key=one.get("ordering_key"),
                dedup_id=one.get("dedup_id"),
                delay_seconds=one.get("delay_seconds", 0.0),
                ttl_seconds=one.get("ttl_seconds"),
            )
            for one in messages
        ]
        results = await proxy.engine.publish(self.topic, new)
        return Answered({"results": [{"status": one.status} for one in results]})

    async def pop(self, proxy: Served, asked: Mapping[str, Any], presence: Presence) -> Answered[_Answer]:
        wanted = asked.get("filter")
        request = PopRequest(
            max_messages=asked["max_messages"],
            wait_seconds=asked["wait_seconds"],
            invisibility_seconds=asked["invisibility_seconds"],
            attempt_id=asked.get("attempt_id"),
            selection=filtered(wanted and {name: [value] for name, value in wanted.items()}),
        )
        forward = partial(self._forward, proxy, request)
        found = await proxy.engine.pop_anywhere(self.topic, self._group, request, presence, forward)
        if isinstance(found, PopgateError):
            raise found
        undo = None if request.attempt_id is not None else partial(self._abandon, proxy, found)
        if presence.gone and undo is not None:
            undo()
        return Answered({"messages": [_shown(one) for one in found]}, undo)

    async def _forward(
        self, proxy: Served, request: PopRequest, to: InstanceId
    ) -> PeerPop[Sequence[Leased] | PopgateError]:
        """As ``api.forwarded_pops``. An answer that is an error is the client's."""
        address = proxy.peers.address(to)
        other, presence = self._proxies[to], Presence()

        async def work() -> Answered[tuple[list[Leased], int]]:
            arrivals = other.engine.arrivals(self.topic, self._group)
            leased = await other.engine.pop(self.topic, self._group, replace(request, wait_seconds=0.0), presence)
            undo = None if request.attempt_id is not None else partial(self._abandon, other, leased)
            return Answered((leased, arrivals), undo)

        # If its answer is lost, it may have leased messages unknown to all, and the client's pop continues elsewhere.
        asked = self._audit.popping(f"{proxy.me} for a client", request.invisibility_seconds or 0.0)
        try:
            leased, arrivals = await self._network.exchange(
                address.listening, work, seconds=ANSWER_SECONDS, asker=proxy.process, leave=presence.leave
            )
        except ConnectionRefusedError as error:
            self._audit.not_popped(asked)
            raise PeerUnavailable(f"proxy {to} is not there") from error
        except OSError as error:  # TimeoutError is a subclass
            raise PeerUnavailable(f"proxy {to} can't be reached: {error}") from error
        except TooManyInFlight:
            self._audit.not_popped(asked)
            raise
        except (TopicNotFound, GroupNotFound) as error:
            raise PeerUnavailable(f"proxy {to} does not know of this group yet") from error
        except PopgateError as error:
            if error.code == RetryLater.code:
                raise PeerUnavailable(f"proxy {to} is about to leave") from error
            return PeerPop(error, None)
        self._audit.not_popped(asked)
        return PeerPop(leased, None if leased else arrivals)

    def _abandon(self, proxy: Served, leased: Sequence[Leased]) -> None:
        if leased:
            proxy.engine.abandon_soon(self.topic, self._group, [one.receipt_handle for one in leased])

    async def settle(self, proxy: Served, verb: str, asked: Mapping[str, Any]) -> Answered[_Answer]:
        orders = [SettleOrder(handle) for handle in asked.get("receipt_handles", ())]
        for entry in asked.get("entries", ()):
            seconds = entry.get("delay_seconds", entry.get("invisibility_seconds"))
            orders.append(SettleOrder(entry["receipt_handle"], seconds))
        results = await proxy.engine.settle(self.topic, self._group, Verb(verb), orders)
        return Answered({"results": [{"status": one.status} for one in results]})

    async def state(self, proxy: Served) -> Answered[_Answer]:
        status = await proxy.engine.status(self.topic, self._group)
        shown = {"ready": status.ready, "in_flight": status.in_flight, "delayed": status.delayed, "dead": status.dead}
        return Answered(shown)

    async def dead_letters(self, proxy: Served, after: str | None) -> Answered[_Answer]:
        return await self._at_their_owner(proxy, lambda owner: self._letters(owner, after))

    async def _at_their_owner(
        self, proxy: Served, work: Callable[[Served], Awaitable[Answered[_Answer]]]
    ) -> Answered[_Answer]:
        """Ask the proxy that owns the dead letters. Raises: PeerUnavailable."""
        to = proxy.engine.dead_letters_at(self.topic, self._group)
        if to is None:
            return await work(proxy)
        to_owner = proxy.peers.address(to).listening
        try:
            answer = await self._network.exchange(
                to_owner, partial(work, self._proxies[to]), seconds=ANSWER_SECONDS, asker=proxy.process
            )
        except OSError as error:
            raise PeerUnavailable(f"proxy {to} can't be reached: {error}") from error
        return Answered(answer)

    async def redrive(self, proxy: Served, asked: Mapping[str, Any]) -> Answered[_Answer]:
        return await self._at_their_owner(proxy, lambda owner: self._redrive(owner, asked))

    async def _redrive(self, proxy: Served, asked: Mapping[str, Any]) -> Answered[_Answer]:
        order = RedriveOrder(
            choice=LetterChoice(),
            target_topic=TopicName(asked["target_topic"]),
            rate_per_second=asked.get("rate_per_second"),
        )
        try:
            redrive = proxy.engine.redrive(self.topic, self._group, order)
        except Conflict:
            return Answered({"state": "conflict"})
        with suppress(TimeoutError):
            async with asyncio.timeout(asked["wait_seconds"]):
                await redrive.ended.wait()
        return Answered({"state": str(redrive.state)})

    async def _letters(self, proxy: Served, after: str | None) -> Answered[_Answer]:
        served = proxy.engine.topics.subscription(self.topic, self._group)
        request = PageRequest(max_messages=LETTERS_PER_PAGE, after=None if after is None else CopyId(after))
        page = await served.dead_letters.page(request)
        letters: list[_Answer] = []
        for shown in page.letters:
            message = shown.letter.message
            note = dead_letter_details(message.headers)
            letters.append(
                {
                    "message_id": message.message_id,
                    "id": shown.letter.copy_id,
                    "cause": note.cause,
                    "delivery_count": note.delivery_count,
                }
            )
        return Answered({"messages": letters} | ({} if page.next is None else {"next": page.next}))


def _shown(one: Leased) -> _Answer:
    return {
        "message_id": one.message_id,
        "receipt_handle": one.receipt_handle,
        "delivery_count": one.delivery_count,
        "body": one.message.body.decode(),
    }
