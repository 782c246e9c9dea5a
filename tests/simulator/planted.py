"""Deliberate bugs that break popgate's central guarantees; the simulation has to find them."""
# pyright: reportPrivateUsage=false
# A planted bug may reach into private code.

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha1
from itertools import count
from typing import Any
from unittest.mock import patch

from popgate.adapters.redis.scripts import Script, script
from popgate.adapters.sqlite import opening
from popgate.adapters.sqlite.group_commit import Committer, PendingJob
from popgate.domain.message import Message
from popgate.domain.names import TopicName
from popgate.engine.dead_letters.dead_moves import DeadMoves
from popgate.engine.lease.moves import Mover
from popgate.engine.queue.buffered import BufferedMessage
from popgate.engine.queue.host import QueueHost
from popgate.engine.queue.ordering_keys import OrderingKeys
from popgate.engine.settle.orders import SettleOrder, SettleResult, Verb
from popgate.engine.settle.settling import Settler
from popgate.engine.subscription import counting
from popgate.ports.broker import Outgoing, PublishOutcome, PublishStatus
from popgate.ports.peers import QueueCounts
from popgate.runtime.shared_clock import SharedClock
from support.audit_rules import Kind


@contextmanager
def acked_before_it_is_written() -> Generator[None]:
    """Answer an ack before the store has it."""
    settle = Settler.settle

    async def hasty(
        self: Settler, subscription: Any, verb: Verb, orders: Sequence[SettleOrder], **options: Any
    ) -> list[SettleResult]:
        if verb is not Verb.ACK:
            return await settle(self, subscription, verb, orders, **options)

        async def later() -> None:
            await asyncio.sleep(0.05)
            await settle(self, subscription, verb, orders, **options)

        self._context.background.spawn(later(), name="write")
        return [SettleResult("acked") for _ in orders]

    with patch.object(Settler, "settle", hasty):
        yield


@contextmanager
def letters_get_new_ids() -> Generator[None]:
    """Give a letter a new id when its move is repeated; the confirm of every second letter is lost to cause a
    repeat.
    """
    letter, stored = Mover._dead_letter, Mover._stored
    numbers = count()

    def another(self: Mover, *arguments: Any) -> Message:
        return letter(self, *arguments)._replace(copy_id=self._context.mint_copy_id())

    async def unsure(self: Mover, letters: Sequence[Message]) -> list[PublishOutcome]:
        lost = PublishOutcome(status=PublishStatus.FAILED, detail="its confirm was lost")
        return [lost if next(numbers) % 2 else outcome for outcome in await stored(self, letters)]

    with patch.object(Mover, "_dead_letter", another), patch.object(Mover, "_stored", unsure):
        yield


@contextmanager
def redrives_get_new_ids() -> Generator[None]:
    """Give a copy a new id when its redrive is repeated; the confirm of every second one is lost to cause a repeat."""
    outgoing, publish = DeadMoves._outgoing, DeadMoves._publish
    numbers = count()

    def another(self: DeadMoves, move: Any) -> tuple[TopicName, Outgoing]:
        topic, copy = outgoing(self, move)
        return topic, replace(copy, message=copy.message._replace(copy_id=self._context.mint_copy_id()))

    async def unsure(self: DeadMoves, moves: Any) -> list[PublishOutcome]:
        lost = PublishOutcome(status=PublishStatus.FAILED, detail="its confirm was lost")
        return [lost if next(numbers) % 2 else outcome for outcome in await publish(self, moves)]

    with patch.object(DeadMoves, "_outgoing", another), patch.object(DeadMoves, "_publish", unsure):
        yield


@contextmanager
def keys_are_overlooked() -> Generator[None]:
    """Hand out a message without waiting for the earlier ones of its key."""
    append = OrderingKeys.append

    def jump(self: OrderingKeys, message: BufferedMessage, key: str) -> None:
        append(self, message, key)
        message.is_head = True

    with patch.object(OrderingKeys, "append", jump):
        yield


@contextmanager
def leases_are_not_counted() -> Generator[None]:
    """Count no message as in flight in ``GET S``."""
    counts = counting._counts

    def fewer(host: QueueHost, dead_held: int) -> QueueCounts:
        return counts(host, dead_held)._replace(in_flight=0)

    with patch.object(counting, "_counts", fewer):
        yield


@contextmanager
def _other_script(name: str, line: str, instead: str) -> Generator[None]:
    assert line.encode() in script(name).text, f"there is no {line!r} to be replaced"

    def changed(wanted: str) -> Script:
        if wanted != name:
            return script(wanted)
        text = script(name).text.replace(line.encode(), instead.encode())
        return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())

    with patch("popgate.adapters.redis.connection.script", changed):
        yield


def in_script(name: str, line: str, instead: str) -> Callable[[], AbstractContextManager[None]]:
    """Plant a bug in the script that Redis runs as ``name``."""
    return partial(_other_script, name, line, instead)


_VISIBLE_AT = "local visible_at = rule.moves_deadline and now + duration or r.visible_at"
_IS_IN_TIME = "if not rule.from[r.state] or"
_FOR_EVER = f"{_VISIBLE_AT} if action == 'release' then visible_at = now + 3e8 end"

PLANTED: dict[Kind, Callable[[], AbstractContextManager[None]]] = {
    Kind.FATE: in_script("settle", "{ to = RELEASED, from = from(LEASED", "{ to = ACKED, from = from(LEASED"),
    Kind.OVERLAP: in_script("grant", "= now + invisibility, count", "= now + invisibility / 2, count"),
    Kind.CAME_AGAIN: in_script("settle", "call_all('HSET', key_of('settled', queue), settled)", ""),
    Kind.TAKEN: in_script("settle", _IS_IN_TIME, f"{_IS_IN_TIME} action == 'ack' and r.visible_at <= now or"),
    Kind.COUNT: in_script("grant", "count = count + 1,", "count = math.max(count, 1),"),
    Kind.ORDER: keys_are_overlooked,
    Kind.ATTEMPT: in_script("find_attempt", "if record.lease_id == lease_id then", "if false then"),
    Kind.DEDUP: in_script("reserve", "if not known or known_at <= now - window then", "if true then"),
    Kind.MOVES: letters_get_new_ids,
    Kind.REFUSED: in_script(
        "settle", "{ to = LEASED, from = from(LEASED, EXPIRED)", "{ to = LEASED, from = from(EXPIRED)"
    ),
    Kind.DRAIN: in_script("settle", _VISIBLE_AT, _FOR_EVER),
    Kind.STATE: leases_are_not_counted,
}
"""Bugs by the rule that each breaks; a bug may break other rules, too."""


any_lease_may_settle = in_script("settle", "r.lease_id ~= lease_id and not rule.of_any_lease", "false")
"""The store settles without checking whose lease it is."""


@contextmanager
def each_by_its_own_clock() -> Generator[None]:
    """Compare times between proxies by each machine's own clock."""

    def own(self: SharedClock) -> float:
        return self._own.wall()

    with patch.object(SharedClock, "wall", own):
        yield


# ---------------------------------------------------------------- of the embedded store


@contextmanager
def nothing_is_synced() -> Generator[None]:
    """Answer when data is with the operating system, but not on the disk."""
    tuning = tuple(pragma.replace("synchronous = FULL", "synchronous = OFF") for pragma in opening.TUNING)
    assert tuning != opening.TUNING
    with patch.object(opening, "TUNING", tuning):
        yield


@contextmanager
def answered_before_it_is_committed() -> Generator[None]:
    """Answer a group of writes when it has run, and commit it with the next one."""

    def hasty(self: Committer, group: Sequence[PendingJob[Any]]) -> tuple[list[Any], float | None]:
        connection = self._connection
        if connection.in_transaction:
            connection.execute("COMMIT")
        connection.execute("BEGIN IMMEDIATE")
        return [work.job(connection) for work in group], None

    with patch.object(Committer, "_transact", hasty):
        yield


@contextmanager
def an_old_checksum_counts() -> Generator[None]:
    """Trust the checksum of the closed file even if the file has been opened since."""
    with patch.object(opening, "_forget_closed"):
        yield
