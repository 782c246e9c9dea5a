"""What the limiter of a process' connections decides, where a socket can't show it in a short time."""

import asyncio
import time
from collections.abc import Sequence

import pytest

from popgate.api import connection_limiter
from popgate.api.connection_limiter import Body, ConnectionLimiter, HttpLimits
from popgate.domain.errors import PopgateError


class Client:
    """A connection that records how it ends."""

    def __init__(self) -> None:
        self.body: Body | None = None
        self.reads = True
        self.waits = False
        self.ended: list[str] = []
        self.user: object | None = None
        self.unsent_bytes = 0
        self.position = 0

    def refuse(self, error: PopgateError) -> None:
        self.ended.append(error.code)

    def retire(self) -> bool:
        self.ended.append("retired")
        return True

    def reached(self) -> int:
        return self.position

    def abort(self) -> None:
        self.ended.append("aborted")


async def test_the_time_in_which_popgate_reads_nothing_of_a_body_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection_limiter, "SWEEP_SECONDS", 0.05)
    known = ConnectionLimiter(HttpLimits(head_seconds=0.5, body_bytes_per_second_min=1_000))
    client = Client()
    known.arrived(client)
    known.is_served(client)
    known.body_grew(client, 10, 10)
    client.reads = False
    await asyncio.sleep(1.0)
    client.reads = True
    await asyncio.sleep(0.1)
    assert client.ended == []
    async with asyncio.timeout(10):
        while not client.ended:  # noqa: ASYNC110 - the limiter has no signal for it
            await asyncio.sleep(0.01)
    assert client.ended == ["request_timeout"], "after that, its client was slow"
    known.left(client)


async def test_a_pause_in_reading_does_not_make_a_body_look_younger_than_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds its memory all the same."""
    monkeypatch.setattr(connection_limiter, "SWEEP_SECONDS", 0.4)
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    slow, quick = Client(), Client()
    for client in (slow, quick):
        known.arrived(client)
        known.is_served(client)
    known.body_grew(slow, 60, 60)
    slow.reads = False
    await asyncio.sleep(0.3)
    known.body_grew(quick, 30, 30)
    await asyncio.sleep(0.2)
    known.body_grew(quick, 30, 30)
    assert (slow.ended, quick.ended) == (["overloaded"], [])
    for client in (slow, quick):
        known.left(client)


async def test_answered_connections_whose_bodies_are_incomplete_make_room_first() -> None:
    known = ConnectionLimiter(HttpLimits(connections_max=3))
    silent, early, later = Client(), Client(), Client()
    for client in (silent, early, later):
        known.arrived(client)
    await asyncio.sleep(2 * connection_limiter.NEW_SECONDS)
    for client in (early, later):
        known.is_served(client)
        known.body_grew(client, 10, 10)
        known.body_answered(client)
        known.says_farewell(client)
    newcomers = [Client() for _ in range(3)]
    expected: list[tuple[list[str], list[str], list[str]]] = [
        ([], ["aborted"], []),
        ([], ["aborted"], ["aborted"]),
        (["aborted"], ["aborted"], ["aborted"]),
    ]
    for newcomer, ended in zip(newcomers, expected, strict=True):
        known.arrived(newcomer)
        assert (silent.ended, early.ended, later.ended) == ended
    for client in (silent, early, later, *newcomers):
        known.left(client)


async def test_a_body_that_is_discarded_takes_no_memory_and_its_end_makes_the_connection_idle() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100, connections_max=1))
    client, next_client, newcomer = Client(), Client(), Client()
    known.arrived(client)
    known.is_served(client)
    known.body_grew(client, 90, 90)
    known.body_answered(client)
    known.says_farewell(client)
    known.discarded_rest(client)
    known.body_grew(next_client, 90, 90)
    assert (client.ended, next_client.ended) == ([], [])
    await asyncio.sleep(2 * connection_limiter.NEW_SECONDS)
    known.arrived(newcomer)
    assert client.ended == ["aborted"]
    for one in (client, next_client, newcomer):
        known.left(one)


async def test_of_large_requests_those_of_the_principal_that_holds_most_make_room() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    busy, *parked, unproven, upload = clients = [Client() for _ in range(6)]
    for client, user in zip(clients, ["bob", "bob", "bob", "bob", None, "alice"], strict=True):
        known.arrived(client)
        known.is_served(client)
        client.user = user
    for client in (busy, *parked):
        known.holds(client, 20)  # complete
        client.waits = client is not busy
    known.body_grew(unproven, 10, 10)
    known.body_grew(upload, 10, 10)
    await asyncio.sleep(0.1)
    for _ in range(3):
        known.body_grew(upload, 10, 10)
    assert (busy.ended, unproven.ended, upload.ended) == ([], [], [])
    assert sum(one.ended == ["aborted"] for one in parked) == 2
    known.body_answered(busy)
    known.body_grew(unproven, 80, 80)
    assert (unproven.ended, upload.ended) == (["overloaded"], [])
    leave(known, *clients)


async def test_bytes_that_only_separate_the_parts_of_a_body_take_no_memory() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    chunked, upload = Client(), Client()
    for client in (chunked, upload):
        known.arrived(client)
        known.is_served(client)
    known.body_grew(chunked, 1_000, 10)
    known.body_grew(upload, 90, 90)
    assert (chunked.ended, upload.ended) == ([], [])
    leave(known, chunked, upload)


async def waiting(known: ConnectionLimiter, sizes: Sequence[int], users: Sequence[object | None] = ()) -> list[Client]:
    """Return clients that have not read answers of these sizes for some seconds."""
    clients = [Client() for _ in sizes]
    for client, size, user in zip(clients, sizes, users or [None] * len(sizes), strict=True):
        known.arrived(client)
        known.is_served(client)
        client.unsent_bytes, client.user = size, user
        known.must_wait(client)
    await asyncio.sleep(1.2)
    return clients


def leave(known: ConnectionLimiter, *clients: Client) -> None:
    for client in clients:
        known.left(client)


async def test_answers_that_clients_do_not_read_take_no_more_memory_than_allowed() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    small, large = await waiting(known, [30, 60])
    (last,) = await waiting(known, [50])
    assert (small.ended, large.ended, last.ended) == ([], ["aborted"], [])
    leave(known, small, large, last)


async def test_of_unread_answers_those_of_the_principal_that_holds_most_are_cut_off() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    *hostile, slow = await waiting(known, [30, 30, 31, 40], ["bob", "bob", "bob", "alice"])
    await asyncio.sleep(0.6)
    assert slow.ended == []
    assert sum(one.ended == ["aborted"] for one in hostile) == 1
    leave(known, slow, *hostile)


async def test_no_principal_is_cut_off_because_another_one_holds_most_and_reads_at_a_good_rate() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    quick, slow, *others = await waiting(known, [1, 20, 20, 20], ["bob", "alice", None, None])
    quick.unsent_bytes, quick.position = 90, 1 << 30
    await asyncio.sleep(0.6)
    assert [one.ended for one in (quick, slow, *others)] == [[]] * 4
    quick.unsent_bytes = 150
    await asyncio.sleep(0.6)
    assert [one.ended for one in (quick, slow, *others)] == [["aborted"], [], [], []]
    leave(known, quick, slow, *others)


async def test_many_unread_answers_are_ended_in_one_check_without_a_long_pause() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=10_000))
    clients = await waiting(known, [1] * 10_000, ["bob", "alice"] * 5_000)
    for client in clients:
        client.unsent_bytes = 2
    began = time.process_time()
    known.must_wait(clients[0])
    assert time.process_time() - began < 5
    assert sum(client.ended == ["aborted"] for client in clients) == 5_000
    leave(known, *clients)


async def test_a_client_that_reads_at_a_good_rate_is_spared_up_to_twice_the_memory() -> None:
    known = ConnectionLimiter(HttpLimits(bodies_bytes_max=100))
    quick, stuck = Client(), Client()
    for client, size in ((quick, 90), (stuck, 40)):
        known.arrived(client)
        known.is_served(client)
        client.unsent_bytes = size
        known.must_wait(client)
    for _ in range(20):
        quick.position += 1 << 20
        await asyncio.sleep(0.1)
    assert (quick.ended, stuck.ended) == ([], ["aborted"])
    quick.unsent_bytes = 190
    await asyncio.sleep(1.0)
    assert quick.ended == []
    quick.unsent_bytes = 210
    await asyncio.sleep(1.0)
    assert quick.ended == ["aborted"]
    leave(known, quick, stuck)


async def test_clients_without_a_key_that_read_slowly_make_room_for_others() -> None:
    known = ConnectionLimiter(HttpLimits(connections_max=3))
    with_key, early, later = await waiting(known, [10, 10, 10], ["alice", None, None])
    for client in (with_key, early, later):
        client.position = 1
    known.must_wait(later)  # their progress is noted
    newcomers = [Client() for _ in range(3)]
    for newcomer in newcomers:
        known.arrived(newcomer)
        known.is_served(newcomer)
    assert (with_key.ended, early.ended, later.ended) == ([], ["aborted"], ["aborted"])
    assert [newcomer.ended for newcomer in newcomers] == [[], [], ["overloaded"]]
    leave(known, with_key, early, later, *newcomers)


async def test_of_few_permitted_connections_one_makes_room_too() -> None:
    known = ConnectionLimiter(HttpLimits(connections_max=1))
    idle, newcomer = Client(), Client()
    known.arrived(idle)
    assert known.room == 1
    known.arrived(newcomer)
    assert (idle.ended, newcomer.ended) == (["aborted"], [])
    leave(known, idle, newcomer)


async def test_a_connection_whose_client_does_not_read_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limiter, "NEW_SECONDS", 0.1)
    monkeypatch.setattr(connection_limiter, "FAREWELL_SECONDS", 1.0)
    known = ConnectionLimiter(HttpLimits(connections_max=2))
    slow, stuck = await waiting(known, [10, 10])
    known.is_idle(slow)  # its answer is written, but not read
    slow.position = 1
    await asyncio.sleep(0.6)
    newcomers = [Client() for _ in range(3)]
    for newcomer in newcomers:
        known.arrived(newcomer)
    assert (slow.ended, stuck.ended) == ([], ["aborted"])
    leave(known, slow, stuck, *newcomers)
