"""The secret of a cluster is replaced under load, as `popgate secrets --help` says, and so are the keys of its clients.

No handle becomes invalid, no request is refused, nothing is lost, and nothing comes again after an ack.

Each proxy has files of its own. It reads its secrets when it starts, so that between two restarts the proxies have
different lists. It reads its keys when they change.
"""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from popgate.config.security_values import secrets_in
from support.answers import answer
from support.command_line import CommandLine
from support.processes import wait_until
from support.proxy import ProxyProcess
from support.proxy_cluster import ProxyCluster
from support.rabbitmq import RabbitNode
from support.redis import RedisServer
from support.rolling_load import WAITS_SECONDS, RollingLoad

Json: TypeAlias = Any
SIZE = 3
QUEUES = 6
AGREED_SECONDS = 20.0
MIXED_SECONDS = 0.5
"""Seconds for which the load continues after each restart."""
HELD_SECONDS = 600
NO_HEADERS: Mapping[str, str] = {}
CHANGED_SECONDS = 1.0
"""Maximum seconds until every proxy knows a new key, or refuses a revoked one."""
ROTATIONS = 2
HELD = "/v1/topics/held/groups/g"
PER_STEP = 3 * SIZE


def popgate(*arguments: str) -> str:
    """Run a command that needs no proxy. Return what it prints."""
    done = CommandLine("http://127.0.0.1:1")(*arguments)
    assert done.code == 0, done.err
    return done.out.strip()


class Secrets:
    """The administrator's file, and a copy for each proxy."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.file = folder / "secrets"
        self.copies = [folder / f"secrets-{number}" for number in range(SIZE)]
        self.run("new")
        for number in range(SIZE):
            self.copy(number)

    def run(self, action: str) -> None:
        popgate("secrets", action, str(self.file))

    def copy(self, number: int) -> None:
        shutil.copy(self.file, self.copies[number])

    def known(self) -> tuple[bytes, ...]:
        return secrets_in(self.file.read_bytes())


class Holder:
    """A client that holds leases while proxies restart. It pops and settles through different proxies."""

    def __init__(self, proxies: Sequence[ProxyProcess]) -> None:
        self._proxies = proxies
        self._published = 0
        self.delivered: list[str] = []
        self.handles: list[str] = []

    def take(self, count: int) -> None:
        """Lease `count` new messages, through every proxy."""
        messages = [{"body": str(self._published + number)} for number in range(count)]
        self._published += count
        answer(self._proxies[0].client.post("/v1/topics/held/messages", json={"messages": messages}))
        for number in range(count):
            pop = {"wait_seconds": 10, "invisibility_seconds": HELD_SECONDS}
            (message,) = answer(self._proxy(number).client.post(f"{HELD}/pop", json=pop))["messages"]
            self.delivered.append(message["body"])
            self.handles.append(message["receipt_handle"])

    def extend(self) -> None:
        """Extend all leases, each through another proxy than at its pop; the handles stay valid."""
        for number, handle in enumerate(self.handles):
            entries = [{"receipt_handle": handle, "invisibility_seconds": HELD_SECONDS}]
            given = answer(self._proxy(number + 1).client.post(f"{HELD}/extend", json={"entries": entries}))
            assert [result["status"] for result in given["results"]] == ["extended"]

    def ack(self, count: int) -> None:
        """Ack the leases that have been held longest."""
        for number in range(count):
            body = {"receipt_handles": [self.handles.pop(0)]}
            given = answer(self._proxy(number + 2).client.post(f"{HELD}/ack", json=body))
            assert [result["status"] for result in given["results"]] == ["acked"]

    def assert_once(self) -> None:
        """Assert that each message came once, and that nothing is left."""
        assert sorted(self.delivered, key=int) == list(map(str, range(self._published)))
        for proxy in self._proxies:
            assert answer(proxy.client.post(f"{HELD}/pop", json={"wait_seconds": 0}))["messages"] == []

    def _proxy(self, number: int) -> ProxyProcess:
        return self._proxies[number % len(self._proxies)]


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path / "secrets")


@pytest.fixture
def cluster(
    tmp_path: Path, rabbitmq: RabbitNode, redis_server: RedisServer, secrets: Secrets
) -> Iterator[ProxyCluster]:
    environments = [{"POPGATE_SECRET_FILE": str(file)} for file in secrets.copies]
    proxies = ProxyCluster(tmp_path, nodes=(rabbitmq,), redis=redis_server, size=SIZE, environments=environments)
    with proxies:
        client = proxies.proxies[0].client
        for topic in ("t", "held"):
            answer(client.put(f"/v1/admin/topics/{topic}", json={"queues": QUEUES}), 201)
            answer(client.put(f"/v1/admin/topics/{topic}/groups/g", json={"max_deliveries": None}), 201)
        wait_until(lambda: is_agreed(proxies.proxies), timeout_seconds=AGREED_SECONDS, what="all to own queues")
        yield proxies
    for proxy in proxies.proxies:
        log = (proxy.folder / "output.log").read_text(errors="replace")
        assert "Traceback" not in log, log


def is_agreed(proxies: Sequence[ProxyProcess], headers: Mapping[str, str] = NO_HEADERS) -> bool:
    """Tell whether all see each other, and each owns queues."""
    views = [answer(proxy.client.get("/v1/admin/cluster", headers=headers)) for proxy in proxies]
    names = {view["instance"] for view in views}
    owners = [{one["broker_queue"]: one["owner"] for one in view["queues"]} for view in views]
    return (
        all({member["instance"] for member in view["members"]} == names for view in views)
        and all(one == owners[0] for one in owners)
        and {*owners[0].values()} == names
    )


def restart_each(cluster: ProxyCluster, secrets: Secrets, holder: Holder) -> None:
    """Copy the file to one proxy after the other, and restart it. Meanwhile take and use leases."""
    for number, proxy in enumerate(cluster.proxies):
        secrets.copy(number)
        proxy.restart()
        wait_until(lambda: is_agreed(cluster.proxies), timeout_seconds=AGREED_SECONDS, what="all to own queues")
        holder.take(PER_STEP)
        holder.extend()
        time.sleep(MIXED_SECONDS)


def test_a_secret_is_replaced_under_load_without_an_invalid_handle_a_loss_or_a_duplicate(
    cluster: ProxyCluster, secrets: Secrets
) -> None:
    (old,) = secrets.known()
    holder = Holder(cluster.proxies)
    holder.take(PER_STEP)
    with RollingLoad([proxy.url for proxy in cluster.proxies], topic="t", group="g") as load:
        secrets.run("add")
        restart_each(cluster, secrets, holder)
        secrets.run("promote")
        restart_each(cluster, secrets, holder)
        holder.ack(len(holder.handles) - PER_STEP)  # only leases of the last proxy are left: the new secret signed them
        secrets.run("drop")
        restart_each(cluster, secrets, holder)
    load.assert_kept()
    holder.ack(len(holder.handles))
    holder.assert_once()
    (new,) = secrets.known()
    assert new != old
    print(f"\n{len(load.published)} messages, {sum(load.settled.values())} settlements")  # noqa: T201 - the result


def test_a_dropped_secret_is_worth_nothing(cluster: ProxyCluster, secrets: Secrets) -> None:
    """Without the wait for the longest lease, its handle becomes invalid: the drop has an effect."""
    holder = Holder(cluster.proxies)
    holder.take(1)
    for action in ("add", "promote", "drop"):
        secrets.run(action)
    for number in range(SIZE):
        secrets.copy(number)
    for proxy in cluster.proxies:
        proxy.stop()
    for proxy in cluster.proxies:
        proxy.start()
    given = answer(cluster.proxies[0].client.post(f"{HELD}/ack", json={"receipt_handles": holder.handles}))
    assert [result["status"] for result in given["results"]] == ["invalid"]


# ---------------------------------------------------------------- keys


class Keys:
    """The administrator's file of keys, which all proxies read, and the keys that clients use."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.toml"
        self.administrator = self._run("add", "alice", "--role", "administrator")
        self.worker = self._run("add", "orders-app", "--role", "worker")

    def rotate(self) -> str:
        """Add a key for the worker, and return it. The former one stays valid."""
        return self._run("rotate", "orders-app", "--keep-old", "1h")

    def revoke(self, key: str) -> None:
        self._run("revoke", key.split("_")[1])

    def _run(self, *arguments: str) -> str:
        return popgate("keys", *arguments, "--file", str(self.file))


def bearer(key: str) -> Mapping[str, str]:
    return {"authorization": f"Bearer {key}"}


def wait_answered(proxies: Sequence[ProxyProcess], key: str, status: int) -> None:
    """Return when every proxy answers a pop with this status. Raises: TimeoutError after `CHANGED_SECONDS`."""

    def are_answered() -> bool:
        pop, headers = {"wait_seconds": 0}, bearer(key)
        given = [proxy.client.post(f"{HELD}/pop", json=pop, headers=headers) for proxy in proxies]
        return {one.status_code for one in given} == {status}

    wait_until(are_answered, timeout_seconds=CHANGED_SECONDS, what=f"all to answer {status}")


def test_keys_are_replaced_under_load_without_a_refusal_and_leases_outlive_their_key(
    tmp_path: Path, rabbitmq: RabbitNode, redis_server: RedisServer
) -> None:
    keys = Keys(tmp_path)
    with ProxyCluster(
        tmp_path, "--keys-file", str(keys.file), nodes=(rabbitmq,), redis=redis_server, size=SIZE
    ) as cluster:
        proxies, administrator = cluster.proxies, bearer(keys.administrator)
        for topic in ("t", "held"):
            path = f"/v1/admin/topics/{topic}"
            answer(proxies[0].client.put(path, json={"queues": QUEUES}, headers=administrator), 201)
            policy = {"max_deliveries": None}
            answer(proxies[0].client.put(f"{path}/groups/g", json=policy, headers=administrator), 201)
        wait_until(lambda: is_agreed(proxies, administrator), timeout_seconds=AGREED_SECONDS, what="owners of queues")
        message = {"messages": [{"body": "held"}]}
        answer(proxies[0].client.post("/v1/topics/held/messages", json=message, headers=bearer(keys.worker)))
        pop = {"wait_seconds": 10, "invisibility_seconds": HELD_SECONDS}
        (held,) = answer(proxies[1].client.post(f"{HELD}/pop", json=pop, headers=bearer(keys.worker)))["messages"]
        used = [keys.worker]
        with RollingLoad(
            [proxy.url for proxy in proxies], topic="t", group="g", headers=lambda: bearer(used[-1])
        ) as load:
            for _ in range(ROTATIONS):
                former, fresh = used[-1], keys.rotate()
                wait_answered(proxies, fresh, 200)
                used.append(fresh)
                time.sleep(MIXED_SECONDS + max(WAITS_SECONDS))  # until pops with the former key have been answered
                keys.revoke(former)
                wait_answered(proxies, former, 401)
        load.assert_kept()
        handles = {"receipt_handles": [held["receipt_handle"]]}
        given = answer(proxies[2].client.post(f"{HELD}/ack", json=handles, headers=bearer(used[-1])))
        assert [result["status"] for result in given["results"]] == ["acked"]
