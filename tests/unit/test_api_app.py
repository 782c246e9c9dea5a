"""The application over `httpx.ASGITransport`: situations that no client can cause, on an embedded engine."""

import asyncio
import datetime as dt
import json
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp

from popgate.adapters.sqlite.assignments import SqliteAssignments
from popgate.adapters.sqlite.broker import SqliteBroker
from popgate.adapters.sqlite.catalog import SqliteCatalog
from popgate.adapters.sqlite.database import Database
from popgate.adapters.sqlite.dedup import SqliteDedupStore
from popgate.adapters.sqlite.lease_groups import SqliteLeaseGroups
from popgate.adapters.sqlite.lease_records import LatestRecords
from popgate.adapters.sqlite.leases import SqliteLeaseStore
from popgate.adapters.sqlite.lock_store import SqliteLockStore
from popgate.api.app import build_app
from popgate.domain.errors import BrokerUnavailable, QueueGone, RetryLater, StateUnavailable, WrongMode
from popgate.domain.message import Message
from popgate.domain.names import CopyId, InstanceId
from popgate.engine.context.engine_context import EngineOptions, make_context
from popgate.engine.engine import Engine
from popgate.engine.lease.pop_request import Leased
from popgate.journal.counters import EventCounters
from popgate.locks.embedded import EmbeddedArbiter
from popgate.locks.hosted import HostedLocks
from popgate.runtime.background import Background
from popgate.runtime.clocks import SystemClock

CLOCK = SystemClock()
POP = "/v1/topics/t/groups/default/pop"


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    clock = CLOCK
    database = Database(tmp_path / "popgate.db", clock)
    await database.open()
    broker = SqliteBroker(database)
    await broker.start()
    engine = Engine(
        make_context(
            EngineOptions(instance="test", secrets=[b"s" * 32], auto_create=True),
            broker=broker,
            dedup=SqliteDedupStore(database),
            leases=SqliteLeaseStore(database, records := LatestRecords()),
            lease_groups=SqliteLeaseGroups(database, records),
            assignments=SqliteAssignments(database),
            catalog=SqliteCatalog(database),
            journal=EventCounters(),
            clock=clock,
            background=Background(),
        )
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        await broker.stop()
        await database.close()


@pytest.fixture
def app(engine: Engine, tmp_path: Path) -> ASGIApp:
    # No test here acquires a lock, so its store may stay closed.
    store, background = SqliteLockStore(Database(tmp_path / "locks.db", CLOCK)), Background()
    locks = HostedLocks(
        EmbeddedArbiter(store, CLOCK, background), store, CLOCK, background, instance=InstanceId("i"), auto_create=True
    )
    return build_app(engine, locks, EventCounters())


@pytest.fixture
async def client(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://popgate") as client:
        yield client


def failing(error: Exception) -> Any:
    async def call(*_: object, **__: object) -> Any:
        raise error

    return call


def _cut_off(*_: object, **__: object) -> Any:
    raise asyncio.CancelledError


async def test_the_interface_works_without_uvicorn(client: httpx.AsyncClient) -> None:
    await client.post("/v1/topics/t/messages", json={"messages": [{"body": "x"}]})
    (message,) = (await client.post(POP, json={"wait_seconds": 1})).json()["messages"]
    ack = {"receipt_handles": [message["receipt_handle"]]}
    answer = await client.post("/v1/topics/t/groups/default/ack", json=ack)
    assert answer.json() == {"results": [{"status": "acked"}]}


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WrongMode("pull it", mode="pull"), 409, "wrong_mode"),
        (QueueGone("gone"), 404, "topic_not_found"),
        (BrokerUnavailable("away"), 503, "broker_unavailable"),
        (StateUnavailable("away"), 503, "state_unavailable"),
        (RetryLater("busy", retry_after_seconds=5), 503, "unavailable"),
        (ZeroDivisionError("secret"), 500, "internal_error"),
    ],
)
async def test_what_the_engine_raises_is_answered_as_a_problem(
    engine: Engine,
    client: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    status: int,
    code: str,
) -> None:
    monkeypatch.setattr(engine, "pop", failing(error))
    monkeypatch.setattr(engine.changes, "put_topic", failing(error))
    for answer in (await client.post(POP), await client.put("/v1/admin/topics/t", json={"queues": 1})):
        assert answer.status_code == status
        assert answer.json()["code"] == code
        assert "secret" not in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)
    bugs = [record for record in caplog.records if record.exc_info is not None]
    assert len(bugs) == (2 if status == 500 else 0), "each is logged once"


REDRIVE = "/v1/admin/topics/t/groups/default/dead-letters/redrive"


@pytest.mark.parametrize(
    ("method", "path", "is_unknown"), [("POST", POP, False), ("POST", REDRIVE, True), ("GET", REDRIVE, False)]
)
async def test_a_request_that_a_stopping_proxy_cuts_off_is_told_to_come_later(
    app: ASGIApp, engine: Engine, monkeypatch: pytest.MonkeyPatch, method: str, path: str, is_unknown: bool
) -> None:
    for owner, name in ((engine, "pop"), (engine, "redrive"), (engine.topics, "subscription")):
        monkeypatch.setattr(owner, name, _cut_off)
    sent: list[Any] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    with pytest.raises(asyncio.CancelledError):
        await app(scope, receive, send)
    start, body = sent
    assert start["status"] == 503
    assert b"retry-after" in dict(start["headers"])
    told = json.loads(body["body"])
    assert (told["code"], told.get("outcome_unknown", False)) == ("broker_unavailable", is_unknown)


async def test_readyz_says_why_it_is_not_ready(engine: Engine, client: httpx.AsyncClient) -> None:
    assert (await client.get("/readyz")).status_code == 200
    await engine.drain()
    answer = await client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["code"] == "not_ready"
    assert "shutting down" in answer.json()["detail"]
    assert answer.headers["retry-after"] == "1"
    assert (await client.get("/healthz")).status_code == 200


async def test_only_what_is_there_is_a_feature(client: httpx.AsyncClient) -> None:
    assert "filters" not in (await client.get("/v1")).json()["features"], "nothing reads them yet"


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
async def test_whatever_a_foreign_publisher_put_in_headers_can_be_answered(
    engine: Engine, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, accept: str
) -> None:
    headers = {
        "bytes": b"\xff",
        "time": dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
        "decimal": Decimal("1.5"),
        "nested": {"list": [1, None, {"x": b"y"}]},
        "nan": float("nan"),
        "large": 2**63,
        "object": object(),
    }
    message = Message(
        copy_id=CopyId("c"), message_id="", body=b"x", headers=headers, ordering_key=None, published_at=0.0
    )

    async def pop(*_: object) -> list[Leased]:
        return [Leased(message, "m", "r", 0, 1, 0.0, 0.0)]

    monkeypatch.setattr(engine, "pop", pop)
    answer = await client.post(POP, headers={"accept": accept})
    assert answer.status_code == 200
    if accept.endswith("json"):
        popped = json.loads(answer.content)["messages"][0]["headers"]
        assert popped["nested"]["list"][:2] == [1, None]
        assert popped["nan"] is None
        assert popped["decimal"] == "1.5"


async def test_a_proxy_that_is_alone_has_no_peers(client: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        answer = await client.request(method, "/v1/peers", content=b"x", headers={"popgate-passed-by": "a"})
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert (await client.post(POP, headers={"popgate-passed-by": "a", "popgate-to": "a"})).status_code == 200
