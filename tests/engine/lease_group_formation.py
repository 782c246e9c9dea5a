"""Lease groups are formed, leased again and read, in addition to everything that ``engine_machine`` does.

A group is formed while the clock advances and a rival pops; it reads the same each time; after its leases have ended,
the same request leases the same messages again, except those that went elsewhere. Reading a group shows its members:
the model judges whether they are permitted, and from then on requires them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from engine.engine_machine import CLOSE, COLORS, DRAINED_BY, GROUPS, TOPIC, EngineMachine
from engine.machine_model import Batch, Expected, State, Stream
from popgate.domain.errors import InvalidRequest, LeaseGroupAcked, LeaseGroupExpired, LeaseGroupNotFound, PopgateError
from popgate.domain.lease_group import GroupKey, GroupState
from popgate.domain.names import StreamName
from popgate.engine.lease.pop_request import Leased
from popgate.engine.lease_groups.lease_groups import FormedGroup, LeaseGroups
from popgate.engine.lease_groups.slices import GroupMessage
from popgate.engine.settle.orders import Verb
from popgate.ports.lease_groups import Member
from support.engines import body_of

T = TypeVar("T")

STREAMS = st.sampled_from(["s", "s", "s", "u"])
EPOCHS = st.sampled_from([1, 2, 2, 3])
PAUSES = st.lists(st.sampled_from([0.7, 2.3, 4.1]), max_size=4)
"""Seconds, one after the other, until the store answers the requests of a PUT."""
LONG_SECONDS, BRIEF_SECONDS = 50.0, 3.0
ALL = 1 << 40


@dataclass
class Put:
    """One request, and what happens during it."""

    name: str
    stream: str
    epoch: int
    count: int = 5
    slices: int = 1
    seconds: float = LONG_SECONDS
    pauses: Sequence[float] = ()
    has_rival: bool = False
    rivals: list[Leased] = field(default_factory=list[Leased])
    """What the rival got."""


class FormingMachine(EngineMachine):
    def __init__(self) -> None:
        super().__init__()
        self.batch_count = 0

    @property
    def lease_groups(self) -> LeaseGroups:
        return self.living.engine.lease_groups

    def stream(self, name: str, stream: str) -> Stream:
        return self.groups[name].streams[stream]

    def key(self, name: str, stream: str, epoch: int) -> GroupKey:
        return GroupKey(self.living.served(TOPIC, name).name, StreamName(stream), epoch)

    def ends(self) -> list[float]:
        batches = [b for g in self.groups.values() for s in g.streams.values() for b in s.batches.values()]
        return super().ends() + [batch.ends for batch in batches]

    @initialize(
        drained_by=DRAINED_BY,
        backlog=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([None, None, "a", "b"]), COLORS), max_size=4),
    )
    def start(self, drained_by: tuple[str | None, ...], backlog: Sequence[tuple[int, str | None, str]] = ()) -> None:
        super().start(drained_by)
        for count, key, color in backlog:
            self.publish(count, key, color, delay=0.0, ttl=None)

    # ------------------------------------------------------------ forming

    @rule(
        name=GROUPS,
        stream=STREAMS,
        epoch=EPOCHS,
        count=st.integers(1, 9),
        slices=st.integers(1, 3),
        is_brief=st.booleans(),
        pauses=PAUSES,
        has_rival=st.booleans(),
    )
    def put(
        self,
        name: str,
        stream: str,
        epoch: int,
        count: int,
        slices: int,
        is_brief: bool,
        pauses: list[float],
        has_rival: bool,
    ) -> None:
        self.put_patiently(Put(name, stream, epoch, count, slices, self.seconds(name, is_brief), pauses, has_rival))

    @rule(
        pick=st.integers(0, 5),
        seconds=st.sampled_from([0.0, 5.0, 21.0, 61.0]),
        is_brief=st.booleans(),
        taken=st.integers(0, 3),
        verb=st.sampled_from([None, Verb.ACK, Verb.RELEASE, Verb.REJECT]),
    )
    def put_again(self, pick: int, seconds: float, is_brief: bool, taken: int, verb: Verb | None) -> None:
        """Repeat the request for an existing group, when others may have got its messages."""
        standing = [
            (name, stream, epoch)
            for name, group in self.groups.items()
            for stream, of in group.streams.items()
            for epoch in of.batches
        ]
        if not standing:
            return
        name, stream, epoch = standing[pick % len(standing)]
        if seconds:
            self.let_time_pass(seconds)
        if taken:
            self.pop(name, taken, LONG_SECONDS, None, None)
            self.settle_latest(name, taken, verb)
        self.put_patiently(Put(name, stream, epoch, seconds=self.seconds(name, is_brief)))

    def settle_latest(self, name: str, count: int, verb: Verb | None) -> None:
        """Settle the rival's latest leases as a rival may."""
        for place in range(count):
            pick = min(12, len(self.groups[name].by_handle)) - 1 - place
            match verb:
                case Verb.ACK:
                    self.ack(name, max(0, pick))
                case Verb.RELEASE:
                    self.release(name, max(0, pick), 0.0)
                case Verb.REJECT:
                    self.reject(name, max(0, pick))
                case _:
                    return

    def seconds(self, name: str, is_brief: bool) -> float:
        """Return the lease time. If deliveries are limited, no lease may end while the group is formed: the number
        of deliveries would be unknown.
        """
        return BRIEF_SECONDS if is_brief and self.groups[name].policy.max_deliveries is None else LONG_SECONDS

    def put_patiently(self, put: Put) -> None:
        started = self.now
        try:
            formed = self.run(self._form(put))
        except LeaseGroupAcked:
            formed = None
        self.judge(put, formed, started)

    def judge(self, put: Put, formed: FormedGroup | None, started: float) -> None:
        self.time_has_passed()
        group, stream = self.groups[put.name], self.stream(put.name, put.stream)
        assert (formed is None) == (put.epoch <= stream.acked_through)
        if formed is None:
            return
        rivals: list[Expected] = []
        for one in put.rivals:
            expected = group.messages[body_of(one.message)]
            group.check_turn(expected, started, rivals)
            # The group may have had it, too, until its lease ended.
            assert one.delivery_count - expected.count in ((1,) if put.seconds == LONG_SECONDS else (1, 2))
            self.is_leased(group, one)
            rivals.append(expected)
        batch = stream.batches.get(put.epoch)
        assert formed.existing == (batch is not None and batch.is_frozen)
        if batch is None or not batch.is_frozen:
            self._check_formed(put, formed, batch or self.new_batch(), started, rivals)
        elif batch.ends > self.now:
            assert formed == (len(batch.members), len(batch.slices), batch.lost, True)
            self._check_slices(put, batch)
            self._are_leased(put, batch)
        else:
            self._check_leased_again(put, formed, batch)
        self.check_list(put.name, put.stream)

    async def _form(self, put: Put) -> FormedGroup:
        putting = asyncio.ensure_future(self.ask(put))
        for pause in put.pauses:
            gate = self.living.faults.stop("leases.grant")
            reached = asyncio.ensure_future(gate.reached())
            await self.patiently(putting, reached)
            if not reached.done():
                reached.cancel()
                self.living.faults.heal()
                break
            await self.turn_clock(self.clear_of_ends(pause))
            if put.has_rival and not put.rivals:
                put.rivals += await self.pop_patiently(put.name, 1, LONG_SECONDS, None, None)
            gate.open()
        await self.patiently(putting)
        return putting.result()

    async def ask(self, put: Put) -> FormedGroup:
        return await self.lease_groups.put(
            TOPIC,
            put.name,
            StreamName(put.stream),
            put.epoch,
            max_messages=put.count,
            slices=put.slices,
            invisibility_seconds=put.seconds,
        )

    def new_batch(self) -> Batch:
        self.batch_count += 1
        return Batch(f"lease group {self.batch_count}")

    def _check_formed(
        self, put: Put, formed: FormedGroup, batch: Batch, started: float, rivals: Sequence[Expected]
    ) -> None:
        """Check the members: first those of the unfinished group, and then the visible messages, in turn, each once."""
        group, stream = self.groups[put.name], self.stream(put.name, put.stream)
        kept, perhaps = batch.surely(), batch.perhaps()
        assert (formed.slices, formed.lost) == (put.slices, 0)
        assert formed.message_count <= max(put.count, len(kept) + len(perhaps))
        if not formed.message_count:
            assert not kept
            assert put.pauses or not group.on_offer(None), "what is visible is leased, unless that takes too long"
            stream.batches.pop(put.epoch, None)
            return
        stream.batches[put.epoch] = batch
        batch.slices = [self._read(put.name, put.stream, put.epoch, number) for number in range(put.slices)]
        read = [message for part in batch.slices for message in part]
        assert len(read) == formed.message_count
        assert [one.position for one in read] == sorted({one.position for one in read})
        batch.members = []
        for message in read:
            one = group.messages[body_of(message.message)]
            assert one not in batch.members, f"{one} is there twice"
            if not batch.holds(one):
                group.check_turn(one, started, [*batch.members, *rivals])
                one.count += 1
            assert message.delivery_count == one.count
            batch.members.append(one)
        assert all(one in batch.members for one in kept)
        self._are_leased(put, batch)

    def _check_leased_again(self, put: Put, formed: FormedGroup, batch: Batch) -> None:
        """Check the members: the same except those that went elsewhere: leased by others, settled, or waiting."""
        surely = batch.surely() + [one for one in batch.members if not batch.holds(one) and one.state is State.READY]
        perhaps = batch.perhaps() + [one for one in batch.members if not batch.holds(one) and one.state is State.GONE]
        read = [
            body_of(message.message)
            for number in range(len(batch.slices))
            for message in self._read(put.name, put.stream, put.epoch, number)
        ]
        assert all(one.body in read for one in surely)
        there = [one for one in batch.members if one.body in read]
        assert all(one in surely or one in perhaps for one in there)
        batch.lost += len(batch.members) - len(there)
        batch.members = there
        assert formed == (len(there), len(batch.slices), batch.lost, True)
        for one in there:
            one.count += not batch.holds(one)
        self._check_slices(put, batch)
        self._are_leased(put, batch)

    def _are_leased(self, put: Put, batch: Batch) -> None:
        """Check since when they are leased, by the members' records."""
        listed = self.check_list(put.name, put.stream)[put.epoch]
        assert listed >= put.seconds / 2 - CLOSE, "leases hold afterwards"
        batch.ends = self.now + listed
        members = self.stored(put.name, put.stream, put.epoch)
        for one, member in zip(batch.members, members, strict=True):
            assert member.record is not None
            assert member.record.delivery_count == one.count
            one.lease(batch.handle, one.count, ends=self.now + member.remaining_seconds)
            assert one.ends >= batch.ends - CLOSE

    # ------------------------------------------------------------ reading

    @rule(name=GROUPS, stream=STREAMS, epoch=EPOCHS, number=st.integers(0, 2))
    def read(self, name: str, stream: str, epoch: int, number: int) -> None:
        of = self.stream(name, stream)
        batch = of.batches.get(epoch)
        refusal: type[PopgateError]
        if epoch <= of.acked_through:
            refusal = LeaseGroupAcked
        elif batch is None:
            refusal = LeaseGroupNotFound
        elif number >= len(batch.slices):
            refusal = InvalidRequest
        elif batch.ends <= self.now:
            refusal = LeaseGroupExpired
        else:
            assert self._read(name, stream, epoch, number) == batch.read(number)
            return
        with pytest.raises(refusal):
            self._read(name, stream, epoch, number)

    def _read(self, name: str, stream: str, epoch: int, number: int) -> list[GroupMessage]:
        async def read() -> list[GroupMessage]:
            found = await self.lease_groups.read(TOPIC, name, StreamName(stream), epoch, number)
            messages = [message async for part in found.parts for message in part]
            assert len(messages) == found.message_count
            return messages

        return self.run(read())

    def _check_slices(self, put: Put, batch: Batch) -> None:
        for number in range(len(batch.slices)):
            assert self._read(put.name, put.stream, put.epoch, number) == batch.read(number), "the same each time"

    def check_list(self, name: str, stream: str) -> dict[int, float]:
        """Check the list of a stream's groups, with the remaining seconds of each."""
        listed = self.run(self.lease_groups.groups(TOPIC, name, StreamName(stream)))
        batches = self.stream(name, stream).batches
        assert [(one.epoch, one.state, one.message_count, one.slices, one.lost) for one in listed] == [
            (epoch, GroupState.FROZEN, len(batch.members), len(batch.slices), batch.lost)
            for epoch, batch in sorted(batches.items())
        ]
        return {one.epoch: one.remaining_seconds for one in listed}

    def stored(self, name: str, stream: str, epoch: int) -> list[Member]:
        return self.run(self.living.context.lease_groups.members(self.key(name, stream, epoch), 0, ALL))
