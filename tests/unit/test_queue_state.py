"""The decisions on one queue, driven at random against a plain broker and a plain store: no I/O, no clock."""

from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from popgate.domain.lease import RecordState
from popgate.domain.names import CopyId
from popgate.engine.queue.buffered import TRANSITIONS, BufferedMessage, Counts, MessageState
from unit.queue_model import Copy, World

KEYS = st.sampled_from([None, "a", "a", "b"])
SIZES = st.sampled_from([0, 1_000, 5_000])
LEASE_SECONDS = 30.0


class QueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.steps = 0

    def leased(self) -> list[Copy]:
        """Return the copies with a valid lease."""
        return [
            copy
            for copy in self.world.copies
            if copy.record is not None
            and copy.record.state is RecordState.LEASED
            and copy.record.visible_at > self.world.now
        ]

    @rule(key=KEYS, size=SIZES)
    def publish(self, key: str | None, size: int) -> None:
        self.world.copies.append(Copy(len(self.world.copies), key, b"x" * size))

    @precondition(lambda self: not self.world.is_open)
    @rule()
    def open(self) -> None:
        self.world.open()

    @precondition(lambda self: self.world.is_open)
    @rule(count=st.integers(1, 6), shuffled=st.integers(0, 1_000))
    def deliver(self, count: int, shuffled: int) -> None:
        self.world.deliver(count, shuffled)

    @precondition(lambda self: self.world.is_open)
    @rule()
    def lose_channel(self) -> None:
        self.world.lose_channel()

    @rule(count=st.integers(1, 3), seconds=st.sampled_from([LEASE_SECONDS, 5.0]))
    def pop(self, count: int, seconds: float) -> None:
        for _ in range(count):
            offered = self.world.offered()
            if not offered:
                self.world.starve()
                break
            self.world.lease(offered[0], seconds)

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        self.world.settle(data.draw(st.sampled_from(self.leased())))

    @precondition(lambda self: self.leased())
    @rule(data=st.data(), delay=st.sampled_from([0.0, 0.0, 20.0]))
    def release(self, data: st.DataObject, delay: float) -> None:
        copy = data.draw(st.sampled_from(self.leased()))
        assert copy.record is not None
        until = self.world.now + delay
        copy.record = copy.record._replace(state=RecordState.RELEASED, visible_at=until, changed_at=self.world.now)
        self.world.learn(copy)

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from(self.leased()))
        assert copy.record is not None
        copy.record = copy.record._replace(visible_at=self.world.now + LEASE_SECONDS, changed_at=self.world.now)
        self.world.learn(copy)

    @precondition(lambda self: self.leased())
    @rule(data=st.data())
    def fetch_again(self, data: st.DataObject) -> None:
        message = self.world.state.messages.get(data.draw(st.sampled_from(self.leased())).copy_id)
        if message is not None:
            self.world.carry_out(self.world.state.fetch_again([message]))

    @rule(data=st.data())
    def renew_delivery(self, data: st.DataObject) -> None:
        here = [message for message in self.world.state.messages.values() if message.tag is not None]
        if here:
            self.world.carry_out(self.world.state.renew_delivery(data.draw(st.sampled_from(here))))

    @rule(seconds=st.sampled_from([1.0, 6.0, LEASE_SECONDS]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def holds(self) -> None:
        self.world.check()
        self.steps += 1
        if self.steps % 3 == 0:
            self.world.look()

    def teardown(self) -> None:
        """Check that everything left comes, each key in order among messages that no client had, and nothing twice."""
        world = self.world
        if not world.is_open:
            world.open()
        world.pass_time(2 * LEASE_SECONDS)
        for _ in range(20 * len(world.copies) + 20):
            if not world.undelivered() and not world.unsettled():
                break
            world.deliver(6, 0)
            self.pop(3, LEASE_SECONDS)
            for copy in self.leased():
                world.settle(copy)
            world.check()
        assert all(copy.is_acked for copy in world.copies), "nothing is left behind"
        first: dict[int, int] = {}
        for place, copy in enumerate(world.handed_out):
            first.setdefault(copy.number, place)
        for key in ("a", "b"):
            places = [first[copy.number] for copy in world.copies if copy.key == key]
            assert places == sorted(places), "the messages of a key are handed out in order"


TestQueueState = QueueMachine.TestCase


@pytest.mark.parametrize(("old", "new"), [*product(MessageState, MessageState)])
def test_a_message_changes_its_state_only_as_the_table_says(old: MessageState, new: MessageState) -> None:
    counts = Counts()
    message = BufferedMessage(counts, 0, CopyId("1"))
    if old is not MessageState.READY:
        message.enter(old)
    if old is new or new in TRANSITIONS[old]:
        message.enter(new)
        assert counts.all(new) == 1
    else:
        with pytest.raises(AssertionError, match=f"a message can't go from {old.name} to {new.name}"):
            message.enter(new)
        assert counts.all(old) == 1
