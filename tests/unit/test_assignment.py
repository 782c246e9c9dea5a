"""Which client may read which queue in pull mode: sticky, even, one client a queue, and released before it is
reassigned.
"""

from collections import Counter
from collections.abc import Mapping

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from popgate.domain.assignment import Assignment, Terms, ended, heard, held_by, share_of, taken
from popgate.domain.names import ClientId
from popgate.domain.topics import ConsumeMode

POP, PULL = ConsumeMode.POP, ConsumeMode.PULL
BOTH = (POP, PULL)
A, B, C = ClientId("a"), ClientId("b"), ClientId("c")
FOUR = Terms(True, 3, 4)


class Clients:
    """Clients that follow their assignment: each shows the generation of its last answer."""

    def __init__(self, terms: Terms = FOUR) -> None:
        self.terms = terms
        self.now = Assignment()
        self.knows: dict[ClientId, int] = {}

    def registers(self, *clients: ClientId, supports: tuple[ConsumeMode, ...] = BOTH) -> None:
        for client in clients:
            self._change(heard(self.now, self.terms, client, supports, None, self.now.generation + 1))
            self.knows[client] = share_of(self.now, client).generation

    def beats(self, *clients: ClientId) -> None:
        for client in clients:
            supports = self.now.sessions[client].supports
            self._change(heard(self.now, self.terms, client, supports, self.knows[client], self.now.generation + 1))
            self.knows[client] = share_of(self.now, client).generation

    def all_beat(self) -> None:
        self.beats(*self.now.sessions)

    def end(self, *clients: ClientId) -> None:
        self._change(ended(self.now, self.terms, clients, self.now.generation + 1))

    def queues(self) -> Mapping[ClientId, list[int]]:
        return {client: share_of(self.now, client).queues for client in sorted(self.now.sessions)}

    def _change(self, after: Assignment) -> None:
        assert after is self.now or after.generation == self.now.generation + 1
        assert after is self.now or after != self.now, "what is not different is not written"
        self.now = after


def test_the_first_client_gets_all_queues_and_the_second_one_half_once_the_first_has_let_go() -> None:
    clients = Clients()
    clients.registers(A)
    assert clients.queues() == {A: [0, 1, 2, 3]}
    clients.registers(B)
    assert clients.queues() == {A: [2, 3], B: []}
    assert share_of(clients.now, A).is_changing
    assert share_of(clients.now, B).is_changing
    clients.beats(B)
    clients.beats(A)
    assert clients.queues() == {A: [2, 3], B: []}, "it has been told, and has not shown that it knows"
    clients.beats(A)
    assert clients.queues() == {A: [2, 3], B: [0, 1]}
    assert not share_of(clients.now, B).is_changing


def test_who_lets_go_of_a_queue_may_settle_what_it_has_of_it_and_no_longer_once_the_other_one_has_it() -> None:
    clients = Clients()
    clients.registers(A, B)
    first = clients.now.holdings[0].since
    leaving = held_by(clients.now, 0, A, first)
    assert leaving is not None
    assert leaving.to == B
    assert held_by(clients.now, 0, B, clients.knows[B]) is None
    clients.beats(A)
    clients.beats(A, B)
    assert held_by(clients.now, 0, A, first) is None
    assert held_by(clients.now, 0, A, clients.knows[A]) is None
    mine = held_by(clients.now, 0, B, clients.knows[B])
    assert mine is not None
    assert mine.to is None


def test_a_queue_that_stays_is_not_touched_by_what_happens_to_others() -> None:
    clients = Clients()
    clients.registers(A)
    before = clients.now.holdings[3]
    clients.registers(B)
    clients.all_beat()
    clients.all_beat()
    clients.registers(C)
    clients.all_beat()
    clients.all_beat()
    clients.end(B)
    assert clients.now.holdings[3] == before
    assert held_by(clients.now, 3, A, before.since) == before, (
        "an older generation will do, as long as it has the queue"
    )


def test_a_client_that_is_no_more_heard_of_leaves_its_queues_to_the_others_at_once() -> None:
    clients = Clients()
    clients.registers(A, B)
    clients.all_beat()
    clients.all_beat()
    clients.end(A)
    assert clients.queues() == {B: [0, 1, 2, 3]}
    clients.end(B)
    assert clients.queues() == {}
    assert clients.now.holdings == {}


def test_where_its_client_has_gone_a_queue_goes_to_the_one_who_was_to_have_it() -> None:
    clients = Clients()
    clients.registers(A, C, B)
    assert [one.to for one in clients.now.holdings.values()] == [C, C, None, None]
    clients.end(A)
    assert clients.queues() == {B: [2, 3], C: [0, 1]}


def test_where_the_one_who_was_to_have_a_queue_has_gone_it_stays_where_it_is() -> None:
    clients = Clients()
    clients.registers(A)
    before = clients.now.holdings
    clients.registers(B)
    clients.end(B)
    assert clients.now.holdings == before
    assert clients.now.sessions[A].generation > before[0].since, (
        "it was told to let go, and has to be told that it need not"
    )


def test_a_client_that_begins_anew_keeps_its_queues_in_a_new_generation() -> None:
    clients = Clients()
    clients.registers(A, B)
    clients.all_beat()
    clients.all_beat()
    known, queues = clients.knows[A], clients.queues()
    clients.registers(A)
    assert clients.queues() == queues
    assert all(held_by(clients.now, number, A, known) is None for number in queues[A])
    clients.knows[A] = known
    clients.beats(A)
    assert clients.now.sessions[A].began > known, "an earlier session's generation begins anew as well"


def test_a_client_that_begins_anew_has_let_go_of_what_it_was_told_to() -> None:
    clients = Clients()
    clients.registers(A, B)
    clients.registers(A)
    assert clients.queues() == {A: [2, 3], B: [0, 1]}


def test_more_clients_than_queues_leave_some_with_none_until_one_ends() -> None:
    clients = Clients(Terms(True, 1, 1))
    clients.registers(A, B, C)
    for _ in range(3):
        clients.all_beat()
    assert clients.queues() == {A: [0], B: [], C: []}
    assert not share_of(clients.now, B).is_changing
    clients.end(A)
    assert clients.queues() == {B: [0], C: []}


def test_a_client_that_cannot_pull_is_given_nothing() -> None:
    clients = Clients()
    clients.registers(A, supports=(POP,))
    clients.registers(B)
    assert clients.queues() == {A: [], B: [0, 1, 2, 3]}
    clients.registers(B, supports=(POP,))
    assert clients.queues() == {A: [], B: []}


def test_in_another_mode_nobody_has_anything_and_what_was_held_before_it_is_held_anew() -> None:
    clients = Clients()
    clients.registers(A, B)
    clients.terms = Terms(False, 4, 4)
    clients.all_beat()
    assert clients.queues() == {A: [], B: []}
    known = clients.knows[A]
    clients.terms = Terms(True, 6, 4)
    clients.beats(A)
    assert {number for queues in clients.queues().values() for number in queues} == {0, 1, 2, 3}
    assert all(one.since > known for one in clients.now.holdings.values())


def test_a_mode_that_went_and_came_back_unseen_gives_the_queues_anew() -> None:
    clients = Clients()
    clients.registers(A)
    known = clients.knows[A]
    clients.terms = Terms(True, 6, 4)
    clients.beats(A)
    assert clients.queues() == {A: [0, 1, 2, 3]}
    assert held_by(clients.now, 0, A, known) is None


def test_who_does_not_let_go_in_time_loses_the_queue() -> None:
    clients = Clients()
    clients.registers(A, B)
    clients.now = taken(clients.now, FOUR, [0, 1, 2], clients.now.generation + 1)
    assert clients.queues() == {A: [2, 3], B: [0, 1]}, "only what it was told to let go of"


def test_who_knows_all_is_no_change() -> None:
    clients = Clients()
    clients.registers(A, B)
    clients.all_beat()
    clients.all_beat()
    clients.all_beat()
    before = clients.now
    clients.all_beat()
    assert clients.now is before


class Comings(RuleBasedStateMachine):
    """Clients come, go, die and are slow, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.clients = Clients(Terms(True, 1, 5))
        self.settles: dict[int, ClientId] = {}

    names = st.sampled_from([ClientId(name) for name in "abcdef"])

    @rule(client=names, can_pull=st.booleans())
    def registers(self, client: ClientId, can_pull: bool) -> None:
        self.clients.registers(client, supports=BOTH if can_pull else (POP,))

    @rule(client=names)
    def beats(self, client: ClientId) -> None:
        if client in self.clients.now.sessions:
            self.clients.beats(client)

    @rule(client=names)
    def ends(self, client: ClientId) -> None:
        self.clients.end(client)

    @rule()
    def all_come_to_rest(self) -> None:
        for _ in range(3):
            self.clients.all_beat()
        rested = self.clients.now
        self.clients.all_beat()
        assert self.clients.now is rested
        members = [client for client, one in rested.sessions.items() if PULL in one.supports]
        counts = Counter({client: len(self.clients.queues()[client]) for client in members})
        if members:
            assert sum(counts.values()) == 5
            assert max(counts.values()) - min(counts.values()) <= 1

    @invariant()
    def nobody_has_what_another_may_yet_settle(self) -> None:
        """A client may settle the messages of its last assignment until it has confirmed the release, or ended."""
        now = self.clients.now
        for number, one in now.holdings.items():
            assert one.client_id in now.sessions
            assert PULL in now.sessions[one.client_id].supports
            assert one.since <= now.sessions[one.client_id].generation <= now.generation
            assert sum(number in queues for queues in self.clients.queues().values()) <= 1
        assert bool(now.holdings) == any(PULL in one.supports for one in now.sessions.values())
        assert len(now.holdings) in (0, 5)
        again = ended(now, self.clients.terms, [], now.generation + 1)
        assert again is now or not now.generation, "what was arranged is arranged the same"


TestComings = Comings.TestCase
TestComings.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
