"""A request that popgate works on for long is reported, and one that only waits is not."""

import logging
from typing import Any, cast

import pytest

from popgate.api.connection import EXTENSION
from popgate.api.slow_requests import REPORTED_MAX, SlowRequests
from popgate.engine.lease.pop_request import Presence
from popgate.runtime.clocks import ManualClock

LOGGER = "popgate.api.slow_requests"
SLOW_SECONDS = 1.0


class Connection:
    """A connection with one request, as ``SlowRequests`` sees both."""

    def __init__(self) -> None:
        self.presence: Presence | None = None
        self.cycle: Any = Cycle(self)

    def begin(self) -> None:
        self.cycle = Cycle(self)


class Cycle:
    def __init__(self, connection: Connection) -> None:
        self.more_body = self.response_started = self.disconnected = False
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/topics/orders/groups/billing/ack",
            "headers": [(b"x-request-id", b"r-1")],
            "client": ("10.0.0.7", 4711),
            "extensions": {EXTENSION: connection},
        }


class Scene:
    def __init__(self, *connections: Connection) -> None:
        self.clock = ManualClock()
        self._requests = SlowRequests(lambda: cast("Any", connections), SLOW_SECONDS, self.clock.monotonic)

    async def elapse(self, seconds: float) -> None:
        """Let time pass, with looks on the way."""
        for _ in range(round(seconds / 0.25)):
            await self._requests.look()
            self.clock.advance(0.25)
        await self._requests.look()


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)


async def test_a_request_in_progress_for_long_is_reported_whenever_its_time_has_doubled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(Connection())
    await scene.elapse(0.75)
    assert not caplog.records
    await scene.elapse(4)
    assert [record.__dict__["seconds"] for record in caplog.records] == [1.0, 2.0, 4.0]
    first = caplog.records[0]
    assert (first.levelno, first.getMessage()) == (logging.WARNING, "a request takes long")
    shown = {name: first.__dict__.get(name) for name in ("operation", "topic", "group", "address", "request_id")}
    assert shown == {
        "operation": "ack",
        "topic": "orders",
        "group": "billing",
        "address": "10.0.0.7",
        "request_id": "r-1",
    }


async def test_the_wait_of_a_long_poll_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection()
    scene = Scene(connection)
    await scene.elapse(0.5)
    connection.presence = Presence()
    connection.presence.on_leave = lambda: None  # it is parked
    await scene.elapse(30)
    connection.presence.on_leave = None  # it got messages, and leases them
    await scene.elapse(0.75)
    assert not caplog.records
    await scene.elapse(0.5)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("state", ["more_body", "response_started", "disconnected"])
async def test_a_slow_client_is_not_a_slow_request(caplog: pytest.LogCaptureFixture, state: str) -> None:
    connection = Connection()
    setattr(connection.cycle, state, True)
    await Scene(connection).elapse(10)
    assert not caplog.records


async def test_each_request_of_a_connection_counts_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    connection = Connection()
    scene = Scene(connection)
    for _ in range(10):
        await scene.elapse(0.75)
        connection.begin()
    assert not caplog.records


async def test_of_many_slow_requests_only_some_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    await Scene(*[Connection() for _ in range(1_000)]).elapse(1)
    assert len(caplog.records) == REPORTED_MAX + 1
    assert caplog.records[-1].getMessage() == "further requests take long"
    assert caplog.records[-1].__dict__["count"] == 1_000 - REPORTED_MAX
