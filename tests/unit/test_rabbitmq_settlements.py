"""Settlements of a channel, checked against a broker that applies them late and delivers as its prefetch allows."""

from collections import deque
from struct import iter_unpack

from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from popgate.adapters.rabbitmq.settlements import Settlements

CHANNEL = 3
_FRAME = ">BHIHHQBB"
_ACK, _NACK = 80, 120


class ChannelMachine(RuleBasedStateMachine):
    """A plain model of the broker's side: the unacked messages on the channel, with the consumer of each."""

    unsettled = Bundle("unsettled")

    @initialize(window=st.integers(1, 8))
    def start(self, window: int) -> None:
        self.settlements = Settlements(CHANNEL)
        self.wire: deque[tuple[int, int, int]] = deque()
        self.unacked: dict[int, int] = {}
        """Consumer by tag, at the broker."""
        self.consumer = 0
        self.window = window
        self.last_tag = 0
        self.given: list[int] = []
        self.applied: set[int] = set()
        self.late: deque[int] = deque()
        self.settlements.begin(window)

    # ------------------------------------------------------------ the broker

    @rule(target=unsettled, count=st.integers(1, 8))
    def deliver(self, count: int) -> object:
        tags: list[int] = []
        for _ in range(count):
            if sum(consumer == self.consumer for consumer in self.unacked.values()) >= self.window:
                break
            self.last_tag += 1
            self.unacked[self.last_tag] = self.consumer
            self.settlements.deliver(self.last_tag, present=True)
            tags.append(self.last_tag)
        return multiple(*tags)

    @rule(count=st.integers(1, 10))
    def apply(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            method, tag, bits = self.wire.popleft()
            many = method == _ACK and bits & 1
            done = [each for each in self.unacked if each <= tag] if many else [tag]
            assert done, "the broker closes the channel over an ack for nothing"
            for each in done:
                assert each in self.unacked, "the broker closes the channel over an unknown tag"
                del self.unacked[each]
            self.applied.update(done)

    @rule(target=unsettled, window=st.integers(1, 8), late=st.integers(0, 3))
    def resize(self, window: int, late: int) -> object:
        """Cancel and consume again; the old consumer's last deliveries come after the new one has begun."""
        self.write()
        held = sum(consumer == self.consumer for consumer in self.unacked.values())
        late = min(late, self.window - held)
        old = self.consumer
        self.settlements.begin(window)
        self.consumer += 1
        self.window = window
        tags: list[int] = []
        for _ in range(max(0, late)):
            self.last_tag += 1
            self.unacked[self.last_tag] = old
            self.settlements.deliver(self.last_tag, present=False)
            tags.append(self.last_tag)
        return multiple(*tags)

    # ------------------------------------------------------------ popgate

    @rule(tags=st.lists(consumes(unsettled), max_size=6), requeue=st.booleans(), twice=st.booleans())
    def settle(self, tags: list[int], requeue: bool, twice: bool) -> None:
        settle = self.settlements.requeue if requeue else self.settlements.ack
        for _ in range(1 + twice):
            settle(tags)
            if not requeue:
                self.given += tags
        self.settlements.ack([10**9])
        self.given.append(10**9)

    @rule()
    def write(self) -> None:
        frames = self.settlements.take_frames()
        for kind, channel, size, basic, method, tag, bits, end in iter_unpack(_FRAME, frames):
            assert (kind, channel, size, basic, end) == (1, CHANNEL, 13, 60, 0xCE)
            self.wire.append((method, tag, bits))

    # ------------------------------------------------------------ what must hold

    @invariant()
    def proved_acks_have_been_applied(self) -> None:
        proved = self.settlements.proved_acks()
        assert proved <= len(self.given)
        unknown = 10**9
        assert all(tag in self.applied for tag in self.given[:proved] if tag != unknown)

    def teardown(self) -> None:
        if not hasattr(self, "settlements"):
            return
        self.write()
        self.apply(10**6)
        assert len(self.settlements) == len(self.unacked)


TestSettlements = ChannelMachine.TestCase


def test_acks_without_a_gap_leave_in_one_frame() -> None:
    settlements = Settlements(CHANNEL)
    settlements.begin(100)
    for tag in range(1, 101):
        settlements.deliver(tag, present=True)
    settlements.ack(range(50, 0, -1))
    settlements.ack([60, 70])
    frames = [(frame[4], frame[5], frame[6]) for frame in iter_unpack(_FRAME, settlements.take_frames())]
    assert frames == [(_ACK, 50, 1), (_ACK, 60, 0), (_ACK, 70, 0)]
    assert settlements.take_frames() == b""


def test_an_ack_of_many_never_takes_a_requeue_with_it() -> None:
    settlements = Settlements(CHANNEL)
    settlements.begin(10)
    for tag in range(1, 5):
        settlements.deliver(tag, present=True)
    settlements.ack([1, 2, 4])
    settlements.requeue([3])
    frames = [(frame[4], frame[5], frame[6]) for frame in iter_unpack(_FRAME, settlements.take_frames())]
    assert frames == [(_NACK, 3, 2), (_ACK, 4, 1)]


def test_evidence_grows_with_deliveries() -> None:
    settlements = Settlements(CHANNEL)
    settlements.begin(2)
    seen: list[int] = []
    for tag in range(1, 7):
        settlements.deliver(tag, present=True)
        settlements.ack([tag])
        settlements.take_frames()
        seen.append(settlements.proved_acks())
    assert seen == [0, 0, 1, 2, 3, 4]
