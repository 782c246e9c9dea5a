"""Fills a proxy with the messages, leases, dead letters and locks that tests of the console look at."""

from collections.abc import Sequence

from support.proxy import ProxyProcess


def make_group(proxy: ProxyProcess, topic: str, group: str = "default", *, queues: int = 1, **policy: object) -> str:
    """Create a topic with one group. Return the path of the group."""
    assert proxy.client.put(f"/v1/admin/topics/{topic}", json={"queues": queues}).is_success
    assert proxy.client.put(f"/v1/admin/topics/{topic}/groups/{group}", json=policy).is_success
    return f"/v1/topics/{topic}/groups/{group}"


def publish(proxy: ProxyProcess, topic: str, bodies: Sequence[str]) -> list[str]:
    """Publish messages. Return their ids."""
    messages = [{"body": body, "headers": {"kind": "test"}} for body in bodies]
    answer = proxy.client.post(f"/v1/topics/{topic}/messages", json={"messages": messages})
    assert answer.is_success, answer.text
    return [one["message_id"] for one in answer.json()["results"]]


def lease(proxy: ProxyProcess, group: str, count: int, client: str = "worker-1") -> list[str]:
    """Lease messages of a group. Return their receipt handles."""
    receipts: list[str] = []
    while len(receipts) < count:
        asked = {"max_messages": count - len(receipts), "wait_seconds": 10, "client_id": client}
        popped = proxy.client.post(f"{group}/pop", json=asked).json()["messages"]
        assert popped, f"only {len(receipts)} of {count} messages were handed out"
        receipts += [one["receipt_handle"] for one in popped]
    return receipts


def bury(proxy: ProxyProcess, topic: str, bodies: Sequence[str], reason: str, group: str = "default") -> None:
    """Make dead letters of a group, with these bodies."""
    publish(proxy, topic, bodies)
    path = f"/v1/topics/{topic}/groups/{group}"
    entries = [{"receipt_handle": one, "reason": reason} for one in lease(proxy, path, len(bodies))]
    results = proxy.client.post(f"{path}/reject", json={"entries": entries}).json()["results"]
    assert {one["status"] for one in results} == {"rejected"}


def counts(proxy: ProxyProcess, group: str) -> dict[str, int]:
    """Return the counts of a group's messages."""
    state = proxy.client.get(group).json()
    return {name: state[name] for name in ("ready", "in_flight", "dead")}
