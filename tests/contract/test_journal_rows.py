"""The source of an ack's row: the row of its hand-out, if there is one, and never that of another."""

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from popgate.adapters.journal_parquet.columns import row_columns
from popgate.adapters.journal_parquet.places import place_at
from popgate.adapters.journal_parquet.rows import REMEMBERED_VALUES, SHARED_VALUES, WIDTH, SharedRows
from popgate.domain.message import Message
from popgate.domain.names import CopyId, GroupName, Subscription
from popgate.ports.journal import EventKind
from popgate.runtime.clocks import ManualClock
from support.journal_files import Row, rows_of
from support.journals import NAME, TOPIC, Subject, started

OTHER = Subscription(TOPIC, GroupName("other"))
NOT_OF_A_MESSAGE = ("at", "event", "group", "held_seconds", "journal_seq")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=1_700_000_000.0)


class Watched(str):
    """A text whose deletion can be observed."""

    __slots__ = ("__weakref__",)


def leased(name: str, at: float, **fields: Any) -> Subject:
    message = Message(CopyId(name), f"id of {name}", b"12345", {}, "key", at - 9)
    return Subject(CopyId(name), message, leased_at=at, client="ann")._replace(**fields)


def of_message(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in NOT_OF_A_MESSAGE}


async def written(
    folder: Path, clock: ManualClock, *told: tuple[EventKind, Subscription, list[Subject]], events: int = 1_000
) -> list[Row]:
    """Write these events, each recorded a second after the one before, in files of limited size; return their rows."""
    async with started(partial(place_at, str(folder)), clock, events=events) as journal:
        for kind, of, many in told:
            journal.record(kind, of, many, clock.wall())
            clock.advance(1.0)
    return [row for row in rows_of(folder) if row["event"] != "journal_started"]


@pytest.mark.parametrize("events", [1, 1_000])
async def test_an_ack_has_what_was_known_at_the_hand_out(tmp_path: Path, clock: ManualClock, events: int) -> None:
    at = clock.wall()
    many = [leased(name, at, queue_index=number) for number, name in enumerate("abc")]
    acked = [one._replace(message=None) for one in many]  # their bodies were dropped to save memory
    rows = await written(
        tmp_path, clock, (EventKind.DELIVERED, NAME, many), (EventKind.ACKED, NAME, acked), events=events
    )
    delivered, settled = rows[:3], rows[3:]
    assert [of_message(row) for row in settled] == [of_message(row) for row in delivered]
    assert [row["message_id"] for row in settled] == ["id of a", "id of b", "id of c"]
    assert [(row["event"], row["held_seconds"]) for row in settled] == [("acked", 1.0)] * 3


@pytest.mark.parametrize("acked", ["a", "ab", "acb", "bc", "cba", "abcd"])
async def test_an_ack_of_others_than_were_handed_out_together_has_their_own_rows(
    tmp_path: Path, clock: ManualClock, acked: str
) -> None:
    of_name = {name: leased(name, clock.wall(), queue_index=number) for number, name in enumerate("abcd")}
    told = [of_name[name] for name in acked]
    rows = await written(
        tmp_path, clock, (EventKind.DELIVERED, NAME, [of_name[one] for one in "abc"]), (EventKind.ACKED, NAME, told)
    )
    assert [(row["copy_id"], row["message_id"], row["queue"]) for row in rows[3:]] == [
        (name, f"id of {name}", "abcd".index(name)) for name in acked
    ]


async def test_an_ack_has_its_own_hand_out_and_not_an_earlier_one(tmp_path: Path, clock: ManualClock) -> None:
    first = [leased("a", clock.wall()), leased("b", clock.wall())]
    again = first[1]._replace(leased_at=clock.wall() + 1, client="bob", delivery_count=2)
    rows = await written(
        tmp_path,
        clock,
        (EventKind.DELIVERED, NAME, first),
        (EventKind.DELIVERED, NAME, [again]),
        (EventKind.ACKED, NAME, [first[0], again]),
    )
    assert [(row["client"], row["delivery_count"], row["held_seconds"]) for row in rows[3:]] == [
        ("ann", 1, 2.0),
        ("bob", 2, 1.0),
    ]


async def test_two_groups_that_get_a_copy_at_the_same_moment_are_told_apart(tmp_path: Path, clock: ManualClock) -> None:
    """All groups of a topic have the same copies, and a store may lease to several of them at one moment."""
    one, other = leased("a", clock.wall()), leased("a", clock.wall(), client="bob", queue_index=0, delivery_count=4)
    rows = await written(
        tmp_path,
        clock,
        (EventKind.DELIVERED, NAME, [one]),
        (EventKind.DELIVERED, OTHER, [other]),
        (EventKind.ACKED, NAME, [one]),
        (EventKind.ACKED, OTHER, [other]),
    )
    assert [(row["group"], row["client"], row["queue"], row["delivery_count"]) for row in rows[2:]] == [
        ("g", "ann", 3, 1),
        ("other", "bob", 0, 4),
    ]


def test_a_hand_out_has_the_rows_of_its_ack_until_enough_has_happened_since() -> None:
    rows, many = SharedRows(), [leased("a", 1.0), leased("b", 1.0)]
    for others, is_found in ((0, True), (REMEMBERED_VALUES, True), (3 * REMEMBERED_VALUES, False)):
        given = rows.of(EventKind.DELIVERED, NAME, many)
        for number in range(others // WIDTH):
            rows.of(EventKind.PUBLISHED, NAME, [leased(f"{number}", 0.0)])
        found = rows.of(EventKind.ACKED, NAME, many)
        assert (found[0] is given[0] and found[1] == given[1]) is is_found, others
        again = rows.of(EventKind.ACKED, NAME, many)
        assert again[0] is not given[0] or again[1] != given[1], "it ended"


def test_hand_outs_that_are_never_acked_keep_little_of_what_happened_meanwhile() -> None:
    """Each row keeps the list of values that contains it, with everything that others wrote there."""
    rows, seen = SharedRows(), weakref.WeakSet[Watched]()

    def happens(number: int) -> None:
        names = [Watched(f"{number} {other}") for other in range(SHARED_VALUES // WIDTH)]
        seen.update(names)
        rows.of(EventKind.DELIVERED, NAME, [leased(f"{number}", 1.0)])
        rows.of(EventKind.PUBLISHED, NAME, [Subject(CopyId(name)) for name in names])

    for number in range(60):
        happens(number)
    assert len(seen) * WIDTH <= 2 * REMEMBERED_VALUES + 2 * SHARED_VALUES


def test_rows_that_several_calls_have_are_made_into_columns_once() -> None:
    rows = SharedRows()
    many = [leased("a", 1.0), leased("b", 1.0)]
    calls = [rows.of(kind, NAME, many) for kind in (EventKind.DELIVERED, EventKind.RELEASED)]
    columns, first_rows = row_columns([(*call, 2) for call in (*calls, *calls)])
    assert columns.copy_id.to_pylist() == ["a", "b"] * 2
    assert first_rows == [0, 2, 0, 2]


async def test_a_message_that_was_not_here_at_the_hand_out_is_known_at_its_ack(
    tmp_path: Path, clock: ManualClock
) -> None:
    """A lease group that is leased again has no bodies yet: they come before it is read."""
    known = [leased("a", clock.wall()), leased("b", clock.wall())]
    given = [known[0], known[1]._replace(message=None)]
    rows = await written(tmp_path, clock, (EventKind.DELIVERED, NAME, given), (EventKind.ACKED, NAME, known))
    assert [row["message_id"] for row in rows] == ["id of a", None, "id of a", "id of b"]
    assert [row["size_bytes"] for row in rows] == [5, None, 5, 5]


@pytest.mark.parametrize("has_all", [True, False])
async def test_values_of_any_kind_stand_beside_each_other(tmp_path: Path, clock: ManualClock, has_all: bool) -> None:
    """Columns with a value in each row, in some, in none; and ids with arbitrary characters."""
    at = clock.wall()
    ids = ["", "plain", "with\0zero", "\0", "ü\U0001f600", "x" * 300, "two\nlines"]
    many = [
        Subject(CopyId(f"c\0{number}"), Message(CopyId(f"{number}"), one, b"", {}, one, at), client=one)
        for number, one in enumerate(ids)
    ]
    wanted: list[tuple[Any, ...]] = [(one or None, one, one, 0) for one in ids]
    if not has_all:
        many.append(Subject(CopyId("none")))
        wanted.append((None, None, None, None))
    told = [(EventKind.DELIVERED, NAME, some) for some in [many, many]]
    rows = await written(tmp_path, clock, *told, events=1)  # each in a separate file: the first event has no values
    found = [(row["message_id"], row["ordering_key"], row["client"], row["size_bytes"]) for row in rows]
    assert found == wanted * 2
    assert [row["copy_id"] for row in rows] == [one.copy_id for one in many] * 2
