"""Forwards pops to other owners of a subscription's queues if this proxy's own queues have no messages for them.

Theory of operation. A pop first tries the queues that this proxy owns. It is then forwarded to the other owners, one
after the other, until one of them has messages. A forwarded pop is not forwarded again. A pop that still has no message
waits on this proxy, and this proxy asks every other owner to report when it has messages (``Wanted``). When such an
owner has messages, it reports once (``Available``), and one waiting pop is forwarded to it. If this pop gets messages,
the next waiting pop is forwarded, too, because the owner may have more messages. Proxies without messages and pops
exchange nothing.

Most forwarded pops with filters find no suitable message, and then the next pop with a filter is forwarded. Therefore
pops with filters wait in a separate line, and only a few of them are forwarded at a time. Other pops don't wait for
them.

While this proxy has a backlog, messages at other proxies must not starve. Therefore some pops try the other proxies
first, if messages wait there for longer than here (``other_backlogs``). The share of these pops is at most the share of
the subscription's queues that the other proxies own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from popgate.domain.errors import PeerUnavailable, PopgateError, TooManyInFlight
from popgate.domain.message import Message
from popgate.domain.names import InstanceId, Subscription
from popgate.engine.cluster.other_backlogs import POPPED_HERE_SECONDS, OtherBacklogs
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.peers import Wanted

AnswerT = TypeVar("AnswerT")

WANTED_SECONDS = 30.0
"""Seconds after a ``Wanted`` message during which its receiver reports messages."""
LOOK_SECONDS = 2.0
"""Seconds after which a waiting pop checks whether the owners of the queues have changed."""
LOOKING_TOGETHER = 100
"""Number of waiting pops above which each of them checks the owners less often. One pop's check serves all pops."""
CHOOSY_AT_ONCE = 8
"""Maximum number of pops with filters that this proxy forwards at the same time. These pops delay other pops at both
proxies. With 32, another pop takes twice as long as without them; with 8, less than 1.5 times."""
CHOOSY_SECONDS_MIN = 1.0
"""Seconds that a pop with a filter may wait until it can be forwarded, even if its own wait time is shorter."""


class PeerPop(NamedTuple, Generic[AnswerT]):
    """The answer of another proxy to a forwarded pop.

    ``arrivals`` is None if the answer contains messages or an error. Otherwise it is the other proxy's arrival count
    (``Serving.arrivals``): no message that had arrived there until then was available to the pop. ``waited_seconds``:
    how long the first message of the answer had waited, if the other proxy reports it (``other_backlogs``).
    """

    answer: AnswerT
    arrivals: int | None
    waited_seconds: float | None = None


Forward: TypeAlias = Callable[[InstanceId], Awaitable[PeerPop[AnswerT]]]
"""Forwards a pop to the given proxy, which answers at once, also without a message. Raises: PeerUnavailable."""


class _Parked:
    """A pop that waits until this proxy or another owner has messages. ``wake`` ends the wait."""

    def __init__(self, *, is_choosy: bool) -> None:
        self.is_choosy = is_choosy
        self.presence = Presence()
        self.call: InstanceId | None = None
        """The owner to which the pop must be forwarded after the wait, because it has messages; None: no owner."""

    def wake(self, member: InstanceId) -> None:
        self.call = member
        self.presence.leave()


class _OtherOwners:
    """What this proxy knows of the other owners of one subscription's queues, and the pops that wait for them."""

    def __init__(self) -> None:
        self.stocked: dict[InstanceId, None] = {}
        """The owners that are believed to have messages."""
        self.seen: dict[InstanceId, int] = {}
        """The latest arrival count that each owner has returned instead of a message."""
        self.wanted_until: dict[InstanceId, float] = {}
        self.plain: dict[_Parked, None] = {}
        self.choosy: dict[_Parked, None] = {}
        """Waiting pops with filters. Most of them receive no message when they are forwarded."""
        self.attempts: dict[str, _Pop[Any]] = {}
        self.turn = 0
        self.backlogs = OtherBacklogs()
        self.popped_here_at = -inf
        """When a client of this proxy last got messages of this proxy."""

    def parked(self, *, choosy: bool) -> dict[_Parked, None]:
        return self.choosy if choosy else self.plain

    def wake(self, member: InstanceId, *, choosy_only: bool = False) -> None:
        """Forward the longest-waiting pop without a filter, and the longest-waiting pop with a filter, to ``member``.

        If ``choosy_only`` is True, forward only the pop with a filter.
        """
        for line in (self.choosy,) if choosy_only else (self.plain, self.choosy):
            parked = next((one for one in line if one.call is None), None)
            if parked is not None:
                parked.wake(member)


class RemotePops:
    """Answers the pops of all subscriptions, from the queues of this proxy or by forwarding them to other proxies."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._other_owners: dict[Subscription, _OtherOwners] = {}
        self._choosy_places = asyncio.Semaphore(CHOOSY_AT_ONCE)

    async def pop(
        self, served: ServedSubscription, request: PopRequest, presence: Presence, forward: Forward[AnswerT]
    ) -> list[Leased] | AnswerT:
        """Return the messages leased on this proxy, or another proxy's answer. Raises the errors of ``Pops.pop``."""
        if not self._context.router.others(served.layout):
            return await served.pops.pop(request, presence)
        owners = self._other_owners.setdefault(served.name, _OtherOwners())
        if request.selection.is_choosy:
            forward = self._in_turn(request, forward)
        pop = _Pop(self._context, served, owners, request, presence, forward)
        if request.attempt_id is None:
            return await pop.run()
        while (earlier := owners.attempts.get(request.attempt_id)) is not None:
            await earlier.superseded()
        owners.attempts[request.attempt_id] = pop
        try:
            return await served.pops.repeated(request.attempt_id) or await pop.run()
        finally:
            del owners.attempts[request.attempt_id]
            pop.ended.set()

    def _in_turn(self, request: PopRequest, forward: Forward[AnswerT]) -> Forward[AnswerT]:
        """Return ``forward`` with a delay until fewer than ``CHOOSY_AT_ONCE`` pops with filters are being forwarded."""

        async def forwarding(member: InstanceId) -> PeerPop[AnswerT]:
            try:
                async with asyncio.timeout(max(request.wait_seconds, CHOOSY_SECONDS_MIN)):
                    await self._choosy_places.acquire()
            except TimeoutError as error:
                raise PeerUnavailable("too many pops with filters are being passed on to other proxies") from error
            try:
                return await forward(member)
            finally:
                self._choosy_places.release()

        return forwarding

    def waited_seconds(self, subscription: Subscription, message: Message) -> float | None:
        """Return how long a message that was handed out to a forwarded pop had waited.

        Return None if it is unknown, or if no clients of this proxy take messages of the subscription: then the other
        proxies must forward all pops that they can.
        """
        owners, clock = self._other_owners.get(subscription), self._context.clock
        if owners is None or message.waiting_since <= 0:
            return None
        if clock.monotonic() - owners.popped_here_at > POPPED_HERE_SECONDS:
            return None
        return max(0.0, clock.wall() - message.waiting_since)

    def available(self, member: InstanceId, subscription: Subscription) -> None:
        """Record that ``member`` has reported messages for the subscription, and forward waiting pops to it."""
        owners = self._other_owners.get(subscription)
        if owners is not None:
            owners.wanted_until.pop(member, None)
            owners.stocked[member] = None
            owners.wake(member)


class _Pop(Generic[AnswerT]):
    """A pop in progress. ``briefly`` and ``patiently`` return None if no message is found."""

    def __init__(
        self,
        context: EngineContext,
        served: ServedSubscription,
        owners: _OtherOwners,
        request: PopRequest,
        presence: Presence,
        forward: Forward[AnswerT],
    ) -> None:
        self._context = context
        self._served = served
        self._owners = owners
        self._request = request
        self._presence = presence
        self._forward = forward
        self._full: TooManyInFlight | None = None
        self._seen: dict[InstanceId, int] = {}
        """The latest arrival count that each owner has returned to this pop instead of a message."""
        self._parked: _Parked | None = None
        self._is_superseded = False
        self.ended = asyncio.Event()

    async def run(self) -> list[Leased] | AnswerT:
        self._served.pops.check_mode(self._request)
        found = await (self.briefly() if self._request.wait_seconds <= 0 else self.patiently())
        return [] if found is None else found

    async def superseded(self) -> None:
        """End this pop, and wait until it has ended. The client repeats it, so its connection is probably dead."""
        self._is_superseded = True
        if self._parked is not None:
            self._parked.presence.leave()
        await self.ended.wait()

    async def briefly(self) -> list[Leased] | AnswerT | None:
        """Pop without waiting, from the queues of this proxy or from another owner that has messages now."""
        tried: set[InstanceId] = set()
        if self._is_others_turn():
            found = await self._try([*self._owners.stocked], tried)
            if found is not None:
                return found
        if any(host.is_owned for host in self._served.hosts):
            leased = await self._here(0.0, self._presence)
            if leased or self._presence.gone:
                return leased
        found = await self._try([one for one in self._others() if one not in tried], tried)
        if found is None and self._full is not None:
            raise self._full
        return found

    async def patiently(self) -> list[Leased] | AnswerT | None:
        """Pop from this proxy or another owner, and wait until a message is found or the wait time is over."""
        deadline = self._context.clock.monotonic() + self._request.wait_seconds
        parked = _Parked(is_choosy=self._request.selection.is_choosy)
        while not self._is_unwanted():
            if not self._is_others_turn() and self._served.serving.can_give(self._request, deadline):
                leased = await self._here(0.0, self._presence)
                if leased:
                    return leased
            call = parked.call
            parked = _Parked(is_choosy=self._request.selection.is_choosy)
            members = [one for one in self._others() if one == call or self._has_news(one)]
            if members:
                self._full = None
            found = await self._try(members, set())
            if found is not None:
                return found
            left = deadline - self._context.clock.monotonic()
            if left <= 0 or self._served.is_closed or self._is_unwanted():
                break
            if any(self._has_news(one) for one in self._others()):
                continue
            together = len(self._owners.parked(choosy=parked.is_choosy)) / LOOKING_TOGETHER
            leased = await self._park(parked, min(left, LOOK_SECONDS * max(1.0, together)))
            if leased:
                return leased
        if self._full is not None and not self._presence.gone:
            raise self._full
        return None

    def _is_unwanted(self) -> bool:
        return self._presence.gone or self._is_superseded

    def _has_news(self, member: InstanceId) -> bool:
        """Whether ``member`` may have messages for which this pop was not forwarded yet."""
        owners = self._owners
        return member in owners.stocked or owners.seen.get(member, 0) > self._seen.get(member, -1)

    def _is_others_turn(self) -> bool:
        hosts = self._served.hosts
        self._owners.turn += 1
        is_turn = self._owners.turn % len(hosts) >= sum(host.is_owned for host in hosts)
        if not (is_turn and self._owners.stocked):
            return False
        here_since = self._here_since()
        return any(self._owners.backlogs.is_behind(member, here_since) for member in self._owners.stocked)

    def _here_since(self) -> float | None:
        """Return since when this proxy's first message has waited (monotonic); None if there is none, or if it is
        unknown."""
        first, clock = self._served.serving.ready.first(), self._context.clock
        if first is None or first.message is None or first.message.waiting_since <= 0:
            return None
        return clock.monotonic() - max(0.0, clock.wall() - first.message.waiting_since)

    def _others(self) -> Sequence[InstanceId]:
        """Return the other owners: first those that are believed to have messages, and otherwise in rotating order."""
        others = self._context.router.others(self._served.layout)
        start = self._owners.turn % len(others) if others else 0
        return sorted([*others[start:], *others[:start]], key=lambda one: one not in self._owners.stocked)

    async def _here(self, wait_seconds: float, presence: Presence) -> list[Leased]:
        try:
            leased = await self._served.pops.pop(replace(self._request, wait_seconds=wait_seconds), presence)
            if leased:
                self._owners.popped_here_at = self._context.clock.monotonic()
            return leased
        except TooManyInFlight as error:  # other owners may have messages
            self._full = error
            return []

    async def _park(self, parked: _Parked, seconds: float) -> list[Leased]:
        owners, presence = self._owners, self._presence
        self._parked = parked
        line = owners.parked(choosy=parked.is_choosy)
        line[parked] = None
        presence.on_leave = parked.presence.leave
        try:
            for member in self._context.router.others(self._served.layout):
                self._want(member, seconds)
            return await self._here(seconds, parked.presence)
        finally:
            presence.on_leave = self._parked = None
            del line[parked]
            if parked.call is not None:
                owners.stocked[parked.call] = None

    async def _try(self, members: Sequence[InstanceId], tried: set[InstanceId]) -> AnswerT | None:
        """Forward the pop to one of ``members`` after the other, until one of them has messages."""
        owners = self._owners
        for member in members:
            tried.add(member)
            before = owners.seen.get(member, 0)
            passed = await self._forwarded_to(member)
            if passed is not None and passed.arrivals is None:
                owners.stocked[member] = None
                owners.backlogs.heard(member, passed.waited_seconds, self._context.clock.monotonic())
                owners.wake(member)
                return passed.answer
            owners.stocked.pop(member, None)
            seen = owners.seen.get(member, 0)
            arrivals = self._seen[member] = seen if passed is None or passed.arrivals is None else passed.arrivals
            latest = arrivals if seen == before else max(arrivals, seen)  # a later pop may have got its answer earlier
            if latest != seen:
                owners.seen[member] = latest
                if self._request.selection.is_choosy:  # the new messages may suit another pop
                    owners.wake(member, choosy_only=True)
            if self._presence.gone:
                break
        return None

    async def _forwarded_to(self, member: InstanceId) -> PeerPop[AnswerT] | None:
        """Forward the pop to ``member``. If the client disconnects, cancel the request. ``member`` notices this."""
        self._context.router.forwarded[member] += 1
        forwarding = asyncio.ensure_future(self._forward(member))
        self._presence.on_leave = lambda: _cancel(forwarding)
        try:
            return await forwarding
        except TooManyInFlight as error:
            self._full = error
            return None
        except PeerUnavailable:
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._presence.gone and task is not None and not task.cancelling():
                return None
            raise
        finally:
            self._presence.on_leave = None

    def _want(self, member: InstanceId, seconds: float) -> None:
        """Ask ``member`` to report when it has messages, unless an earlier request covers the next ``seconds``."""
        now = self._context.clock.monotonic()
        if self._owners.wanted_until.get(member, 0.0) < now + seconds:
            self._owners.wanted_until[member] = now + WANTED_SECONDS
            self._context.background.spawn(self._tell_wanted(member), name=f"want of {member}")

    async def _tell_wanted(self, member: InstanceId) -> None:
        owners, name = self._owners, self._served.name
        message = Wanted(subscription=name, seconds=WANTED_SECONDS, since=owners.seen.get(member, 0))
        try:
            is_there = await self._context.router.ask(member, message)
        except PopgateError:
            owners.wanted_until.pop(member, None)
            return
        if is_there:
            owners.wanted_until.pop(member, None)
            owners.stocked[member] = None
            owners.wake(member)


def _cancel(forwarding: "asyncio.Future[Any]") -> None:
    forwarding.cancel()
