"""The serving of parked pops alone, checked against a plain model of which pop gets what.

This module owns the model and how messages and pops come and go. The tests decide the order of events.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.domain.filters import FilterValue
from popgate.domain.message import Message
from popgate.domain.names import BrokerQueue, CopyId, GroupName, Layout, Subscription, TopicName
from popgate.domain.topics import ConsumeMode, GroupSpec, Policy
from popgate.engine.context.engine_context import EngineContext, EngineOptions, make_context
from popgate.engine.lease.body_retrieval import BodyRetrieval
from popgate.engine.lease.moves import Mover
from popgate.engine.lease.pop_request import PopRequest, Waiter
from popgate.engine.lease.selection import AdminSelection
from popgate.engine.lease.served_group import ServedGroup
from popgate.engine.lease.stale_leases import StaleLeases
from popgate.engine.queue.buffered import BufferedMessage, MessageState
from popgate.engine.queue.effects import Effects
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.lacking_queues import LackingQueues
from popgate.engine.queue.ordering_keys import OrderingKeys
from popgate.engine.subscription.serving import Serving
from popgate.runtime.background import Background
from popgate.runtime.clocks import ManualClock
from support.engines import ListJournal, filtered

NAME = Subscription(TopicName("t"), GroupName("g"))
LAYOUT = Layout(subscription=NAME, queues=(BrokerQueue("popgate:t:g:0"),), dead=BrokerQueue("popgate:t:g:dead"))

Filter = Mapping[str, Sequence[FilterValue]]

# ---------------------------------------------------------------- the model


class Pop(NamedTuple):
    """A parked pop. ``wants`` None: any message."""

    wants: Filter | None
    most: int
    by_admin: bool


def passes(wants: Filter | None, headers: Mapping[str, object]) -> bool:
    def is_one(value: object, allowed: Sequence[FilterValue]) -> bool:
        return any(isinstance(value, bool) is isinstance(one, bool) and value == one for one in allowed)

    return wants is None or all(is_one(headers.get(name), allowed) for name, allowed in wants.items())


class Model:
    """A plain definition of what pops get: each parked pop in turn takes the oldest ready messages that it wants."""

    def __init__(self) -> None:
        self.ready: list[tuple[int, str | None, Mapping[str, object]]] = []
        """(number, ordering key, headers), by number."""
        self.out: dict[int, tuple[int, str | None, Mapping[str, object]]] = {}
        self.parked: list[tuple[int, Pop]] = []
        self.in_flight_max: int | None = None

    def serve(self) -> dict[int, list[int]]:
        """Return what each pop gets, by its number."""
        got: dict[int, list[int]] = {}
        for number, pop in self.parked:
            if taken := self._take(pop):
                got[number] = taken
        self.parked = [(number, pop) for number, pop in self.parked if number not in got]
        return got

    def _take(self, pop: Pop) -> list[int]:
        most = pop.most
        if self.in_flight_max is not None and not pop.by_admin:
            most = min(most, self.in_flight_max - len(self.out))
        taken: list[int] = []
        passed_over: set[str | None] = set()
        for one in list(self.ready):
            number, key, headers = one
            if len(taken) >= most:
                break
            others = [other for other, its_key, _ in self.out.values() if its_key == key and other not in taken]
            if key is not None and (key in passed_over or min(others, default=number) < number):
                continue  # it is behind one that another pop has, or that this one does not want
            if passes(pop.wants, headers):
                self.ready.remove(one)
                self.out[number] = one
                taken.append(number)
            else:
                passed_over.add(key)
        return taken


# ---------------------------------------------------------------- what is held against it


class Scene:
    """The serving of one subscription with messages, but without broker or store."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.context = empty_room(self.clock)
        lacking = LackingQueues(self.context.buffer)
        self.host = QueueHost(self.context, LAYOUT, LAYOUT.queue_ids()[0], self, count(1), lacking)
        spec = GroupSpec(subscription=NAME, policy=Policy(), mode=ConsumeMode.POP)
        self.group = ServedGroup(spec, LAYOUT, [self.host], lacking)
        self.serving = Serving(
            self.context,
            self.group,
            Mover(self.context, self.group),
            BodyRetrieval(self.group, ask=lambda: None),
            StaleLeases(self.context, self.group),
        )
        self.serving.mode_changed()
        self.keys = OrderingKeys()
        self.held: dict[int, BufferedMessage] = {}
        self.pops: dict[int, Waiter] = {}
        self.numbers = count()
        self.model = Model()

    def happened(self, effects: Effects) -> None:
        self.serving.happened(effects)

    def lost(self, number: int) -> None:
        raise AssertionError("no queue is consumed here")

    def has_demand(self) -> bool:
        return True

    def given_up(self) -> None:
        raise AssertionError("no queue is opened here")

    def arrive(self, many: Sequence[tuple[str | None, Mapping[str, object]]]) -> None:
        came: list[BufferedMessage] = []
        for key, headers in many:
            number = next(self.numbers)
            copy_id = CopyId(f"{number:032x}")
            held = self.held[number] = BufferedMessage(self.host.state.counts, 0, copy_id)
            self.host.state.messages[copy_id] = held
            held.message = Message(copy_id, f"m{number}", b"", headers, key, 0.0)
            held.rank = number + 1
            if key is not None:
                self.keys.append(held, key)
            came.append(held)
            self.model.ready.append((number, key, headers))
        self.happened(_effects(came, has_news=True))

    def park(self, pop: Pop, *, first: bool) -> None:
        number = len(self.pops)
        request = PopRequest(
            max_messages=pop.most,
            selection=AdminSelection() if pop.by_admin else filtered(pop.wants),
        )
        waiter = self.pops[number] = Waiter(request, short=False, changes=self.serving.changes)
        self.serving.park(waiter, first=first)
        self.model.parked.insert(0 if first else len(self.model.parked), (number, pop))

    def leave(self, place: int) -> None:
        """End the wait of a parked pop."""
        if self.model.parked:
            number, _ = self.model.parked.pop(place % len(self.model.parked))
            self.pops[number].give_up()
            self.serving.leave(self.pops.pop(number))
            self.pops[number] = Waiter(PopRequest(), short=False, changes=0)  # keeps the numbers

    def end(self, place: int, *, comes_again: bool) -> None:
        """End a lease: the message is settled, or comes again in its place."""
        if not self.model.out:
            return
        number = sorted(self.model.out)[place % len(self.model.out)]
        one, held = self.model.out.pop(number), self.held[number]
        if comes_again:
            held.enter(MessageState.READY)
            self.model.ready = sorted([*self.model.ready, one])
            ready = [held]
        else:
            held.enter(MessageState.DROPPED)
            following = self.keys.remove(held)
            ready = [] if following is None else [following]
        self.happened(_effects(ready, has_fewer_out=True))

    def limit(self, most: int | None) -> None:
        self.model.in_flight_max = most
        self.group.spec = replace(self.group.spec, policy=Policy(max_in_flight=most))
        self.serving.policy_changed()
        self.serving.look_again()

    async def served(self) -> None:
        """Run both, once no pop waits for more messages, and compare."""
        for _ in range(3):
            await asyncio.sleep(0)
        self.clock.advance(1.0)
        self.context.deadlines.tick()
        got = {
            number: [int(held.copy_id, 16) for held in waiter.future.result()]
            for number, waiter in self.pops.items()
            if waiter.future.done() and waiter.future.result()
        }
        for number in got:
            self.pops[number] = Waiter(PopRequest(), short=False, changes=0)
        expected = self.model.serve()
        assert got == expected, (got, expected)
        assert len(self.serving.parked) == len(self.model.parked)


def empty_room(clock: ManualClock) -> EngineContext:
    """Return ports that must not be called."""
    database, records = Database(Path("nowhere"), clock), LatestRecords()
    return make_context(
        EngineOptions(instance="i.", secrets=[b"a secret of the tests alone"], auto_create=True),
        broker=SqliteBroker(database),
        leases=SqliteLeaseStore(database, records),
        dedup=SqliteDedupStore(database),
        lease_groups=SqliteLeaseGroups(database, records),
        assignments=SqliteAssignments(database),
        catalog=SqliteCatalog(database),
        journal=ListJournal(),
        clock=clock,
        background=Background(lambda error: None),
    )


def _effects(ready: list[BufferedMessage], *, has_fewer_out: bool = False, has_news: bool = False) -> Effects:
    effects = Effects()
    effects.ready, effects.has_fewer_out, effects.has_news = ready, has_fewer_out, has_news
    return effects
