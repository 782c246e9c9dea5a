"""Builds the arguments of the scripts that grant leases, and interprets the scripts' answers.

A batch is packed into one argument. A value that several entries of the batch share appears in it only once. In the
same way, an answer contains each record only once.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from popgate.adapters.redis.lease_groups import accepted, key_of
from popgate.adapters.redis.records import MICROSECONDS, microseconds, read_records, subscription_key
from popgate.domain.lease import GrantAnswer, GrantStatus, LeaseRecord, remaining_seconds
from popgate.ports.leases import GrantRequest

A = TypeVar("A")
T = TypeVar("T", bound=Hashable)

_GRANTED = (
    GrantStatus.GRANTED,
    GrantStatus.HELD,
    GrantStatus.EXHAUSTED,
    GrantStatus.MOVING,
    GrantStatus.SETTLED,
    GrantStatus.FENCED,
    GrantStatus.FULL,
    GrantStatus.BEHIND,
    GrantStatus.WRONG_MODE,
)
"""The results of a grant. The index of a status is its number in the answers of scripts."""
_INVISIBLE = frozenset({GrantStatus.GRANTED, GrantStatus.HELD})


def grant_call(request: GrantRequest, limit: tuple[int, str, int] | None = None) -> tuple[Any, ...]:
    """Return the name of the script that grants ``request``, and its arguments (``scripts/granting.lua``)."""
    entries, group = request.entries, request.group
    queues, queue_of = distinct([entry.queue for entry in entries])
    copy_ids = [entry.copy_id for entry in entries]
    lines = [entry.line for entry in entries]
    asks, ask_of = distinct([(entry.epoch, entry.earlier_deliveries) for entry in entries])
    call: tuple[object, ...] = ("grant",) if limit is None else ("grant_within", limit, False)
    if group is not None:
        call = "grant_for_group", key_of(group.key), group.builder, limit or False
    return (
        *call,
        subscription_key(request.subscription),
        queues,
        request.lease_id,
        microseconds(request.invisibility_seconds),
        False if request.max_deliveries is None else request.max_deliveries,
        request.mode_generation,
        queue_of,
        copy_ids,
        first_of(copy_ids, queue_of),
        asks,
        ask_of,
        any(lines) and lines,
        False if request.attempt_id is None else request.attempt_id,
        request.expired_attempts or False,
    )


def grant_answers(request: GrantRequest, answer: list[Any]) -> tuple[list[GrantAnswer], Sequence[Any]]:
    """Return one answer for each entry of ``request``, in order, and the additional values of the script's answer.

    Raises: LeaseGroupAcked, Conflict.
    """
    group = request.group
    time, statuses, places, *more, rows = answer if group is None else accepted(answer, group.key)
    now, records = time / MICROSECONDS, read_records(rows)

    def answer_of(status: GrantStatus, record: LeaseRecord | None) -> GrantAnswer:
        remaining = 0.0 if record is None or status not in _INVISIBLE else remaining_seconds(record, now)
        return GrantAnswer(status, remaining, record)

    return each_answer(
        len(request.entries), statuses, places, lambda status, place: answer_of(_GRANTED[status], records[place])
    ), more


def first_of(copy_ids: Sequence[str], queue_of: list[int] | bool) -> list[int] | bool:
    """Return for each entry the index (from 1) of the first entry for the same copy, or False if all copies differ."""
    if len(set(copy_ids)) == len(copy_ids):
        return False
    copies = copy_ids if isinstance(queue_of, bool) else [*zip(queue_of, copy_ids, strict=True)]
    numbers: dict[object, int] = {}
    return [numbers.setdefault(copy, number) for number, copy in enumerate(copies, 1)]


def each_answer(
    count: int, statuses: Sequence[int] | int, places: Sequence[int] | int, answer_of: Callable[[int, int], A]
) -> list[A]:
    """Return an answer for each of ``count`` entries. Entries with the same status and place share one answer object.

    If ``statuses`` or ``places`` is a single number, it applies to all entries.
    """
    if isinstance(statuses, int) and isinstance(places, int):
        return [answer_of(statuses, places)] * count
    of = [*zip(as_list(statuses, count), as_list(places, count), strict=True)]
    answers = {key: answer_of(*key) for key in set(of)}
    return [answers[key] for key in of]


def as_list(numbers: Sequence[int] | int, count: int) -> Sequence[int]:
    return [numbers] * count if isinstance(numbers, int) else numbers


def distinct(values: list[T]) -> tuple[list[T], list[int] | bool]:
    """Return the distinct ``values``, and for each of ``values`` its index (from 1) in the distinct ones.

    If all ``values`` are equal, return False in place of the indexes.
    """
    if not values or values.count(values[0]) == len(values):
        return values[:1], False
    numbers: dict[T, int] = {}
    of = [numbers.setdefault(value, len(numbers) + 1) for value in values]
    return list(numbers), of
