"""Which tests run in parallel, with threads in place of the processes of a run."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock
from time import sleep

import pytest

from support.turns import Turns

EACH = 15


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_beside_a_quiet_test_at_most_one_other_runs(tmp_path: Path, seed: int, processes: int) -> None:
    guard = Lock()
    running: list[bool] = []
    most = {True: 0, False: 0}
    """The most that ran at once, separately for times with and without a quiet one."""

    def work(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        turns = Turns(tmp_path / "turns", processes)
        for _ in range(EACH):
            quiet = draw.random() < 0.3
            turns.take(quiet=quiet)
            with guard:
                running.append(quiet)
                most[any(running)] = max(most[any(running)], len(running))
            sleep(draw.random() * 0.02)
            with guard:
                running.remove(quiet)
            if not quiet or draw.random() < 0.5:
                turns.give_back()
        turns.give_back()

    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(work, range(processes)))
    assert most == {True: 2, False: processes}


def test_a_process_that_keeps_its_places_is_not_waited_for_twice(tmp_path: Path) -> None:
    quiet, other = Turns(tmp_path / "turns", 3), Turns(tmp_path / "turns", 3)
    quiet.take(quiet=True)
    other.take(quiet=False)
    for _ in range(3):
        quiet.take(quiet=True)
    quiet.give_back()
    other.take(quiet=True)
    quiet.take(quiet=False)
    quiet.give_back()
    other.give_back()


def test_tests_that_become_quiet_at_the_same_time_do_not_wait_for_each_other(tmp_path: Path) -> None:
    ready, running = Barrier(3), Lock()

    def work(_: int) -> bool:
        turns = Turns(tmp_path / "turns", 3)
        turns.take(quiet=False)
        ready.wait(10)
        turns.take(quiet=True)
        is_alone = running.acquire(blocking=False)
        sleep(0.05)
        running.release()
        turns.take(quiet=False)
        turns.give_back()
        return is_alone

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(work, range(3))) == [True] * 3
