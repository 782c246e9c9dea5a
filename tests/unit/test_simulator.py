"""The simulation's foundations: virtual time, processes that are paused and killed, connections that are cut."""

import asyncio
import random
from collections.abc import Callable

import pytest

from simulator.loop import DeadlockError, VirtualLoop
from simulator.network import Answered, Network
from simulator.processes import Process
from simulator.wires import Pipe, Weather


def run(work: Callable[[VirtualLoop], object]) -> VirtualLoop:
    """Run the coroutine function ``work`` in a new loop."""
    loop = VirtualLoop(start=0.0)
    try:
        loop.run(work(loop))  # type: ignore[arg-type]  # what is called is async
    finally:
        loop.close()
    return loop


def test_time_passes_only_while_nothing_is_ready() -> None:
    async def work(loop: VirtualLoop) -> None:
        await asyncio.sleep(3_600)
        for _ in range(100):
            await asyncio.sleep(0)
        assert loop.time() == 3_600

    run(work)


def test_timers_of_one_moment_come_in_the_order_in_which_they_were_set() -> None:
    came: list[int] = []

    async def work(loop: VirtualLoop) -> None:
        for number in range(50):
            loop.call_at(1.0, came.append, number)
        await asyncio.sleep(2.0)

    run(work)
    assert came == list(range(50))


def test_who_would_wait_for_ever_is_told() -> None:
    async def work(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(DeadlockError):
        run(work)


def test_a_paused_process_does_everything_later_in_its_order() -> None:
    came: list[tuple[float, int]] = []

    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")

        async def count() -> None:
            for number in range(4):
                await asyncio.sleep(1.0)
                came.append((round(loop.time(), 3), number))

        process.spawn(count(), "count")
        await asyncio.sleep(1.5)
        process.pause()
        await asyncio.sleep(5.0)
        process.resume()
        await asyncio.sleep(5.0)

    run(work)
    assert came == [(1.0, 0), (6.5, 1), (7.5, 2), (8.5, 3)]


def test_nothing_of_a_killed_process_runs_any_more_not_even_its_last_words() -> None:
    said: list[str] = []

    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")

        async def talk() -> None:
            try:
                await asyncio.sleep(2.0)
                said.append("woke")
            finally:
                said.append("last words")

        process.spawn(talk(), "talk")
        process.call(said.append, "called")
        await asyncio.sleep(1.0)
        process.kill()
        process.call(said.append, "called again")
        await asyncio.sleep(5.0)
        assert said == ["called"]
        process.bury()

    run(work)


def test_a_pipe_keeps_the_order_and_what_is_cut_off_does_not_arrive() -> None:
    came: list[int] = []

    async def work(loop: VirtualLoop) -> None:
        pipe = Pipe(Weather(random.Random(1)))
        for number in range(100):
            pipe.send(lambda number=number: came.append(number))  # type: ignore[misc]  # bound as it is now
        await asyncio.sleep(1.0)
        assert came == list(range(100))
        for number in range(4):
            pipe.send(lambda number=number: came.append(number))  # type: ignore[misc]  # bound as it is now
        pipe.cut(loses=3)
        pipe.send(lambda: came.append(-1))
        await asyncio.sleep(1.0)

    run(work)
    assert came == [*range(100), 0]


def test_a_request_ends_with_the_process_that_it_was_asked_of() -> None:
    async def work(loop: VirtualLoop) -> None:
        network = Network(random.Random(1), Weather(random.Random(1)), [])
        process = Process(loop, "p")

        async def never() -> Answered[int]:
            await asyncio.sleep(60.0)
            return Answered(1)

        loop.call_later(1.0, process.kill)
        with pytest.raises(ConnectionResetError):
            await network.exchange(process, never, seconds=30.0)
        assert loop.time() < 2.0
        with pytest.raises(ConnectionRefusedError):
            await network.exchange(process, never, seconds=30.0)
        process.bury()

    run(work)


def test_an_answer_that_nobody_waits_for_is_undone_and_its_asker_is_known_to_have_gone() -> None:
    told: list[str] = []

    async def work(loop: VirtualLoop) -> None:
        network = Network(random.Random(1), Weather(random.Random(1)), [])
        process = Process(loop, "p")

        async def slowly() -> Answered[int]:
            await asyncio.sleep(5.0)
            return Answered(1, lambda: told.append("undone"))

        with pytest.raises(TimeoutError):
            await network.exchange(process, slowly, seconds=2.0, leave=lambda: told.append("gone"))
        await asyncio.sleep(1.0)
        assert told == ["gone"]
        await asyncio.sleep(5.0)
        assert told == ["gone", "undone"]

    run(work)
