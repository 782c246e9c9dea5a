"""Names of which one of several substitutes is taken: every interleaving of two clients and a node that returns."""

from collections.abc import Awaitable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import pytest

from popgate.domain.exclusive_names import ExclusiveNames, NameState, take_first

FREE = NameState.FREE
NAMES = ("name", "substitute")
STEPS_MAX = 12
"""Maximum number of steps; more than two clients need."""


@dataclass
class Server:
    """RabbitMQ's side: which client has which name, and whose node is lost."""

    holders: dict[str, str] = field(default_factory=dict[str, str])
    lost: set[str] = field(default_factory=set[str])

    def node_returns(self) -> None:
        """Let the lost node return; it deletes the exclusive queues that it had."""
        self.holders = {name: holder for name, holder in self.holders.items() if holder not in self.lost}
        self.lost.clear()

    def alive(self) -> set[str]:
        return set(self.holders.values()) - self.lost


class Turn:
    """An awaitable that lets others run first."""

    def __await__(self) -> Generator[None]:
        yield


class Asked:
    """A client's side: each request is one step, at the end of which the server answers."""

    def __init__(self, server: Server, client: str) -> None:
        self._server = server
        self._client = client

    async def declare(self, name: str) -> bool:
        await Turn()
        return self._server.holders.setdefault(name, self._client) == self._client

    async def look(self, names: Sequence[str]) -> list[NameState]:
        await Turn()
        holders = [self._server.holders.get(name) for name in names]
        lost = self._server.lost
        return [FREE if one is None else NameState.LOST if one in lost else NameState.ALIVE for one in holders]

    async def delete(self, name: str) -> None:
        await Turn()
        del self._server.holders[name]


_conforms: type[ExclusiveNames] = Asked


class Client:
    """A client that takes a name, step by step."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self.taken: str | None = None
        self._steps = self._take(take_first(NAMES, Asked(server, name))).__await__()
        self.is_done = False

    async def _take(self, taking: Awaitable[str | None]) -> None:
        self.taken = await taking

    def step(self) -> None:
        if not self.is_done and next(self._steps, self) is self:
            self.is_done = True


def schedules() -> list[tuple[set[int], int]]:
    """Generate the steps at which the first client runs, not the second one; and the step before which the lost node
    returns.
    """
    places = [set(chosen) for count in range(STEPS_MAX + 1) for chosen in combinations(range(STEPS_MAX), count)]
    return [(chosen, returns) for chosen in places for returns in range(STEPS_MAX + 1)]


def test_two_clients_never_both_have_it_whenever_the_lost_node_comes_back() -> None:
    outcomes: set[tuple[str | None, str | None]] = set()
    for chosen, returns in schedules():
        server = Server(holders={"name": "former"}, lost={"former"})
        one, two = Client(server, "one"), Client(server, "two")
        for at in range(STEPS_MAX * 2):
            if at == returns:
                server.node_returns()
            (one if at in chosen or two.is_done else two).step()
            both_have = one.taken is not None and two.taken is not None
            assert not both_have, (chosen, returns)
        assert one.is_done
        assert two.is_done
        assert server.alive() - {"former"} == {client.name for client in (one, two) if client.taken is not None}
        outcomes.add((one.taken, two.taken))
    assert {("name", None), (None, "name"), ("substitute", None), (None, "substitute"), (None, None)} == outcomes


def run(server: Server) -> str | None:
    client = Client(server, "me")
    while not client.is_done:
        client.step()
    return client.taken


@pytest.mark.parametrize(
    ("holders", "lost", "taken"),
    [
        ({}, set[str](), "name"),
        ({"name": "other"}, set[str](), None),
        ({"name": "other"}, {"other"}, "substitute"),
        ({"substitute": "other"}, set[str](), None),
        ({"substitute": "other"}, {"other"}, "name"),
        ({"name": "a", "substitute": "b"}, {"a"}, None),
        ({"name": "a", "substitute": "b"}, {"a", "b"}, None),
    ],
)
def test_the_first_name_is_taken_that_nobody_alive_has(
    holders: dict[str, str], lost: set[str], taken: str | None
) -> None:
    assert run(Server(dict(holders), lost)) == taken
