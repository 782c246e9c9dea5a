"""Deliberately broken locks, each a small change to popgate's own, for the prover to find.

Each function here makes a client, as ``popgate prove locks --implementation lock_proof.broken:NAME`` calls it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial

import aio_pika

from popgate.adapters.rabbitmq.lock_driver import RabbitLockDriver
from popgate.amqp_locks import LockKind, Locks
from popgate.domain.locks import Slot
from popgate.locks.grants import FencedGrant, token_value
from popgate.locks.lock_queues import TokenListener
from popgate.ports.lock_driver import Token
from popgate.prover.http_locks import HttpLock
from popgate.prover.own_locks import OwnLock
from popgate.prover.target import Held
from popgate.prover.worker import FREE_WAIT_SECONDS

CONNECT_SECONDS = 5.0
LATE_SECONDS = 0.4
"""Seconds; long enough for a client to ask again meanwhile."""


class BrokenLock(OwnLock):
    """Has a second connection for its faults, because the first may be lost."""

    amqp_url = ""

    def slot(self, number: int) -> Slot:
        return Slot(self.name, self.kind, number)

    @contextlib.asynccontextmanager
    async def another_connection(self) -> AsyncGenerator[aio_pika.abc.AbstractConnection]:
        async with asyncio.timeout(CONNECT_SECONDS):
            connection = await aio_pika.connect(self.amqp_url)
        try:
            yield connection
        finally:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(CONNECT_SECONDS):
                    await connection.close()

    async def delete(self, queue: str) -> None:
        """Delete it, even while it is used."""
        async with self.another_connection() as connection:
            await (await RabbitLockDriver(connection).open(TokenListener())).delete(queue)


class NoFencing(BrokenLock):
    """Gives no token."""

    async def acquire(self, wait_seconds: float) -> Held | None:
        held = await super().acquire(wait_seconds)
        return None if held is None else Held(held.slot, None, held.grant)


class ReleasedByName(BrokenLock):
    """Repeats a release, because an answer may be lost; by name, so that it releases the lock of any later holder."""

    async def release(self, held: Held) -> None:
        await super().release(held)
        await self.locks.administration.force_release(self.name, self.kind, held.slot)


class VerifiedByProbe(BrokenLock):
    """Believes that it holds the lock as long as the slot exists: a routed publish proves no more."""

    async def verify(self, held: Held) -> bool:
        async with self.another_connection() as connection:
            channel = await RabbitLockDriver(connection).open(TokenListener())
            return await channel.put(self.slot(held.slot).slot_queue, b"probe")


class StaleTokenAccepted(BrokenLock):
    """Considers any token that was ever granted as the current one."""

    async def verify(self, held: Held) -> bool:
        async with self.another_connection() as connection:
            status = await Locks(connection).administration.status(self.name, self.kind)
        now = status.slots[held.slot - 1]
        return now.held and (now.fencing_token or 0) >= (held.token or 0)


class RenewedByAcquiring(BrokenLock):
    """Acquires a lost lock again when it renews it, as if it had never been lost: others may have changed things."""

    def __init__(self, connection: aio_pika.abc.AbstractConnection, lock: str, kind: LockKind) -> None:
        super().__init__(connection, lock, kind)
        self._again: dict[object, contextlib.AsyncExitStack] = {}

    async def renew(self, held: Held) -> int | None:
        token = await super().renew(held)
        if token is not None:
            return token
        stack = self._again[held.grant] = contextlib.AsyncExitStack()
        locks = Locks(await stack.enter_async_context(self.another_connection()))
        grant = await locks.mutex(self.name).acquire(CONNECT_SECONDS)
        return None if grant is None else grant.fencing_token

    async def release(self, held: Held) -> None:
        stack = self._again.pop(held.grant, None)
        if stack is not None:
            await stack.aclose()
        await super().release(held)

    async def close(self) -> None:
        for stack in self._again.values():
            await stack.aclose()
        await super().close()


class Trusting(BrokenLock):
    """Takes any delivery for the answer to its renewal, also one that another client has had in between.

    Only nodes that take tokens can show it, if they take many: ``make prove ARGS="--way amqp --kind mutex
    --implementation lock_proof.broken:trusting"``.
    """

    def __init__(self, connection: aio_pika.abc.AbstractConnection, lock: str, kind: LockKind) -> None:
        super().__init__(connection, lock, kind)
        self._latest = 0

    async def acquire(self, wait_seconds: float) -> Held | None:
        held = await super().acquire(wait_seconds)
        if held is not None and isinstance(held.grant, FencedGrant):
            setattr(held.grant, "on_token", partial(self._on_token, held.grant))  # noqa: B010  # it is a method
        return held

    async def renew(self, held: Held) -> int | None:
        token = await super().renew(held)
        return None if token is None else max(token, self._latest)

    def _on_token(self, grant: FencedGrant, token: Token) -> None:
        self._latest = token_value(token)
        expected = grant.fencing_token - int(token.body) + 1
        FencedGrant.on_token(grant, token._replace(deliveries=expected))


class LostSlot(BrokenLock):
    """Takes the slot along when it releases a lost lock."""

    async def release(self, held: Held) -> None:
        is_lost = not await self.verify(held)
        await super().release(held)
        if is_lost:
            await self.delete(self.slot(held.slot).slot_queue)


class DoubleSlot(BrokenLock):
    """Removes a slot with its token: after its return, it has a new one beside that of its holder."""

    async def set_slots(self, slots: int) -> None:
        await super().set_slots(slots)
        if slots == 0:
            await (await RabbitLockDriver(self.connection).open(TokenListener())).delete(self.slot(1).token_queue)


class Starving(BrokenLock):
    """A waiting client asks again when its time is over; clients that arrive meanwhile are served first."""

    async def acquire(self, wait_seconds: float) -> Held | None:
        held = await super().acquire(0)
        if held is None and wait_seconds:
            await asyncio.sleep(wait_seconds)
            held = await super().acquire(0)
        return held


class Hasty(BrokenLock):
    """Answers a release before the broker has the token back."""

    def __init__(self, connection: aio_pika.abc.AbstractConnection, lock: str, kind: LockKind) -> None:
        super().__init__(connection, lock, kind)
        self._releasing: dict[object, asyncio.Task[None]] = {}

    async def verify(self, held: Held) -> bool:
        return held.grant not in self._releasing and await super().verify(held)

    async def release(self, held: Held) -> None:
        self._releasing[held.grant] = asyncio.create_task(self._release_late(held))

    async def _release_late(self, held: Held) -> None:
        await asyncio.sleep(LATE_SECONDS)
        await super().release(held)


class Leaking(BrokenLock):
    """A client that gives up waiting stays in line forever: its turn comes, and the client is gone."""

    def __init__(self, connection: aio_pika.abc.AbstractConnection, lock: str, kind: LockKind) -> None:
        super().__init__(connection, lock, kind)
        self._abandoned: list[asyncio.Task[Held | None]] = []

    async def acquire(self, wait_seconds: float) -> Held | None:
        if not wait_seconds:
            return await super().acquire(0)
        waiting = asyncio.create_task(super().acquire(60.0))
        done, _ = await asyncio.wait([waiting], timeout=wait_seconds)
        if not done:
            self._abandoned.append(waiting)
            return None
        return waiting.result()


class ForgottenOverHttp(HttpLock):
    """Holds for a minute, and forgets to release a lock for which it did not wait long."""

    ttl_seconds = 60.0

    async def acquire(self, wait_seconds: float) -> Held | None:
        held = await super().acquire(wait_seconds)
        self._forgets = wait_seconds < FREE_WAIT_SECONDS
        return held

    async def release(self, held: Held) -> None:
        if self._forgets:
            self._stop_renewing(str(held.grant))
        else:
            await super().release(held)


def _maker(broken: type[BrokenLock]) -> Callable[[str, str, LockKind], Awaitable[BrokenLock]]:
    async def connect(amqp_url: str, lock: str, kind: LockKind) -> BrokenLock:
        made = broken(await aio_pika.connect(amqp_url), lock, kind)
        made.amqp_url = amqp_url
        return made

    return connect


no_fencing = _maker(NoFencing)
released_by_name = _maker(ReleasedByName)
verified_by_probe = _maker(VerifiedByProbe)
stale_token_accepted = _maker(StaleTokenAccepted)
renewed_by_acquiring = _maker(RenewedByAcquiring)
trusting = _maker(Trusting)
lost_slot = _maker(LostSlot)
double_slot = _maker(DoubleSlot)
starving = _maker(Starving)
leaking = _maker(Leaking)
hasty = _maker(Hasty)


async def forgotten_over_http(urls: str, lock: str, kind: LockKind) -> HttpLock:
    made = ForgottenOverHttp(urls.split(","), lock, kind)
    await made.start()
    return made
