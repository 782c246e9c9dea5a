"""Who runs beside whom, as threads that stand for the processes of a run."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import sleep

import pytest

from support.turns import Turns

EACH = 15


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_beside_a_quiet_test_at_most_one_other_runs(tmp_path: Path, seed: int, processes: int) -> None:
    turns = Turns(tmp_path / "turns", processes)
    guard = Lock()
    running: list[bool] = []
    most = {True: 0, False: 0}
    """How many ran at once, by whether one of them was quiet."""

    def work(number: int) -> None:
        draw = random.Random(f"{seed} {number}")
        for _ in range(EACH):
            quiet = draw.random() < 0.3
            with turns.taken(quiet=quiet):
                with guard:
                    running.append(quiet)
                    most[any(running)] = max(most[any(running)], len(running))
                sleep(draw.random() * 0.02)
                with guard:
                    running.remove(quiet)

    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(work, range(processes)))
    assert most == {True: 2, False: processes}


def test_a_turn_ends_however_the_test_does(tmp_path: Path) -> None:
    turns = Turns(tmp_path / "turns", 3)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), turns.taken(quiet=True):
            _ = 1 / 0
    with turns.taken(quiet=True), turns.taken(quiet=False):
        pass
