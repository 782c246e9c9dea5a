"""How a keeper outside of the proxies handles proxies that don't report groups' own counts.

``test_http_admin`` covers reports of real proxies, which it already runs.
"""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from popgate.adapters.replicas.proxy_groups import ProxyReplicaGroups
from popgate.domain.errors import PeerUnavailable
from popgate.replicas.group_memory import RememberedGroups
from support.command_line import CommandLine

NOBODY = "http://127.0.0.1:1"
CREDENTIALS: list[str | None] = []
"""The ``Authorization`` headers that ``Stranger`` got."""


class Stranger(BaseHTTPRequestHandler):
    """Another program, which answers every request."""

    def do_GET(self) -> None:
        CREDENTIALS.append(self.headers["authorization"])
        self.send_response(int(self.path[1:4]))
        self.end_headers()
        self.wfile.write(b'{"groups": "many"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize(
    ("status", "says"), [(404, "answers 404"), (302, "answers 302"), (200, "is not a popgate proxy")]
)
async def test_what_is_no_proxy_is_said(status: int, says: str) -> None:
    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, args=(0.02,), daemon=True).start()
        groups = ProxyReplicaGroups([f"http://user:password@127.0.0.1:{stranger.server_port}/{status}"], "/", None)
        with pytest.raises(PeerUnavailable, match=says) as raised:
            await groups.asking()
        assert "password" not in raised.value.detail
        await groups.close()
        await asyncio.to_thread(stranger.shutdown)


@pytest.mark.parametrize(("status", "says"), [(401, "POPGATE_TOKEN or --token-file"), (403, "permission 'inspect'")])
async def test_each_reading_uses_the_token_of_the_moment(status: int, says: str) -> None:
    tokens = iter(["first", "second"])

    def token() -> str:
        try:
            return next(tokens)
        except StopIteration:
            raise PeerUnavailable("the token file is gone") from None

    CREDENTIALS.clear()
    with HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, args=(0.02,), daemon=True).start()
        groups = ProxyReplicaGroups([f"http://127.0.0.1:{stranger.server_port}/{status}"], "/", token)
        for _ in range(2):
            with pytest.raises(PeerUnavailable, match=says):
                await groups.asking()
        with pytest.raises(PeerUnavailable, match="the token file is gone"):
            await groups.asking()
        await groups.close()
        await asyncio.to_thread(stranger.shutdown)
    assert CREDENTIALS == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("command", ["status", "watch"])
@pytest.mark.parametrize(
    ("urls", "token", "hosts"),
    [
        ("http://popgate.example.org,http://popgate.example.org:1,http://192.0.2.1", "s3cret", 2),
        ("http://user:s3cret@popgate.example.org", "", 1),
        ("http://popgate.example.org", "", 0),
        ("https://popgate.example.org,http://127.0.0.1:1,http://localhost:1,http://[::1]:1", "s3cret", 0),
    ],
)
def test_a_command_warns_once_for_each_host_that_gets_a_credential_without_encryption(
    command: str, urls: str, token: str, hosts: int
) -> None:
    popgate = CommandLine("http://127.0.0.1:1")
    popgate.environment["POPGATE_TOKEN"] = token
    done = popgate("replicas", command, "--amqp-url", "amqp://127.0.0.1:1/", "--groups-url", urls)
    assert done.code == 3
    assert done.err.count("without encryption") == hosts
    assert hosts == 0 or "popgate.example.org" in done.err
    assert "s3cret" not in done.err


async def test_before_the_first_answer_nothing_is_taken_for_known() -> None:
    groups = ProxyReplicaGroups([NOBODY], "/", None)
    with pytest.raises(PeerUnavailable, match=r"no proxy reports the replicas of its groups \(127\.0\.0\.1:1: "):
        await RememberedGroups(groups).asking()
    await groups.close()
