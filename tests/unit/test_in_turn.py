"""Work that is done one after the other, although some of it fails."""

from functools import partial

import pytest

from popgate.domain.errors import StateUnavailable
from popgate.runtime.in_turn import in_turn


async def test_what_fails_does_not_keep_the_rest_from_being_done() -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        done.append(number)
        if number in {1, 2}:
            raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        await in_turn(partial(work, number) for number in range(4))
    assert done == [0, 1, 2, 3]


async def test_an_unavailable_store_is_not_asked_again() -> None:
    asked = 0

    async def work() -> None:
        nonlocal asked
        asked += 1
        raise StateUnavailable("away")

    with pytest.raises(StateUnavailable):
        await in_turn([work, work])
    assert asked == 1
