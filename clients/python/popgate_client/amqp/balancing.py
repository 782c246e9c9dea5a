"""One member's part in sharing a group's queues: look, plan, do what the plan wants of this member, and look again.

Owns this member's places and the pace; the decision is `balance`'s. The view comes from RabbitMQ's management
interface, or from what the members tell each other (`presence`), which all of them do in any case. Views may be old:
RabbitMQ has one active consumer a queue whatever is done here. Nothing is done on a view that does not show what was
done here last.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Mapping

from popgate_client.amqp.balance import HOLD_OFF_SECONDS, Handover, QueueView, Step, Verb, decide, plan
from popgate_client.amqp.group import Group
from popgate_client.amqp.management import Management, ManagementClosed, ManagementUnreachable, consumer_tag
from popgate_client.amqp.place import Place
from popgate_client.amqp.presence import Presence
from popgate_client.amqp.roster import Order, Sight, Spot
from popgate_client.amqp.session import ChannelRefused, Session
from popgate_client.amqp.working import Work
from popgate_client.errors import BrokerUnavailable, Conflict

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Between two looks while nothing happens, +-20 %."""
_SOON_SECONDS = {"presence": 1.0, "management": 2.5}
"""Between two looks where something is under way, or has happened; by the source of the view. A look at the management
interface is dear where the group is large."""
BEGIN_SECONDS = 0.2
"""The same where there was no view yet."""
CLOSED_SECONDS = 60.0
"""After a refusal the management interface is left alone for so long."""
SETTLE_SECONDS = 1.0
"""What others do at the same time as a place is taken is known after that."""
BLIND_SECONDS = 15.0
"""Without any view for so long, a member stands in line for every queue: somebody must consume it."""
LEAVE_SECONDS = 1.0
"""For closing channels at the stop, after the time that handlers are given."""
TELL_AGAIN_SECONDS = 10.0
"""After RabbitMQ has refused what telling others needs."""
ASIDE_SECONDS = 10.0
"""A queue that somebody else holds is left alone for so long."""


class Balancer:
    """For one session."""

    def __init__(
        self, session: Session, group: Group, me: str, work: Work, management: Management | None, chance: random.Random
    ) -> None:
        self.me = me
        self.group = group
        self.places: dict[str, Place] = {}
        self.members: tuple[str, ...] = ()
        self.source: str | None = None
        """Where the latest view came from: "management", "presence", or None."""
        self.problems: dict[str, str] = {}
        """By queue: why it is left alone."""
        self.released_count = 0
        """How many queues were given up for the balance."""
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
        """The places that the management interface has shown."""
        self._viewed_at = asyncio.get_running_loop().time()
        exchange = f"popgate:presence:{group.topic}:{group.name}"
        self._presence = Presence(session, exchange, me, self._state, self._hear, chance)

    @property
    def is_connected(self) -> bool:
        """RabbitMQ answers, as far as is known."""
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
        """Let what is running end, for so long, and give all queues back."""
        self._is_member = False
        await self._presence.say_last()
        if leaving := [place.leave_soon(seconds=seconds) for place in self.places.values()]:
            # One that was being released already waits for its handler without end.
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
                logger.warning("other members are not told of this one", extra={"why": str(error)})
            await asyncio.sleep(TELL_AGAIN_SECONDS)

    async def _balance(self) -> None:
        while True:
            self._woken.clear()
            is_settled = False
            try:
                is_settled = await self._round(asyncio.get_running_loop().time())
            except BrokerUnavailable as error:
                logger.info("a step of the balance failed", extra={"why": str(error)})
            soon = _SOON_SECONDS.get(self.source or "", BEGIN_SECONDS) * self._chance.uniform(0.6, 1.0)
            await asyncio.sleep(soon)
            if is_settled:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS * self._chance.uniform(0.8, 1.2) - soon):
                        await self._woken.wait()

    async def _round(self, now: float) -> bool:
        """Look and act once; False where the next look should come soon."""
        self._forget_left(now)
        sight = await self._look(now)
        if sight is None:
            if now - self._viewed_at > BLIND_SECONDS:
                for queue in self.group.queues:
                    await self._subscribe(queue, 0)
            return False
        self._viewed_at = now
        self.members = tuple(sight.members)
        if self.source == "management":
            self._viewed_tags = frozenset().union(*sight.tags.values())
            self._learn_active(sight)
        elif self._find_first(now):
            return False
        if sight.tags[self.me] != frozenset(place.tag for place in self.places.values() if place.in_line):
            return False
        self._give_way(sight)
        moves = plan(sight.members, sight.queues, self.group.handover)
        overdue = self._overdue(sight.queues, now)
        steps = decide(self.me, sight.queues, moves, self.group.handover, overdue=overdue)
        for step in steps:
            await self._do(step)
        return not steps and not moves and all(view.active is not None for view in sight.queues.values())

    # ------------------------------------------------------------ looking

    async def _look(self, now: float) -> Sight | None:
        """The view, from a source that has one."""
        if self._management is not None and now >= self._closed_until:
            try:
                sight = await self._management.look(self.me, self.group.queues)
            except ManagementClosed as error:
                self._closed_until = now + CLOSED_SECONDS
                logger.warning("the management interface is closed: members tell each other", extra={"why": str(error)})
            except ManagementUnreachable as error:
                logger.info("the management interface did not answer", extra={"why": str(error)})
            else:
                self.source = "management"
                return sight
        if self._presence.is_complete:
            self.source = "presence"
            return self._presence.sight(self.group.queues)
        return None

    def _learn_active(self, sight: Sight) -> None:
        for place in self.places.values():
            is_first = place.tag in sight.active_tags
            if place.is_first is not is_first:
                place.is_first = is_first
                self._presence.tell_soon()

    def _find_first(self, now: float) -> bool:
        """Learn of which queues this member is the consumer, where RabbitMQ has given it nothing yet. True: news."""
        roster = self._presence.roster
        is_news = False
        for place in self.places.values():
            if place.was_given or place.is_leaving or now - place.taken_at < SETTLE_SECONDS:
                continue
            if place.is_first:
                place.is_first = not roster.is_taken(place.queue)  # RabbitMQ has told somebody better
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

    def _give_way(self, sight: Sight) -> None:
        """Where RabbitMQ gives a queue to who asks with a higher priority, our hold must go as well."""
        for place in self._takeable():
            view = sight.queues[place.queue]
            is_overtaken = view.active not in (None, self.me)
            if is_overtaken or any(one.priority > place.priority for one in view.waiting):
                self._give_up(place)

    def _hear(self) -> None:
        """Another member has said something. Where it has just taken a queue, give that up at once: the management
        interface shows it a second later, and until then this member keeps the other one from handling messages."""
        if self.source == "management":
            for place in self._takeable():
                spots = self._presence.roster.spots(place.queue)
                if any(spot.priority > place.priority and spot.tag not in self._viewed_tags for spot in spots):
                    self._give_up(place)
        self._woken.set()

    def _takeable(self) -> list[Place]:
        """The queues that this member has, and that a higher priority takes from it."""
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
        """Leave, and stand in line again at once: the receiver has the queue now, and may die before others come."""
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
                        logger.warning("a queue is left alone", extra={"queue": queue, "why": str(place.refusal)})
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
