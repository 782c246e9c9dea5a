"""The journal of real proxies: complete stories, of an embedded proxy and of two in a cluster; kills, full disks."""

import resource
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.conftest import assert_no_traceback, limit_file_size
from support.journal_files import Row, assert_without_gaps, finished_files, in_order_of_time, rows_of
from support.processes import PortBlock, wait_until
from support.proxy import ProxyProcess, popgate_command, python_program
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

TOPIC = "/v1/topics/t"
GROUP = f"{TOPIC}/groups/g"
ADMIN_GROUP = "/v1/admin/topics/t/groups/g"
PATIENCE_SECONDS = 30.0
TTL_SECONDS = 0.1
NEVER = ("--journal-rotate-seconds", "3600")
ALWAYS = ("--journal-rotate-seconds", "1")


def call(client: httpx.Client, method: str, path: str, **body: Any) -> Any:
    answer = client.request(method, path, json=body or None)
    assert answer.is_success, (method, path, answer.status_code, answer.text)
    return answer.json() if answer.content else None


def publish(client: httpx.Client, *message_ids: str, **fields: Any) -> list[str]:
    messages = [{"body": f"body of {one}", "message_id": one, **fields} for one in message_ids]
    return [one["status"] for one in call(client, "POST", f"{TOPIC}/messages", messages=messages)["results"]]


def pop(client: httpx.Client, count: int, client_id: str, **fields: Any) -> dict[str, str]:
    """Pop that many messages; return their receipt handles by their ids."""
    handles: dict[str, str] = {}
    while len(handles) < count:
        asked = {"max_messages": count - len(handles), "wait_seconds": 20, "client_id": client_id, **fields}
        found = call(client, "POST", f"{GROUP}/pop", **asked)["messages"]
        assert found
        handles.update({one["message_id"]: one["receipt_handle"] for one in found})
    return handles


def settle(client: httpx.Client, verb: str, handle: str, **fields: Any) -> None:
    body = {"receipt_handles": [handle]} if verb == "ack" else {"entries": [{"receipt_handle": handle, **fields}]}
    (result,) = call(client, "POST", f"{GROUP}/{verb}", **body)["results"]
    assert result["status"] in ("acked", "released", "extended", "rejected")


def tell_a_story(here: httpx.Client, there: httpx.Client) -> None:
    """Make everything happen that can happen to messages, through two proxies, or through one."""
    call(here, "PUT", "/v1/admin/topics/t", queues=2)
    call(here, "PUT", ADMIN_GROUP, invisibility_seconds=60)
    assert publish(here, "acked", "released", "rejected", "extended") == ["published"] * 4
    assert [publish(there, "once", dedup_id="d")[0] for _ in range(2)] == ["published", "duplicate"]
    handles = pop(here, 5, "ann")
    settle(here, "ack", handles["acked"])
    settle(there, "ack", handles["once"])
    (repeat,) = call(here, "POST", f"{GROUP}/ack", receipt_handles=[handles["once"]])["results"]
    assert repeat["status"] == "already_acked"
    settle(there, "extend", handles["extended"], invisibility_seconds=50)
    settle(here, "ack", handles["extended"])
    settle(here, "release", handles["released"], reason="busy")
    settle(there, "reject", handles["rejected"], reason="bad")
    settle(there, "ack", pop(there, 1, "bob")["released"])
    call(here, "POST", f"{ADMIN_GROUP}/dead-letters/redrive", wait_seconds=10)
    settle(here, "ack", pop(there, 1, "bob")["rejected"])
    publish(there, "expired")
    pop(here, 1, "cid", invisibility_seconds=1)
    settle(here, "ack", pop(here, 1, "dee")["expired"])
    publish(here, "purged")
    wait_until(
        lambda: bool(call(here, "POST", f"{ADMIN_GROUP}/purge")["purged"]), timeout_seconds=20, what="a purged message"
    )
    call(here, "POST", f"{ADMIN_GROUP}/pause")
    publish(here, "late", ttl_seconds=TTL_SECONDS)
    time.sleep(TTL_SECONDS)
    call(here, "POST", f"{ADMIN_GROUP}/resume")
    assert call(here, "POST", f"{GROUP}/pop", wait_seconds=1)["messages"] == []
    publish(there, "batched")
    call(there, "PUT", f"{GROUP}/lease-groups/stream/1", max_messages=10, invisibility_seconds=60)
    assert call(here, "POST", f"{GROUP}/lease-groups/stream/ack", through_epoch=1)["acked"] == 1
    call(here, "PUT", f"{ADMIN_GROUP}/consume-mode", mode="pull", drain_timeout_seconds=0)
    publish(here, "pulled")
    pull(there, "pulled")
    call(here, "PUT", f"{ADMIN_GROUP}/consume-mode", mode="pop", drain_timeout_seconds=0)
    publish(here, "open")
    call(there, "DELETE", "/v1/admin/topics/t")


def pull(client: httpx.Client, message_id: str) -> None:
    """Pull as a client that has all queues."""
    me: dict[str, Any] = {"client_id": "eve", "supports": ["pull"]}

    def is_pulled() -> bool:
        told = client.post(f"{GROUP}/assignment", json=me).json()
        me["generation"] = told.get("generation", 0)
        shown = {"client_id": "eve", "generation": me["generation"]}
        for queue in told.get("queues", ()):
            answer = client.post(f"{GROUP}/queues/{queue}/pull", json=shown)
            for message in answer.json().get("messages", ()):
                assert message["message_id"] == message_id
                committed = {**shown, "receipt_handle": message["receipt_handle"]}
                return bool(call(client, "POST", f"{GROUP}/queues/{queue}/commit", **committed)["committed"])
        return False

    wait_until(is_pulled, timeout_seconds=PATIENCE_SECONDS, what="a pulled message")


STORY = {
    "acked": ["published", "delivered ann", "acked ann"],
    "once": ["published", "duplicate", "delivered ann", "acked ann", "found_settled ann: acked"],
    "extended": ["published", "delivered ann", "extended ann", "acked ann"],
    "released": ["published", "delivered ann", "released ann: busy", "delivered bob", "acked bob"],
    "expired": ["published", "delivered cid", "expired cid", "delivered dee", "acked dee"],
    "late": ["published", "discarded"],
    "batched": ["published", "delivered stream", "acked stream"],
    "pulled": ["published", "delivered eve", "acked eve"],
    "open": ["published"],
}
"""By message: its events, and their clients."""
MOVED = ["published", "delivered ann", "dead_lettered ann: bad", "rejected ann: bad"]
REDRIVEN = ["redriven"]


def stories(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the events by copy, in the form of ``STORY``. The client of a settlement through another proxy is found
    by the hand-out before.
    """
    told: dict[str, list[str]] = {}
    given: dict[tuple[str, int], str] = {}
    for row in rows:
        copy_id, event = row["copy_id"], row["event"]
        if copy_id is None or event == "redelivered":
            continue
        if event == "delivered":
            given[copy_id, row["delivery_count"]] = row["client"]
        client = row["client"] or given.get((copy_id, row["delivery_count"]))
        parts = [event, *([client] if client is not None else ())]
        told.setdefault(copy_id, []).append(" ".join(parts) + (f": {row['detail']}" if row["detail"] else ""))
    return told


def check_story(rows: list[Row]) -> None:
    assert_without_gaps(rows)
    rows = in_order_of_time(rows)
    copies = {row["message_id"]: row["copy_id"] for row in rows if row["event"] == "published"}
    told = stories(rows)
    for message_id, story in STORY.items():
        assert told.pop(copies[message_id]) == story
    # The client that purges appears as the one that drops the messages.
    assert told.pop(copies["purged"]) == ["published", "delivered", "purged"]
    (dead,) = [row for row in rows if row["event"] == "dead_lettered"]
    (redriven,) = [row for row in rows if row["event"] == "redriven"]
    assert (dead["copy_id"], dead["new_copy_id"]) == (copies["rejected"], redriven["copy_id"])
    assert told.pop(dead["copy_id"]) == MOVED
    assert told.pop(dead["new_copy_id"]) == REDRIVEN
    assert told.pop(redriven["new_copy_id"]) == ["delivered bob", "acked bob"]
    assert told == {}
    of_group = [row for row in rows if row["copy_id"] is None and not row["event"].startswith("queue_")]
    starts = [row["event"] for row in of_group].count("journal_started")
    assert [(row["event"], row["topic"], row["group"], row["detail"]) for row in of_group[starts:]] == [
        ("group_created", "t", "g", None),
        ("mode_changed", "t", "g", "pull"),
        ("mode_changed", "t", "g", "pop"),
        ("group_deleted", "t", "g", None),
        ("topic_deleted", "t", None, None),
    ]
    for row in rows:
        check_row(row)


def check_row(row: Row) -> None:
    """Check what every row of this story must have."""
    event = row["event"]
    if event == "published":
        assert (row["group"], row["groups"], row["delivery_count"]) == (None, "g", None)
        assert row["size_bytes"] == len(f"body of {row['message_id']}")
        assert row["published_at"] == row["visible_at"] is not None
    if event == "delivered":
        # a lease group's, an expired message's, a purge's, and all others
        asked = {"stream": 60.0, "cid": 1.0, None: 30.0, "eve": None}.get(row["client"], 60.0)
        assert row["invisibility_seconds"] == asked
        assert (row["group"], row["held_seconds"]) == ("g", None)
        assert row["message_id"] is not None
        assert row["queue"] in (0, 1)
    if event in ("acked", "released", "extended", "expired"):
        assert 0.0 <= row["held_seconds"] < PATIENCE_SECONDS
        assert row["delivery_count"] >= 1
    if event == "expired":
        assert row["held_seconds"] >= 0.9


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_the_embedded_proxy_tells_whole_stories(tmp_path: Path, journal: Path) -> None:
    with ProxyProcess(tmp_path / "proxy", "--journal", str(journal), *NEVER) as proxy:
        tell_a_story(proxy.client, proxy.client)
        assert finished_files(journal) == []
        assert proxy.stop() == 0
        assert_no_traceback(proxy)
    rows = rows_of(journal)
    check_story(rows)
    settled = [row for row in rows if row["event"] in ("acked", "released", "extended", "expired", "rejected")]
    assert all(row["client"] and row["message_id"] and row["size_bytes"] for row in settled)
    assert all(
        row["invisibility_seconds"]
        for row in settled
        if row["event"] in ("acked", "expired", "released") and row["client"] != "eve"
    )


@pytest.fixture
def cluster(tmp_path: Path, journal: Path, rabbitmq: RabbitNode, redis_server: RedisServer) -> Iterator[ProxyCluster]:
    flags = ["--journal", str(journal), *NEVER]
    with ProxyCluster(tmp_path, *flags, nodes=(rabbitmq,), redis=redis_server, size=2) as cluster:
        yield cluster


def test_two_proxies_tell_one_story_and_nothing_twice(cluster: ProxyCluster, journal: Path) -> None:
    here, there = (proxy.client for proxy in cluster.proxies)
    tell_a_story(here, there)
    for proxy in cluster.proxies:
        assert proxy.stop() == 0
        assert_no_traceback(proxy)
    rows = rows_of(journal)
    check_story(rows)
    assert len({row["proxy"] for row in rows}) == len(finished_files(journal)) == 2
    by_queue = {row["queue"]: row["proxy"] for row in rows if row["event"] == "queue_claimed"}
    assert {row["queue"] for row in rows if row["event"] == "delivered"} == {0, 1}
    assert Counter(row["event"] for row in rows)["queue_claimed"] >= 2
    assert set(by_queue) == {0, 1}
    claims = Counter((row["queue"], row["detail"]) for row in rows if row["event"] == "queue_claimed")
    assert set(claims.values()) == {1}, "no epoch is given twice"
    owned: dict[tuple[int, str], str] = {}
    for row in in_order_of_time(rows):
        if row["event"] == "queue_claimed":
            owned[row["queue"], row["proxy"]] = row["detail"]
        elif row["event"] == "queue_released":
            assert owned.pop((row["queue"], row["proxy"])) == row["detail"]
        elif row["event"] in ("delivered", "expired"):
            assert (row["queue"], row["proxy"]) in owned, "only an owner hands out"


def test_a_batch_is_told_whichever_proxy_renews_it_or_leases_it_again(cluster: ProxyCluster, journal: Path) -> None:
    """Each proxy owns one of the queues; in between, a rival gets the messages and releases them."""
    here, there = (proxy.client for proxy in cluster.proxies)
    call(here, "PUT", "/v1/admin/topics/t", queues=2)
    call(here, "PUT", ADMIN_GROUP, invisibility_seconds=60)
    names = [str(number) for number in range(8)]
    publish(here, *names)
    lease = {"max_messages": 8, "invisibility_seconds": 2}
    wait_until(
        lambda: call(here, "GET", GROUP)["ready"] == 8, timeout_seconds=PATIENCE_SECONDS, what="messages to be ready"
    )
    assert call(here, "PUT", f"{GROUP}/lease-groups/stream/1", **lease)["count"] == 8
    call(here, "POST", f"{GROUP}/lease-groups/stream/extend", invisibility_seconds=2)
    for handle in pop(there, 8, "rival").values():
        settle(there, "release", handle)
    assert call(here, "PUT", f"{GROUP}/lease-groups/stream/1", **lease, slices=1)["count"] == 8
    assert call(there, "POST", f"{GROUP}/lease-groups/stream/ack", through_epoch=1)["acked"] == 8
    for proxy in cluster.proxies:
        assert proxy.stop() == 0
    rows = in_order_of_time(rows_of(journal))
    assert len({row["proxy"] for row in rows if row["event"] == "queue_claimed"}) == 2
    told = stories(rows)
    assert len(told) == 8
    for story in told.values():
        assert story == [
            *("published", "delivered stream", "extended stream", "expired stream"),
            *("delivered rival", "released rival", "delivered stream", "acked stream"),
        ]


def test_a_killed_proxy_leaves_whole_files_and_the_next_one_goes_on_beside_them(tmp_path: Path, journal: Path) -> None:
    flags = ["--journal", str(journal), "--journal-rotate-events", "20", *NEVER]
    with ProxyProcess(tmp_path / "proxy", *flags) as proxy:
        for number in range(20):
            publish(proxy.client, *(f"{number}-{one}" for one in range(4)))
        wait_until(lambda: len(finished_files(journal)) >= 3, timeout_seconds=20, what="three files")
        proxy.kill()
        before = rows_of(journal)
        assert_without_gaps(before)
        assert Counter(row["event"] for row in before)["published"] >= 40
        proxy.start()
        assert pop_any(proxy.client) == "0-0"
        assert proxy.stop() == 0
    rows = rows_of(journal)
    assert_without_gaps(rows)
    assert Counter(row["event"] for row in rows)["journal_started"] == 2
    assert [row for row in rows if row in before] == before
    (delivered,) = [row for row in rows if row["event"] == "delivered"]
    assert delivered["message_id"] == "0-0"


def pop_any(client: httpx.Client) -> str:
    path = f"{TOPIC}/groups/default/pop"
    message_id: str = call(client, "POST", path, wait_seconds=10)["messages"][0]["message_id"]
    return message_id


# ---------------------------------------------------------------- disks, places, processes


def figure(client: httpx.Client, name: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(f"popgate_journal_{name} "):
            return float(line.split()[1])
    raise AssertionError(f"/metrics has no {name}")


def test_a_full_disk_holds_up_no_message_and_costs_no_event(
    tmp_path: Path, journal: Path, rabbitmq: RabbitNode, redis_server: RedisServer
) -> None:
    """RabbitMQ and Redis have room: only the journal's disk is full."""
    flags = ["--journal", str(journal), *ALWAYS]
    with ProxyCluster(tmp_path, *flags, nodes=(rabbitmq,), redis=redis_server, size=1) as cluster:
        (proxy,) = cluster.proxies
        client = proxy.client
        call(client, "PUT", "/v1/admin/topics/t", queues=2)
        call(client, "PUT", ADMIN_GROUP)
        limit_file_size(proxy, 1)
        for number in range(10):
            publish(client, *(f"{number}-{one}" for one in range(20)))
            for handle in pop(client, 20, "ann").values():
                settle(client, "ack", handle)
        wait_until(
            lambda: figure(client, "write_failures_total") >= 2, timeout_seconds=20, what="another attempt to write"
        )
        assert figure(client, "events_dropped_total") == 0
        assert figure(client, "buffered_events") >= 600
        assert figure(client, "lag_seconds") > 1
        before = finished_files(journal)
        limit_file_size(proxy, resource.RLIM_INFINITY)
        wait_until(lambda: figure(client, "buffered_events") == 0, timeout_seconds=20, what="the journal to be written")
        assert len(finished_files(journal)) > len(before)
        assert figure(client, "lag_seconds") == 0
        assert proxy.stop() == 0
    rows = rows_of(journal)
    assert_without_gaps(rows)
    counts = Counter(row["event"] for row in rows)
    assert (counts["published"], counts["delivered"], counts["acked"], counts["journal_lost"]) == (200, 200, 200, 0)
    assert [*(journal / "_writing").iterdir()] == []


def refusal(folder: Path, journal: Path, program: Sequence[str] | None = None) -> str:
    """Return the error text of a proxy that does not start."""
    block = PortBlock()
    arguments = ("serve", "--port", str(block.ports[0]), "--data-dir", str(folder), "--journal", str(journal))
    command = popgate_command(*arguments) if program is None else [*program, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ended.returncode == 1, ended
    (said,) = ended.stderr.strip().splitlines()
    return said


def test_a_journal_that_can_not_be_written_keeps_the_proxy_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "journal"
    told = f"the journal can't be written to {place} (Not a directory); choose another place with --journal"
    assert refusal(tmp_path / "data", place) == f"popgate: {told}"
    without = "import sys; sys.modules['pyarrow'] = None; from popgate.cli import main; sys.exit(main())"
    said = refusal(tmp_path / "data", tmp_path / "journal", python_program("-c", without))
    assert said.startswith("popgate: --journal needs packages that are not installed (")
    assert said.endswith("): install popgate[journal] where popgate runs")


def test_workers_write_side_by_side(
    tmp_path: Path, journal: Path, rabbitmq: RabbitNode, redis_server: RedisServer
) -> None:
    flags = ["--journal", str(journal), "--workers", "2", *NEVER]
    with ProxyCluster(tmp_path, *flags, nodes=(rabbitmq,), redis=redis_server, size=1) as cluster:
        (proxy,) = cluster.proxies
        call(proxy.client, "PUT", "/v1/admin/topics/t", queues=2)
        call(proxy.client, "PUT", ADMIN_GROUP)
        publish(proxy.client, "one")
        settle(proxy.client, "ack", pop(proxy.client, 1, "ann")["one"])
        assert proxy.stop() == 0
        assert_no_traceback(proxy)
    rows = rows_of(journal)
    assert_without_gaps(rows)
    counts = Counter(row["event"] for row in rows)
    assert (counts["journal_started"], counts["published"], counts["delivered"], counts["acked"]) == (2, 1, 1, 1)
    assert len(finished_files(journal)) == 2
