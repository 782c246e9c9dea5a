"""Lease groups in addition to everything that ``engine_machine`` does, checked against the same plain model.

Groups formed by ``lease_group_formation`` are acked, extended and released, and popgate is killed during all of that.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.engine_machine import CLOSE, GROUPS, TOPIC
from engine.lease_group_formation import EPOCHS, LONG_SECONDS, STREAMS, FormingMachine, Put
from engine.machine_model import Batch, Expected, State
from popgate.domain.lease import RecordState
from popgate.domain.names import CopyId, StreamName
from popgate.engine.lease_groups.lease_groups import FormedGroup
from support.engines import body_of

T = TypeVar("T")


class LeaseGroupMachine(FormingMachine):
    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[CopyId, str] = {}
        """The bodies of messages published before the last crash."""

    # ------------------------------------------------------------ settling

    @rule(name=GROUPS, stream=STREAMS, through=st.integers(0, 3), is_killed=st.booleans())
    def ack_groups(self, name: str, stream: str, through: int, is_killed: bool) -> None:
        """Ack groups; if popgate is killed right after it has begun, the next start finishes the ack."""
        of = self.stream(name, stream)
        settled = {epoch: batch for epoch, batch in of.batches.items() if epoch <= through}
        if is_killed:
            subscription = self.living.served(TOPIC, name).name
            self.run(self.living.context.lease_groups.begin_ack(subscription, StreamName(stream), through))
            self.crash()
        result = self.run(self._settled(self.lease_groups.ack(TOPIC, name, StreamName(stream), through)))
        if through < of.acked_through:
            assert result == (0, 0, 0)
            return
        if through > of.acked_through:
            of.acked_through, of.acked, of.lost = through, 0, 0
        acked = lost = 0
        for epoch, batch in settled.items():
            del of.batches[epoch]
            if not batch.is_frozen:
                self._are_released(name, batch)
                continue
            done = batch.surely() + [one for one in batch.perhaps() if self._is_acked(name, batch, one)]
            for one in done:
                one.state, one.gone = State.ACKED, True
            acked += len(done)
            lost += batch.lost + len(batch.members) - len(done)
        if not is_killed:
            assert result.acked == acked
        assert result.acked + result.already_acked == of.acked + acked
        assert result.lost == of.lost + lost
        of.acked += acked
        of.lost += lost
        self.check_list(name, stream)

    def _is_acked(self, name: str, batch: Batch, one: Expected) -> bool:
        (message,) = [m for part in batch.slices for m in part if body_of(m.message) == one.body]
        queue, copy_id = self.living.queue(TOPIC, message.queue, name), message.message.copy_id
        return self.run(self.living.leases.peek(queue, [copy_id]))[copy_id].state is RecordState.ACKED

    @rule(name=GROUPS, stream=STREAMS, seconds=st.sampled_from([1.0, 30.0]))
    def extend_groups(self, name: str, stream: str, seconds: float) -> None:
        of = self.stream(name, stream)
        extended = self.run(self._settled(self.lease_groups.extend(TOPIC, name, StreamName(stream), seconds)))
        assert [(one.group.epoch, one.is_held) for one in extended] == [
            (epoch, batch.ends > self.now) for epoch, batch in sorted(of.batches.items())
        ]
        for one, (_, batch) in zip(extended, sorted(of.batches.items()), strict=True):
            assert (one.group.message_count, one.group.lost) == (len(batch.members), batch.lost)
            if one.is_held:
                assert abs(one.group.remaining_seconds - seconds) < CLOSE
                batch.ends = self.now + seconds
                for member in batch.members:
                    member.ends = batch.ends

    @rule(name=GROUPS, stream=STREAMS, after=st.integers(-1, 3), is_killed=st.booleans())
    def release_groups(self, name: str, stream: str, after: int, is_killed: bool) -> None:
        of = self.stream(name, stream)
        if is_killed:
            subscription = self.living.served(TOPIC, name).name
            self.run(self.living.context.lease_groups.begin_release(subscription, StreamName(stream), after))
            self.crash()
        released = self.run(self._settled(self.lease_groups.release(TOPIC, name, StreamName(stream), after)))
        given_back = [batch for epoch, batch in of.batches.items() if epoch > after]
        of.batches = {epoch: batch for epoch, batch in of.batches.items() if epoch <= after}
        surely = sum(len(batch.surely()) for batch in given_back)
        if not is_killed:
            assert surely <= released <= surely + sum(len(batch.perhaps()) for batch in given_back)
        for batch in given_back:
            self._are_released(name, batch)
        self.check_list(name, stream)

    def _are_released(self, name: str, batch: Batch) -> None:
        for one in batch.surely():
            self.groups[name].visible(one, self.now)
            one.good, one.released = False, True

    async def _settled(self, work: Coroutine[Any, Any, T]) -> T:
        result = await work
        await self.living.settle_down(3)
        return result

    # ------------------------------------------------------------ what else happens

    @rule(
        name=GROUPS,
        stream=STREAMS,
        epoch=EPOCHS,
        is_brief=st.booleans(),
        grants=st.integers(1, 3),
        seconds=st.sampled_from([0.0, 2.0, 5.0, 61.0]),
        has_rival=st.booleans(),
        then=st.sampled_from(["put", "put", "ack", "release"]),
    )
    def crash_while_forming(
        self,
        name: str,
        stream: str,
        epoch: int,
        is_brief: bool,
        grants: int,
        seconds: float,
        has_rival: bool,
        then: str,
    ) -> None:
        """Crash before any client has seen the group: the same request continues it, any other releases it."""
        of = self.stream(name, stream)
        if epoch <= of.acked_through or epoch in of.batches:
            return
        put = Put(name, stream, epoch, count=9, seconds=self.seconds(name, is_brief))
        started = self.now
        formed = self.run(self._crash_while_forming(put, grants))
        if formed is not None:  # there was too little to do
            self.judge(put, formed, started)
            return
        self._learn_members(put, started)
        if seconds:
            self.let_time_pass(seconds)
        if has_rival:
            self.pop(name, 2, LONG_SECONDS, None, None)
        match then:
            case "put":
                self.put_patiently(Put(name, stream, epoch, count=9, slices=2))
            case "ack":
                self.ack_groups(name, stream, epoch, is_killed=False)
            case _:
                self.release_groups(name, stream, epoch - 1, is_killed=False)

    async def crash_now(self) -> None:
        self.copies.update((one.message.copy_id, body_of(one.message)) for one in self.living.broker.published)
        await super().crash_now()

    async def _crash_while_forming(self, put: Put, grants: int) -> FormedGroup | None:
        putting = asyncio.ensure_future(self.ask(put))
        for number in range(grants):
            gate = self.living.faults.stop("leases.grant", after=True)
            reached = asyncio.ensure_future(gate.reached())
            await self.patiently(putting, reached)
            if not reached.done():
                reached.cancel()
                self.living.faults.heal()
                return putting.result()
            if number < grants - 1:
                gate.open()
        await self.crash_now()
        putting.cancel()
        await asyncio.wait([putting])
        return None

    def _learn_members(self, put: Put, started: float) -> None:
        """Read the members from the store, because no client got them."""
        self.time_has_passed()
        group, batch = self.groups[put.name], self.new_batch()
        self.stream(put.name, put.stream).batches[put.epoch] = batch
        for member in self.stored(put.name, put.stream, put.epoch):
            one = group.messages[self.copies[member.copy_id]]
            group.check_turn(one, started, batch.members)
            one.lease(batch.handle, one.count + 1, ends=self.now + member.remaining_seconds)
            assert member.delivery_count == one.count
            batch.members.append(one)
        self.time_has_passed()

    # ------------------------------------------------------------ in the end

    def drain_all(self) -> None:
        """Drain everything; afterwards every remaining group has lost its unacked messages, and reports so."""
        super().drain_all()
        for name, group in self.groups.items():
            for stream, of in group.streams.items():
                for epoch in list(of.batches):
                    self.put_patiently(Put(name, stream, epoch))
                    assert not of.batches[epoch].members
