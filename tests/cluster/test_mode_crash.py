"""Proxies die in every phase of a switch of consume modes: it completes, nothing is lost, and nothing comes twice."""

import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import httpx
import pytest

from cluster.conftest import assert_no_traceback
from cluster.dying_proxy import DIE_FILE
from support.answers import answer
from support.processes import wait_until
from support.proxy import ProxyProcess, python_program
from support.proxy_cluster import ProxyCluster, instance
from support.rabbitmq import RabbitNode
from support.redis import RedisServer

Json: TypeAlias = Any
PROGRAM = ("env", f"PYTHONPATH={os.pathsep.join(filter(None, sys.path))}", *python_program("-m", "cluster.dying_proxy"))
SIZE, QUEUES = 3, 4
MESSAGES = 24
SETTLED_SECONDS = 20.0
PHASES = [
    (step, moment, who)
    for step in ("draining", "pull", "pop")
    for moment in ("before", "after")
    for who in ("owner", "other")
]


@pytest.fixture(scope="module")
def shared(
    tmp_path_factory: pytest.TempPathFactory, rabbitmq: RabbitNode, redis_server: RedisServer
) -> Iterator[ProxyCluster]:
    folder = tmp_path_factory.mktemp("mode-crash")
    with ProxyCluster(folder, nodes=(rabbitmq,), redis=redis_server, size=SIZE, program=PROGRAM) as cluster:
        yield cluster
        for proxy in cluster.proxies:
            assert_no_traceback(proxy)


class Group:
    """A group of one topic, and requests about it, each to some proxy."""

    def __init__(self, proxies: Sequence[ProxyProcess], topic: str) -> None:
        self.proxies = proxies
        self.path = f"/v1/topics/{topic}"
        self.admin = f"/v1/admin/topics/{topic}"
        self.mode_path = f"{self.admin}/groups/g/consume-mode"
        client = proxies[0].client
        answer(client.put(self.admin, json={"queues": QUEUES}), 201)
        answer(client.put(f"{self.admin}/groups/g", json={"max_deliveries": None}), 201)
        wait_until(self.is_owned, timeout_seconds=SETTLED_SECONDS, what="all queues to be owned")
        entries = [{"body": str(number)} for number in range(MESSAGES)]
        results = answer(client.post(f"{self.path}/messages", json={"messages": entries}))["results"]
        assert {result["status"] for result in results} == {"published"}

    def owners(self) -> list[str | None]:
        """Return the owners by queue number, if all proxies agree; otherwise nothing."""
        views = [
            answer(proxy.client.get("/v1/admin/cluster"))["queues"] for proxy in self.proxies if proxy.is_running()
        ]
        mine = [{one["queue"]: one["owner"] for one in view if one["topic"] in self.path} for view in views]
        return [mine[0][number] for number in range(QUEUES)] if all(one == mine[0] for one in mine) else []

    def is_owned(self) -> bool:
        owners = self.owners()
        return None not in owners and len(set(owners)) == SIZE

    def of(self, who: str) -> ProxyProcess:
        """Return the owner of the first queue, or another proxy."""
        first = self.owners()[0]
        is_owner = {instance(proxy) == first: proxy for proxy in self.proxies}
        return is_owner[who == "owner"]

    def living(self) -> ProxyProcess:
        return next(proxy for proxy in self.proxies if proxy.is_running())

    def pop(self, count: int, **fields: object) -> list[Json]:
        """Pop up to that many through every living proxy; fewer only if there are no more."""
        found: list[Json] = []
        while len(found) < count:
            more: list[Json] = []
            for proxy in self.proxies:
                if proxy.is_running() and len(found) < count:
                    asked = {"max_messages": min(5, count - len(found)), "wait_seconds": 1, **fields}
                    more = answer(proxy.client.post(f"{self.path}/groups/g/pop", json=asked))["messages"]
                    found += more
            if not more:
                break
        return found

    def ack(self, messages: Sequence[Json]) -> list[str]:
        handles = [message["receipt_handle"] for message in messages]
        path = f"{self.path}/groups/g/ack"
        results = answer(self.living().client.post(path, json={"receipt_handles": handles}))["results"]
        return [result["status"] for result in results]

    def pull(self) -> tuple[list[Json], list[Json]]:
        """Pull up to two messages of each queue, as the group's only pull client; return those it commits at once,
        and the others.
        """
        client = self.living().client
        group = f"{self.path}/groups/g"
        asked = {"client_id": "puller", "supports": ["pull"]}
        told = answer(client.post(f"{group}/assignment", json=asked))
        assert told["queues"] == [*range(QUEUES)]
        committed: list[Json] = []
        others: list[Json] = []
        for queue in told["queues"]:
            who = {"client_id": "puller", "generation": told["generation"]}
            path = f"{group}/queues/{queue}"
            pulled = answer(client.post(f"{path}/pull", json={**who, "max_messages": 2, "wait_seconds": 1}))["messages"]
            if not pulled:  # all of it was leased before
                continue
            last = {**who, "receipt_handle": pulled[0]["receipt_handle"]}
            assert answer(client.post(f"{path}/commit", json=last)) == {"committed": 1}
            committed += pulled[:1]
            others += pulled[1:]
        assert others, "else nothing is tested"
        return committed, others

    def switch(self, mode: str, through: ProxyProcess | None = None) -> None:
        """Request the switch once through a proxy that may die of it, and then through a living one."""
        body = {"mode": mode, **({"drain_timeout_seconds": 120} if mode == "pull" else {})}
        if through is not None:
            with pytest.raises(httpx.HTTPError):
                through.client.put(self.mode_path, json=body)
            is_dead(through)
        answer(self.living().client.put(self.mode_path, json=body))

    def mode(self) -> Json:
        return answer(self.living().client.get(self.mode_path))

    def wait_for(self, mode: str) -> None:
        def is_there() -> bool:
            found = self.mode()
            return bool(found["mode"] == mode and found["converged"])

        wait_until(is_there, timeout_seconds=SETTLED_SECONDS, what=f"all proxies to serve {mode}")


def is_dead(proxy: ProxyProcess) -> None:
    wait_until(lambda: not proxy.is_running(), timeout_seconds=SETTLED_SECONDS, what="the proxy to die")


@pytest.mark.parametrize(("step", "moment", "who"), PHASES)
def test_a_switch_ends_whoever_dies_in_it(shared: ProxyCluster, step: str, moment: str, who: str) -> None:
    """The step is written to the shared state; before or after that a proxy dies: the owner of the first queue, or
    another one, which writes the step unless only the owner may.
    """
    for proxy in shared.proxies:
        (proxy.folder / DIE_FILE).unlink(missing_ok=True)
        proxy.start()
    group = Group(shared.proxies, f"{step}-{moment}-{who}")
    leased = group.pop(MESSAGES // 2, invisibility_seconds=600)
    assert group.ack(leased[:4]) == ["acked"] * 4

    victim = group.of(who)
    writes = step != "pull" or who == "owner"
    if writes:
        (victim.folder / DIE_FILE).write_text(f"{moment} {step}")
    group.switch("pull", through=victim if step == "draining" else None)
    if not writes and moment == "before":
        victim.kill()
    assert group.ack(leased[4:]) == ["acked"] * (len(leased) - 4), "none is cut off"
    if not writes and moment == "after":
        victim.kill()
    elif step == "pull":
        is_dead(victim)
    group.wait_for("pull")
    response = group.living().client.post(f"{group.path}/groups/g/pop", json={})
    assert (response.status_code, response.json()["mode"]) == (409, "pull")

    committed, uncommitted = group.pull()
    group.switch("pop", through=victim if step == "pop" else None)
    group.wait_for("pop")
    gone = {message["body"] for message in (*leased, *committed)}
    rest = group.pop(MESSAGES - len(gone))
    assert sorted(message["body"] for message in rest) == sorted({*map(str, range(MESSAGES))} - gone)
    again = {message["body"] for message in uncommitted}
    assert {
        message["body"]: message["delivery_count"] for message in rest if message["delivery_count"] > 1
    } == dict.fromkeys(again, 2)
    assert set(group.ack(rest)) == {"acked"}
    assert group.pop(1, wait_seconds=0) == []
    answer(group.living().client.delete(group.admin), 204)


def test_a_proxy_that_sleeps_through_a_switch_is_named_and_leases_nothing_when_it_wakes(shared: ProxyCluster) -> None:
    for proxy in shared.proxies:
        (proxy.folder / DIE_FILE).unlink(missing_ok=True)
        proxy.start()
    group = Group(shared.proxies, "sleeper")
    sleeper = group.of("other")
    name = instance(sleeper)
    assert sleeper.client.post(f"{group.path}/groups/g/pop", json={"max_messages": 1}).is_success  # it has a buffer
    others = [proxy for proxy in shared.proxies if proxy is not sleeper]
    sleeper.pause()
    try:
        body = {"mode": "pull", "drain_timeout_seconds": 3}
        begun = answer(others[0].client.put(group.mode_path, json=body))
        asleep = {one["proxy"]: (one["mode"], one["converged"]) for one in begun["proxies"]}
        assert asleep.get(name, (None, False)) == (None, False)
        # The answer may come when the others have already removed the sleeper. They then serve the mode alone.
        assert not (begun["converged"] and name in asleep)

        def is_there() -> bool:
            found = answer(others[1].client.get(group.mode_path))
            return bool(found["mode"] == "pull" and found["converged"])

        wait_until(is_there, timeout_seconds=SETTLED_SECONDS, what="the others to serve pull")
    finally:
        sleeper.resume()
    response = sleeper.client.post(f"{group.path}/groups/g/pop", json={"max_messages": 5})
    assert response.status_code in (409, 503), response.text
    group.proxies = [sleeper]
    group.wait_for("pull")
    group.switch("pop")
    group.wait_for("pop")
    rest = group.pop(MESSAGES)
    assert sorted(message["body"] for message in rest) == sorted(map(str, range(MESSAGES)))
    answer(sleeper.client.delete(group.admin), 204)
