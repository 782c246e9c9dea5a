"""Comparing many names with the patterns of a caller does not keep other requests waiting."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from popgate.api.formats import negotiate
from popgate.api.locks import SEEN_AT_ONCE_MAX, LockHandlers
from popgate.api.routes import Call
from popgate.api.usage import check_topic_limit
from popgate.domain.errors import LimitExceeded
from popgate.domain.permissions import Action, Grant, Limits, Principal
from popgate.runtime.clocks import ManualClock
from unit.test_hosted_locks import held, started


async def test_other_requests_have_their_turn_while_locks_are_listed(tmp_path: Path) -> None:
    async with started(tmp_path, ManualClock(), locks_max=3 * SEEN_AT_ONCE_MAX) as locks:
        for number in range(3 * SEEN_AT_ONCE_MAX):
            await held(locks, f"l{number}")
        listing = asyncio.create_task(LockHandlers(locks).list(Call((), {}, b"", negotiate({}), None)), name="listing")
        turns = 0
        while not listing.done():
            await asyncio.sleep(0)
            turns += 1
        assert len(msgspec.json.decode(await listing)["locks"]) == 3 * SEEN_AT_ONCE_MAX
        assert turns >= 3


def test_topics_are_counted_no_further_than_to_the_limit() -> None:
    grant = Grant(actions=frozenset({Action.CREATE}), topics=("mine.*",))
    principal = Principal(name="p", grants=(grant,), limits=Limits(topics=2))
    counted: list[str] = []

    def topics() -> Iterator[str]:
        for name in ("other", "mine.1", "mine.2", "mine.3"):
            counted.append(name)
            yield name

    with pytest.raises(LimitExceeded):
        check_topic_limit(principal, topics)
    assert counted == ["other", "mine.1", "mine.2"]
    check_topic_limit(principal, lambda: ["other", "mine.1"])
