"""One member's part in sharing a group's queues: look, plan, carry out this member's part of the plan, and repeat.

Owns this member's places and the pace; `balance` decides. The view comes from RabbitMQ's management interface, or from
the statements that all members always send each other (`presence`). A view may be old, but RabbitMQ allows only one
active consumer per queue in any case. The member does not act on a view that does not yet show its last action.
"""

import asyncio
import contextlib
import random
from collections.abc import Mapping

from popgate_client.amqp.balance import HOLD_OFF_SECONDS, Handover, QueueView, Step, Verb, decide, plan
from popgate_client.amqp.group import Group
from popgate_client.amqp.management import Management, ManagementClosed, ManagementUnreachable, consumer_tag
from popgate_client.amqp.place import Place
from popgate_client.amqp.presence import Presence
from popgate_client.amqp.roster import GroupView, Order, Spot
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.amqp.working import Work
from popgate_client.errors import BrokerUnavailable, Conflict
from popgate_client.facts import FactLogger

logger = FactLogger(__name__)

LOOK_SECONDS = 5.0
"""Seconds between two looks while nothing changes, +-20 %."""
_SOON_SECONDS = {"presence": 1.0, "management": 2.5}
"""Seconds between two looks during or after a change, by the source of the view. A look at the management interface is
expensive for a large group."""
BEGIN_SECONDS = 0.2
"""Seconds between two looks before the first view."""
CLOSED_SECONDS = 60.0
"""Seconds for which the management interface is not used after it has rejected a request."""
SETTLE_SECONDS = 1.0
"""Seconds after taking a place until simultaneous actions of other members are known."""
BLIND_SECONDS = 15.0
"""Seconds without any view after which a member waits in line for every queue, so that each has a consumer."""
LEAVE_SECONDS = 1.0
"""Seconds to close channels at the stop, after the time for handlers."""
TELL_AGAIN_SECONDS = 10.0
"""Seconds before the next try after RabbitMQ has rejected the calls of `presence`."""
ASIDE_SECONDS = 10.0
"""Seconds for which a queue is not used after it was found held by another client or was rejected."""


class Balancer:
    """Balances the queues of one group during one session."""

    def __init__(
        self, session: Session, group: Group, me: str, work: Work, management: Management | None, chance: random.Random
    ) -> None:
        self.me = me
        self.group = group
        self.places: dict[str, Place] = {}
        self.members: tuple[str, ...] = ()
        self.source: str | None = None
        """The source of the latest view: "management", "presence", or None."""
        self.problems: dict[str, str] = {}
        """By queue: why it is not used."""
        self.released_count = 0
        """Number of queues released for the balance."""
        self._session = session
        self._work = work
        self._management = management
        self._closed_until = 0.0
        self._chance = chance
        self._places_taken = 0
        self._is_member = True
        self._woken = asyncio.Event()
        self._orphaned_since: dict[str, float] = {}
        self._aside_until: dict[str, float] = {}
        self._viewed_tags: frozenset[str] = frozenset()
        """Tags of the consumers that the management interface has shown."""
        self._viewed_at = asyncio.get_running_loop().time()
        exchange = f"popgate:presence:{group.topic}:{group.name}"
        self._presence = Presence(session, exchange, me, self._state, self._hear, chance)

    @property
    def is_connected(self) -> bool:
        """Whether the connection is not known to be lost."""
        return not self._session.lost.is_set()

    async def run(self) -> None:
        """Take part until the session is lost, or this task is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            telling = tasks.create_task(self._tell(), name="popgate presence")
            balancing = tasks.create_task(self._balance(), name="popgate balance")
            await self._session.lost.wait()
            telling.cancel()
            balancing.cancel()

    async def leave(self, seconds: float) -> None:
        """Release all queues; running handlers get up to `seconds` to end."""
        self._is_member = False
        await self._presence.say_last()
        if leaving := [place.leave_soon(seconds=seconds) for place in self.places.values()]:
            # A place that was already being released waits for its handler without a limit.
            _, pending = await asyncio.wait(leaving, timeout=seconds + LEAVE_SECONDS)
            for one in pending:
                one.cancel()
        await self._presence.say_last()

    # ------------------------------------------------------------ the loop

    async def _tell(self) -> None:
        while not self._session.lost.is_set():
            try:
                await self._presence.run()
            except (ChannelRefused, BrokerUnavailable) as error:
                logger.warning("this member can't announce itself to the others", extra={"cause": str(error)})
            await asyncio.sleep(TELL_AGAIN_SECONDS)

    async def _balance(self) -> None:
        while True:
            self._woken.clear()
            is_settled = False
            try:
                is_settled = await self._round(asyncio.get_running_loop().time())
            except BrokerUnavailable as error:
                logger.info("a step of the balance failed", extra={"cause": str(error)})
            soon = _SOON_SECONDS.get(self.source or "", BEGIN_SECONDS) * self._chance.uniform(0.6, 1.0)
            await asyncio.sleep(soon)
            if is_settled:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS * self._chance.uniform(0.8, 1.2) - soon):
                        await self._woken.wait()

    async def _round(self, now: float) -> bool:
        """Look and act once; False if the next look should come soon."""
        self._forget_left(now)
        group_view = await self._look(now)
        if group_view is None:
            if now - self._viewed_at > BLIND_SECONDS:
                for queue in self.group.queues:
                    await self._subscribe(queue, 0)
            return False
        self._viewed_at = now
        self.members = tuple(group_view.members)
        if self.source == "management":
            self._viewed_tags = frozenset().union(*group_view.tags.values())
            self._learn_active(group_view)
        elif self._find_first(now):
            return False
        if group_view.tags[self.me] != frozenset(place.tag for place in self.places.values() if place.in_line):
            return False
        self._give_way(group_view)
        moves = plan(group_view.members, group_view.queues, self.group.handover)
        overdue = self._overdue(group_view.queues, now)
        steps = decide(self.me, group_view.queues, moves, self.group.handover, overdue=overdue)
        for step in steps:
            await self._do(step)
        return not steps and not moves and all(view.active is not None for view in group_view.queues.values())

    # ------------------------------------------------------------ looking

    async def _look(self, now: float) -> GroupView | None:
        """Return the view from the first source that has one."""
        if self._management is not None and now >= self._closed_until:
            try:
                group_view = await self._management.look(self.me, self.group.queues)
            except ManagementClosed as error:
                self._closed_until = now + CLOSED_SECONDS
                logger.warning(
                    "the management interface rejects this user: using presence", extra={"cause": str(error)}
                )
            except ManagementUnreachable as error:
                logger.info("the management interface did not answer", extra={"cause": str(error)})
            else:
                self.source = "management"
                return group_view
        if self._presence.is_complete:
            self.source = "presence"
            return self._presence.group_view(self.group.queues)
        return None

    def _learn_active(self, group_view: GroupView) -> None:
        for place in self.places.values():
            is_first = place.tag in group_view.active_tags
            if place.is_first is not is_first:
                place.is_first = is_first
                self._presence.tell_soon()

    def _find_first(self, now: float) -> bool:
        """Find the queues whose consumer is this member although RabbitMQ has delivered nothing yet. Return whether
        anything changed."""
        roster = self._presence.roster
        is_news = False
        for place in self.places.values():
            if place.was_given or place.is_leaving or now - place.taken_at < SETTLE_SECONDS:
                continue
            if place.is_first:
                place.is_first = not roster.is_taken(place.queue)  # RabbitMQ delivers to another member
                is_news |= not place.is_first
                continue
            match roster.order(_spot(place), takes=self.group.handover is Handover.TAKE):
                case Order.FIRST:
                    place.is_first = is_news = True
                case Order.UNKNOWN:
                    place.leave_soon().add_done_callback(self._note_change)
                    is_news = True
                case Order.BEHIND | Order.UNKNOWN_BUT_STAYS:
                    pass
        if is_news:
            self._presence.tell_soon()
        return is_news

    def _give_way(self, group_view: GroupView) -> None:
        """Release the hold on queues that RabbitMQ gives to a consumer with a higher priority."""
        for place in self._takeable():
            view = group_view.queues[place.queue]
            is_overtaken = view.active not in (None, self.me)
            if is_overtaken or any(one.priority > place.priority for one in view.waiting):
                self._give_up(place)

    def _hear(self) -> None:
        """React to a statement of another member. If that member has just taken a queue from this one, release it at
        once: the management interface shows this a second later, and until then the other can't handle messages."""
        if self.source == "management":
            for place in self._takeable():
                spots = self._presence.roster.spots(place.queue)
                if any(spot.priority > place.priority and spot.tag not in self._viewed_tags for spot in spots):
                    self._give_up(place)
        self._woken.set()

    def _takeable(self) -> list[Place]:
        """Return this member's active places, if a consumer with a higher priority can take them."""
        if self.group.handover is not Handover.TAKE:
            return []
        return [place for place in self.places.values() if place.is_active and not place.is_leaving]

    def _give_up(self, place: Place) -> None:
        self.released_count += 1
        place.leave_soon().add_done_callback(self._note_change)

    def _overdue(self, queues: Mapping[str, QueueView], now: float) -> list[str]:
        orphans = [name for name, view in queues.items() if view.active is None and not view.waiting]
        self._orphaned_since = {name: self._orphaned_since.get(name, now) for name in orphans}
        return [name for name, since in self._orphaned_since.items() if now - since >= HOLD_OFF_SECONDS]

    # ------------------------------------------------------------ acting

    async def _do(self, step: Step[str]) -> None:
        place = self.places.get(step.queue)
        match step.verb:
            case Verb.SUBSCRIBE:
                await self._subscribe(step.queue, step.priority)
            case Verb.CLAIM if place is not None and not place.is_active:
                del self.places[step.queue]
                await self._subscribe(step.queue, step.priority)
                place.leave_soon()
            case Verb.YIELD if place is not None and not place.was_given:
                place.leave_soon().add_done_callback(self._note_change)
            case Verb.RELEASE if place is not None and not place.is_leaving:
                self.released_count += 1
                self._session.spawn(self._release(place), "popgate releasing a queue")
            case _:
                pass

    async def _release(self, place: Place) -> None:
        """Leave, and wait in line again at once: the receiver has the queue now, but may die before others wait."""
        await asyncio.wait([place.leave_soon()])
        if self._is_member and self.places.get(place.queue) is place and place.refusal is None:
            del self.places[place.queue]
            await self._subscribe(place.queue, 0)
        self._note_change()

    async def _subscribe(self, queue: str, priority: int) -> None:
        if queue in self.places or asyncio.get_running_loop().time() < self._aside_until.get(queue, 0.0):
            return
        self._places_taken += 1
        place = Place(
            self._session,
            self.group,
            queue,
            self._work,
            self._note_change,
            client_id=self.me,
            tag=consumer_tag(self.me, self._places_taken),
            behind=self._presence.roster.tags(queue),
        )
        self.places[queue] = place
        try:
            await place.take(priority)
        except (BrokerUnavailable, Conflict) as error:
            place.refusal = error
            place.leave_soon().add_done_callback(self._note_change)
        self._presence.tell_soon()

    def _forget_left(self, now: float) -> None:
        for queue, place in list(self.places.items()):
            if place.has_left:
                del self.places[queue]
                if place.refusal is not None:
                    self._aside_until[queue] = now + ASIDE_SECONDS
                    if queue not in self.problems:
                        logger.warning(
                            "a queue is not used for now", extra={"queue": queue, "cause": str(place.refusal)}
                        )
                    self.problems[queue] = place.refusal.detail
            elif place.is_handling:
                self.problems.pop(queue, None)

    def _note_change(self, _: object = None) -> None:
        self._presence.tell_soon()
        self._woken.set()

    def _state(self) -> tuple[bool, tuple[Spot, ...]]:
        return self._is_member, tuple(_spot(place) for place in self.places.values() if place.in_line)


def _spot(place: Place) -> Spot:
    return Spot(place.queue, place.tag, place.priority, place.behind, place.is_active)
