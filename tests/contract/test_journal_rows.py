"""What an ack is written from: the row of its hand-out, where there is one, and never that of another."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from popgate.adapters.journal_parquet.places import place_at
from popgate.adapters.journal_parquet.rows import REMEMBERED_ROWS
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


def leased(name: str, at: float, **fields: Any) -> Subject:
    message = Message(CopyId(name), f"id of {name}", b"12345", {}, "key", at - 9)
    return Subject(CopyId(name), message, leased_at=at, client="ann")._replace(**fields)


def of_message(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in NOT_OF_A_MESSAGE}


async def written(folder: Path, clock: ManualClock, *told: tuple[EventKind, Subscription, list[Subject]]) -> list[Row]:
    """The rows of these events, each told a second after the one before."""
    async with started(partial(place_at, str(folder)), clock) as journal:
        for kind, of, many in told:
            journal.record(kind, of, many, clock.wall())
            clock.advance(1.0)
    return [row for row in rows_of(folder) if row["event"] != "journal_started"]


async def test_an_ack_has_what_was_known_at_the_hand_out(tmp_path: Path, clock: ManualClock) -> None:
    at = clock.wall()
    many = [leased(name, at, queue_index=number) for number, name in enumerate("abc")]
    acked = [one._replace(message=None) for one in many]  # their bodies were dropped to save memory
    rows = await written(tmp_path, clock, (EventKind.DELIVERED, NAME, many), (EventKind.ACKED, NAME, acked))
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


async def test_an_ack_long_after_the_hand_out_has_its_row_all_the_same(tmp_path: Path, clock: ManualClock) -> None:
    at = clock.wall()
    told = [(EventKind.DELIVERED, NAME, [leased("a", at), leased("b", at)])]
    for first in range(0, 3 * REMEMBERED_ROWS, 256):
        told.append((EventKind.DELIVERED, NAME, [leased(f"{first + one}", at) for one in range(256)]))
    told.append((EventKind.ACKED, NAME, [leased("a", at), leased("b", at)]))
    rows = await written(tmp_path, clock, *told)
    assert [(row["event"], row["message_id"], row["client"]) for row in rows[-2:]] == [
        ("acked", "id of a", "ann"),
        ("acked", "id of b", "ann"),
    ]


async def test_values_of_any_kind_stand_beside_each_other(tmp_path: Path, clock: ManualClock) -> None:
    """Columns with a value in each row, in some, in none; and ids in which anything may stand."""
    at = clock.wall()
    ids = ["", "plain", "with\0zero", "\0", "ü\U0001f600", "x" * 300, "two\nlines"]
    many = [
        Subject(CopyId(f"c{number}"), Message(CopyId(f"c{number}"), one, b"", {}, one or None, at), client=one)
        for number, one in enumerate(ids)
    ]
    many.append(Subject(CopyId("none")))
    alone = [[one] for one in many]
    told = [(EventKind.DELIVERED, NAME, some) for some in [many, *alone]]
    rows = await written(tmp_path, clock, *told)
    wanted = [(one or None, one or None, one) for one in ids] + [(None, None, None)]
    found = [(row["message_id"], row["ordering_key"], row["client"]) for row in rows]
    assert found == wanted * 2
    assert [row["size_bytes"] for row in rows] == ([0] * len(ids) + [None]) * 2
