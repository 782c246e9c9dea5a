"""Makes a data folder with something of everything, and keeps it as text: one file for each schema version.

After a change of the schema, add the file of the new version, and leave the others as they are:

    PYTHONPATH=tests .venv/bin/python -m releases.data_folder

`load` makes a data folder from such a file. Its times are in the past, as those of a folder before an upgrade.
"""

import base64
import json
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from popgate.adapters.sqlite.schema import APPLICATION_ID, SCHEMA_VERSION
from support.proxy import ProxyProcess

FOLDER = Path(__file__).parent / "data_folders"
STORE = "popgate.db"
GROUP = "/v1/topics/orders/groups/billing"
BINARY = bytes(range(256))


def files() -> dict[int, Path]:
    """The kept folders by schema version."""
    return {int(path.stem.removeprefix("schema-")): path for path in sorted(FOLDER.glob("schema-*.json"))}


def load(file: Path, folder: Path) -> dict[str, Any]:
    """Make the data folder `folder` from a kept file, and return what is known of its content."""
    kept: dict[str, Any] = json.loads(file.read_text())
    folder.mkdir(mode=0o700)
    for name in ("secret", "broker"):
        (folder / name).write_text(kept[name])
        (folder / name).chmod(0o600)
    with closing(sqlite3.connect(folder / STORE)) as connection:
        connection.execute("PRAGMA page_size = 8192")
        connection.executescript("\n".join(kept["store"]))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {kept['schema']}")
    (folder / STORE).chmod(0o600)
    known: dict[str, Any] = kept["known"]
    return known


def fill(http: httpx.Client) -> dict[str, Any]:
    """Put something of everything into a proxy, and return what a later version must know."""

    def send(method: str, path: str, body: object = None) -> Any:
        answer = http.request(method, path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None

    policy: dict[str, Any] = {
        "max_deliveries": 5,
        "invisibility_seconds": 7.5,
        "retry": {"initial_seconds": 2, "multiplier": 3, "max_seconds": 9},
    }
    send("PUT", "/v1/admin/topics/orders", {"queues": 2})
    send("PUT", "/v1/admin/topics/orders/groups/billing", policy)
    send("PUT", "/v1/admin/topics/orders/groups/paused", {"paused": True})
    send("PUT", "/v1/admin/topics/pulled", {"queues": 1})
    send("PUT", "/v1/admin/topics/pulled/groups/reader", {})
    send("PUT", "/v1/admin/topics/pulled/groups/reader/consume-mode", {"mode": "pull"})
    send("POST", "/v1/topics/pulled/groups/reader/assignment", {"client_id": "one", "supports": ["pull"]})
    send("POST", "/v1/topics/pulled/messages", {"messages": [{"body": "to be pulled"}]})
    messages: list[dict[str, Any]] = [
        {"body": "rejected", "message_id": "m-rejected"},
        {"body": "acked", "message_id": "m-acked"},
        {"body": "leased", "message_id": "m-leased"},
        {"body": "ready", "message_id": "m-ready", "headers": {"kind": "a", "n": 1}, "ordering_key": "k"},
        {"body_base64": base64.b64encode(BINARY).decode(), "message_id": "m-binary"},
        {"body": "delayed", "message_id": "m-delayed", "delay_seconds": 86_400},
        {"body": "once", "message_id": "m-once", "dedup_id": "d-1", "ttl_seconds": 86_400},
    ]
    popped: dict[str, Any] = {}
    for message in messages[:3]:
        send("POST", "/v1/topics/orders/messages", {"messages": [message]})
        (popped,) = send("POST", f"{GROUP}/pop", {"invisibility_seconds": 1})["messages"]
        handle = {"receipt_handle": popped["receipt_handle"]}
        if message["body"] == "rejected":
            send("POST", f"{GROUP}/reject", {"entries": [{**handle, "reason": "broken"}]})
        if message["body"] == "acked":
            send("POST", f"{GROUP}/ack", {"receipt_handles": [popped["receipt_handle"]]})
    send("POST", "/v1/topics/orders/messages", {"messages": messages[3:]})
    send("PUT", "/v1/locks/report", {"kind": "semaphore", "slots": 3})
    lock = send("POST", "/v1/locks/report/acquire", {"holder": "one", "ttl_seconds": 60})
    return {"fencing_token": lock["fencing_token"], "handle": popped["receipt_handle"], "policy": policy}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        with ProxyProcess(Path(place)) as proxy:
            known = fill(proxy.client)
            proxy.stop()
        with closing(sqlite3.connect(proxy.data_folder / STORE)) as connection:
            store = list(connection.iterdump())
        kept = {
            "schema": SCHEMA_VERSION,
            "known": known,
            **{name: (proxy.data_folder / name).read_text() for name in ("secret", "broker")},
            "store": store,
        }
    (FOLDER / f"schema-{SCHEMA_VERSION}.json").write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
