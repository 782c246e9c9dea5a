"""What a thread may do with a terminal that `popgate top` has given back."""

import os
from collections.abc import Iterator

import pytest

from popgate.cli.screen import Screen


@pytest.fixture
def terminal() -> Iterator[int]:
    leader, follower = os.openpty()
    yield follower
    os.close(follower)
    os.close(leader)


def test_a_read_that_ends_after_the_display_wakes_nothing(terminal: int) -> None:
    """Its file descriptor may belong to something else by then."""
    screen = Screen(terminal)
    screen.wake()
    assert screen.key(until=0.0) == ""
    screen.close()
    other, reused = os.pipe()
    os.set_blocking(other, False)
    screen.wake()
    with pytest.raises(BlockingIOError):
        os.read(other, 1)
    os.close(other)
    os.close(reused)
