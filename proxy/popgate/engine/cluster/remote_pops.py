"""Forwards pops that the queues of this proxy can't fill to another owner of the subscription's queues.

Theory of operation. A pop first tries the queues of this proxy, then the owners that are known to have messages, each
by one hop. A pop that waits is parked here, and every other owner is notified that messages are wanted (``Wanted``).
When such an owner has messages, it answers once (``Available``), and one parked pop is forwarded to it. If this pop
receives a message, the next parked pop is forwarded, too, because there may be more messages. Idle proxies exchange no
messages.

Most forwarded pops with filters find no match, and then the next such pop is forwarded. So these pops wait in a
separate line, only a few of them are forwarded at a time, and the other pops don't wait for them.

Messages of other proxies must not starve while this proxy has a backlog. So some pops try the other proxies first: the
same share of pops as the share of queues that the other proxies own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from popgate.domain.errors import PeerUnavailable, PopgateError, TooManyInFlight
from popgate.domain.names import InstanceId, Subscription
from popgate.engine.context.engine_context import EngineContext
from popgate.engine.lease.pop_request import Leased, PopRequest, Presence
from popgate.engine.subscription.subscription import ServedSubscription
from popgate.ports.peers import Wanted

AnswerT = TypeVar("AnswerT")

WANTED_SECONDS = 30.0
"""Seconds for which one ``Wanted`` message is valid."""
LOOK_SECONDS = 2.0
"""Maximum seconds after which a parked pop checks whether the owners of the queues have changed."""
LOOKING_TOGETHER = 100
"""Number of parked pops above which each of them checks less often. All of them benefit from the check of one pop."""
CHOOSY_AT_ONCE = 8
"""Maximum number of pops with filters that are forwarded at one time. Any other pop waits behind the work of all these
at both proxies: with 32 it takes twice as long as without them, with 8 less than 1.5 times."""
CHOOSY_SECONDS_MIN = 1.0
"""Minimum seconds that a pop with a filter may wait for its turn to be forwarded."""


class PeerPop(NamedTuple, Generic[AnswerT]):
    """The answer of another proxy. ``arrivals`` is None if the answer has messages.

    Otherwise ``arrivals`` is the number of arrivals at that proxy that the pop has already checked.
    """

    answer: AnswerT
    arrivals: int | None


Forward: TypeAlias = Callable[[InstanceId], Awaitable[PeerPop[AnswerT]]]
"""Sends this pop to another proxy, which answers without waiting. Raises: PeerUnavailable."""


class _Parked:
    """A pop that waits for messages of this proxy and of other proxies."""

    def __init__(self, *, is_choosy: bool) -> None:
        self.is_choosy = is_choosy
        self.presence = Presence()
        self.call: InstanceId | None = None
        """The proxy that has messages for this pop."""

    def wake(self, member: InstanceId) -> None:
        self.call = member
        self.presence.leave()


class _OtherOwners:
    """This proxy's knowledge of the other owners of one subscription's queues."""

    def __init__(self) -> None:
        self.stocked: dict[InstanceId, None] = {}
        """The owners that have messages."""
        self.seen: dict[InstanceId, int] = {}
        """The number of arrivals at each owner that pops have checked without receiving a message."""
        self.wanted_until: dict[InstanceId, float] = {}
        self.plain: dict[_Parked, None] = {}
        self.choosy: dict[_Parked, None] = {}
        """Pops with filters. Most of them receive no message when they are forwarded."""
        self.attempts: dict[str, _Pop[Any]] = {}
        self.turn = 0

    def parked(self, *, choosy: bool) -> dict[_Parked, None]:
        return self.choosy if choosy else self.plain

    def wake(self, member: InstanceId, *, choosy_only: bool = False) -> None:
        """Let the longest-waiting pop without a filter and the longest-waiting pop with a filter try ``member``."""
        for line in (self.choosy,) if choosy_only else (self.plain, self.choosy):
            parked = next((one for one in line if one.call is None), None)
            if parked is not None:
                parked.wake(member)


class RemotePops:
    """Answers the pops of every subscription, from this proxy's queues or through other proxies."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._other_owners: dict[Subscription, _OtherOwners] = {}
        self._choosy_places = asyncio.Semaphore(CHOOSY_AT_ONCE)

    async def pop(
        self, served: ServedSubscription, request: PopRequest, presence: Presence, forward: Forward[AnswerT]
    ) -> list[Leased] | AnswerT:
        """Return the messages leased here, or another proxy's answer. Raises the errors of ``served.pops.pop``."""
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
        """Delay the forwarding of a pop until fewer than ``CHOOSY_AT_ONCE`` pops with filters are being forwarded."""

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

    def available(self, member: InstanceId, subscription: Subscription) -> None:
        """Note that ``member`` has messages that were wanted."""
        owners = self._other_owners.get(subscription)
        if owners is not None:
            owners.wanted_until.pop(member, None)
            owners.stocked[member] = None
            owners.wake(member)


class _Pop(Generic[AnswerT]):
    """A pop in progress. Its methods return None if no message is found."""

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
        """The number of arrivals at each owner that this pop has checked without receiving a message."""
        self._parked: _Parked | None = None
        self._is_superseded = False
        self.ended = asyncio.Event()

    async def run(self) -> list[Leased] | AnswerT:
        self._served.pops.check_mode(self._request)
        found = await (self.briefly() if self._request.wait_seconds <= 0 else self.patiently())
        return [] if found is None else found

    async def superseded(self) -> None:
        """End this pop, and return when it has ended. A repeat replaces it, so its connection is probably dead."""
        self._is_superseded = True
        if self._parked is not None:
            self._parked.presence.leave()
        await self.ended.wait()

    async def briefly(self) -> list[Leased] | AnswerT | None:
        """Pop without waiting, here or from an owner that has messages now."""
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
        """Pop as ``briefly`` does, but wait until a message is found or the wait time is over."""
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
        """Whether ``member`` may have messages that this pop has not checked."""
        owners = self._owners
        return member in owners.stocked or owners.seen.get(member, 0) > self._seen.get(member, -1)

    def _is_others_turn(self) -> bool:
        hosts = self._served.hosts
        self._owners.turn += 1
        is_turn = self._owners.turn % len(hosts) >= sum(host.is_owned for host in hosts)
        return bool(self._owners.stocked) and is_turn

    def _others(self) -> Sequence[InstanceId]:
        """Return the other owners in rotating order, but owners that are known to have messages first."""
        others = self._context.router.others(self._served.layout)
        start = self._owners.turn % len(others) if others else 0
        return sorted([*others[start:], *others[:start]], key=lambda one: one not in self._owners.stocked)

    async def _here(self, wait_seconds: float, presence: Presence) -> list[Leased]:
        try:
            return await self._served.pops.pop(replace(self._request, wait_seconds=wait_seconds), presence)
        except TooManyInFlight as error:  # others may have messages
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
        """Forward the pop to one member after the other, until a member has messages."""
        owners = self._owners
        for member in members:
            tried.add(member)
            before = owners.seen.get(member, 0)
            passed = await self._forwarded_to(member)
            if passed is not None and passed.arrivals is None:
                owners.stocked[member] = None
                owners.wake(member)
                return passed.answer
            owners.stocked.pop(member, None)
            seen = owners.seen.get(member, 0)
            arrivals = self._seen[member] = seen if passed is None or passed.arrivals is None else passed.arrivals
            latest = arrivals if seen == before else max(arrivals, seen)  # a later answer may have overtaken this one
            if latest != seen:
                owners.seen[member] = latest
                if self._request.selection.is_choosy:  # there may be messages for another pop
                    owners.wake(member, choosy_only=True)
            if self._presence.gone:
                break
        return None

    async def _forwarded_to(self, member: InstanceId) -> PeerPop[AnswerT] | None:
        """Forward the pop to ``member``. If the client leaves, cancel the request, so that ``member`` is notified."""
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
        """Ask ``member`` to report when it has messages, unless it has been asked already."""
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
