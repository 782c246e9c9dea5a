"""Bugs on purpose, of kinds that popgate's guarantees stand or fall with: the simulation has to find them."""
# pyright: reportPrivateUsage=false
# A bug has no manners.

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from typing import Any
from unittest.mock import patch

from popgate.adapters.redis.scripts import Script, script
from popgate.engine.settling import SettleOrder, Settler, SettleResult, Verb


@contextmanager
def acked_before_it_is_written() -> Generator[None]:
    """An ack is answered before the store has it."""
    settle = Settler.settle

    async def hasty(
        self: Settler, subscription: Any, verb: Verb, orders: Sequence[SettleOrder], **options: Any
    ) -> list[SettleResult]:
        if verb is not Verb.ACK:
            return await settle(self, subscription, verb, orders, **options)

        async def later() -> None:
            await asyncio.sleep(0.05)
            await settle(self, subscription, verb, orders, **options)

        self._room.background.spawn(later(), name="write")
        return [SettleResult("acked") for _ in orders]

    with patch.object(Settler, "settle", hasty):
        yield


@contextmanager
def any_lease_may_settle() -> Generator[None]:
    """The store does not ask whose lease it is that settles."""
    with _other_script("r.lease_id ~= ask[1] and not rule.of_any_lease", "false"):
        yield


@contextmanager
def settled_is_forgotten() -> Generator[None]:
    """The record of what was settled is dropped before RabbitMQ has proved that it applied the ack."""
    with _other_script("call_all('HSET', settled_key(queue), pairs)", ""):
        yield


@contextmanager
def _other_script(line: str, instead: str) -> Generator[None]:
    assert line.encode() in script("settle").text, f"there is no {line!r} to be replaced"

    def changed(name: str) -> Script:
        text = script(name).text.replace(line.encode(), instead.encode())
        return Script(name, text, sha1(text, usedforsecurity=False).hexdigest())

    with patch("popgate.adapters.redis.connection.script", changed):
        yield
