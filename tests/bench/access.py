"""The cost of the gate: single pops of a proxy with keys, compared with a proxy without any.

Both proxies run embedded at the same time. Their requests take turns in short rounds over kept connections, so that
other load on the machine affects both. A pop leases one message and is answered before the next one is sent.
"""

import asyncio
import http.client
import secrets
import statistics
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path

from bench import load
from bench.report import Rates, Report, Row
from support.proxy import ProxyProcess

PRINCIPALS = 50
ROUNDS = 120
REQUESTS = 200
TARGET = 1.03
KEYS, NONE = "with keys", "without keys"
POP = "/v1/topics/bench/groups/default/pop"


def rows(report: Report, folder: Path, scale: float) -> None:
    """Add the time of a single pop with keys."""
    token = _write_keys(folder / "access-keys.toml")
    rounds = max(10, int(ROUNDS * scale))
    times = Rates()
    with ExitStack() as stack:
        clients: dict[str, tuple[http.client.HTTPConnection, dict[str, str]]] = {}
        for name in (KEYS, NONE):
            proxy = ProxyProcess(folder / f"access-{name.replace(' ', '-')}")
            stack.callback(proxy.close)
            proxy.start()
            load.make_topic(proxy)
            asyncio.run(load.fill(proxy.port, total=rounds * REQUESTS))
            headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
            if name == KEYS:  # the bench's own requests need no key until now
                proxy.stop()
                proxy = ProxyProcess(
                    proxy.folder, "--keys-file", str(folder / "access-keys.toml"), data_folder=proxy.data_folder
                )
                stack.callback(proxy.close)
                proxy.start()
            clients[name] = http.client.HTTPConnection("127.0.0.1", proxy.port), headers
        for number in range(rounds):
            for name in (KEYS, NONE) if number % 2 else (NONE, KEYS):
                times.note(name, _seconds_of_a_pop(*clients[name]))
    ratio = times.ratio(KEYS, NONE)
    report.add(
        Row(
            name="embedded: single pop, with keys",
            value=1e6 * times.median(KEYS),
            unit="us",
            against=NONE,
            ratio=ratio,
            ratio_error=times.ratio_error(KEYS, NONE),
            target=f"<= {TARGET}x",
            reached=ratio <= TARGET,
        )
    )


def _seconds_of_a_pop(connection: http.client.HTTPConnection, headers: dict[str, str]) -> float:
    seconds: list[float] = []
    for _ in range(REQUESTS):
        began = time.perf_counter()
        connection.request("POST", POP, b"{}", headers)
        answer = connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
        assert b"receipt_handle" in answer, answer
    return statistics.median(seconds)


def _write_keys(path: Path) -> str:
    """Write a keys file with many principals, and return the key of one that may consume its topic only."""
    lines: list[str] = []
    token = ""
    for number in range(PRINCIPALS):
        id = secrets.token_hex(5)
        token = f"pg_{id}_{secrets.token_urlsafe(32)}"
        lines += [
            f"[principals.app-{number}]",
            'grants = [{actions = ["publish"], topics = ["other.*"]}, {actions = ["consume"], topics = ["ben*"]}]',
            f"[principals.app-{number}.keys.{id}]",
            f'sha256 = "{sha256(token.encode()).hexdigest()}"',
            "created = 2026-01-01T00:00:00Z",
        ]
    path.touch(mode=0o600)
    path.write_text("\n".join(lines) + "\n")
    return token
