"""The cost of locks on a real node: medians of single operations, and fifty clients that wait for one lock."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise
from statistics import median
from time import perf_counter

import aio_pika

from bench.report import Report, Row
from popgate.amqp_locks import Grant, Lock, LockKind, Locks

ROUNDS = 100
NAMES = 100
WAITING = 50
HELD_SECONDS = 0.02


def rows(report: Report, amqp_url: str) -> None:
    """Add all rows on locks."""
    asyncio.run(_rows(report, amqp_url))


async def _rows(report: Report, amqp_url: str) -> None:
    async with await aio_pika.connect(amqp_url) as connection, await aio_pika.connect(amqp_url) as another:
        mine, others = Locks(connection), Locks(another)
        for fenced in (True, False):
            form = "fenced" if fenced else "unfenced"
            await mine.administration.set_slots("bench", LockKind.SEMAPHORE, 1, fenced=fenced)
            for kind, lock, rival in (
                ("mutex", mine.mutex("bench", fenced=fenced), others.mutex("bench", fenced=fenced)),
                ("semaphore of one", mine.semaphore("bench", fenced=fenced), others.semaphore("bench", fenced=fenced)),
            ):
                await _operations(report, f"locks: {form} {kind}", lock, rival, 30.0 if fenced else 8.0)
        await _many_names(report, mine)
        await _contention(report, [mine, others])
        await mine.close()
        await others.close()


async def _operations(report: Report, name: str, lock: Lock, rival: Lock, acquire_target: float) -> None:
    acquires: list[float] = []
    verifies: list[float] = []
    tries: list[float] = []
    releases: list[float] = []
    for _ in range(ROUNDS):
        grants: list[Grant | None] = []

        async def acquire(grants: list[Grant | None] = grants) -> None:
            grants.append(await lock.acquire(5.0))

        acquires.append(await _milliseconds(acquire))
        (grant,) = grants
        assert grant is not None
        verifies.append(await _milliseconds(grant.verify))
        tries.append(await _milliseconds(rival.acquire))
        releases.append(await _milliseconds(grant.release))
    _add(report, f"{name}: acquire", median(acquires), acquire_target)
    _add(report, f"{name}: verify", median(verifies), 1.0)
    _add(report, f"{name}: failed try", median(tries))
    _add(report, f"{name}: release", median(releases))


async def _many_names(report: Report, locks: Locks) -> None:
    grants = [await locks.mutex(f"bench-{number}").acquire() for number in range(NAMES)]
    assert None not in grants
    verifies = [await _milliseconds(grant.verify) for grant in grants if grant is not None]
    _add(report, f"locks: verify with {NAMES} names held on one connection", median(verifies), 1.0)
    for grant in grants:
        if grant is not None:
            await grant.release()


async def _contention(report: Report, clients: list[Locks]) -> None:
    taken: list[tuple[float, float]] = []
    waits: list[float] = []

    async def work(number: int) -> None:
        asked = perf_counter()
        async with clients[number % len(clients)].mutex("contended").held(60):
            start = perf_counter()
            waits.append(start - asked)
            await asyncio.sleep(HELD_SECONDS)
            taken.append((start, perf_counter()))

    async with clients[0].mutex("contended").held(5):
        working = [asyncio.create_task(work(number)) for number in range(WAITING)]
        await asyncio.sleep(2.0)  # all wait
    await asyncio.gather(*working)
    hand_overs = [(later[0] - earlier[1]) * 1000 for earlier, later in pairwise(taken)]
    _add(report, f"locks: hand-over with {WAITING} waiting", median(hand_overs), 50.0)
    ratio = max(waits) / median(waits)
    report.add(
        Row(
            name=f"locks: longest wait of {WAITING}",
            value=max(waits) * 1000,
            unit="ms",
            against="the median wait",
            ratio=ratio,
            target="<= 3x",
            reached=ratio <= 3,
        )
    )


def _add(report: Report, name: str, milliseconds: float, target: float | None = None) -> None:
    report.add(
        Row(
            name=name,
            value=milliseconds,
            unit="ms",
            target="" if target is None else f"<= {target:g} ms",
            reached=None if target is None else milliseconds <= target,
        )
    )


async def _milliseconds(work: Callable[[], Awaitable[object]]) -> float:
    started = perf_counter()
    await work()
    return (perf_counter() - started) * 1000
