"""The OpenAPI description is true: requests that schemathesis derives from it are answered as described, and never with
a 5xx.

All operations, JSON and MessagePack, valid and invalid data, single and in sequence, on both brokers (in the short run
invalid data on the embedded one only). It runs as a separate program, as any user would run it; on failure the output
contains the requests to repeat.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from contract.http_server import HttpServer, answer
from contract.http_server import lean_server as server
from support.key_files import KeyFile, everything
from support.proxy import ProxyProcess

__all__ = ["server"]

pytestmark = pytest.mark.slow

TESTS_FOLDER = Path(__file__).parents[1]
OPERATIONS = {
    "get /v1",
    "post /v1/topics/{topic}/messages",
    "get /v1/topics/{topic}/groups/{group}",
    "post /v1/topics/{topic}/groups/{group}/pop",
    "post /v1/topics/{topic}/groups/{group}/ack",
    "post /v1/topics/{topic}/groups/{group}/release",
    "post /v1/topics/{topic}/groups/{group}/extend",
    "post /v1/topics/{topic}/groups/{group}/reject",
    "get /v1/topics/{topic}/groups/{group}/lease-groups",
    "put /v1/topics/{topic}/groups/{group}/lease-groups/{stream}/{epoch}",
    "get /v1/topics/{topic}/groups/{group}/lease-groups/{stream}/{epoch}/messages",
    "post /v1/topics/{topic}/groups/{group}/lease-groups/{stream}/ack",
    "post /v1/topics/{topic}/groups/{group}/lease-groups/{stream}/extend",
    "post /v1/topics/{topic}/groups/{group}/lease-groups/{stream}/release",
    "post /v1/topics/{topic}/groups/{group}/assignment",
    "delete /v1/topics/{topic}/groups/{group}/assignment/{client_id}",
    "post /v1/topics/{topic}/groups/{group}/queues/{queue}/pull",
    "post /v1/topics/{topic}/groups/{group}/queues/{queue}/commit",
    "get /v1/locks",
    "get /v1/locks/{name}",
    "put /v1/locks/{name}",
    "delete /v1/locks/{name}",
    "post /v1/locks/{name}/acquire",
    "post /v1/locks/{name}/verify",
    "post /v1/locks/{name}/renew",
    "post /v1/locks/{name}/release",
    "post /v1/locks/{name}/force-release",
    "get /v1/caller",
    "get /v1/admin/cluster",
    "post /v1/admin/backup",
    "get /v1/admin/backup",
    "get /v1/admin/backup/archive",
    "delete /v1/admin/backup",
    "get /v1/admin/doctor",
    "post /v1/admin/doctor",
    "get /v1/admin/reports",
    "get /v1/admin/reports/{name}",
    "get /v1/admin/log-level",
    "put /v1/admin/log-level",
    "get /v1/admin/replicas",
    "get /v1/admin/replicas/groups",
    "get /v1/admin/topics",
    "put /v1/admin/topics/{topic}",
    "get /v1/admin/topics/{topic}",
    "delete /v1/admin/topics/{topic}",
    "put /v1/admin/topics/{topic}/groups/{group}",
    "get /v1/admin/topics/{topic}/groups/{group}",
    "delete /v1/admin/topics/{topic}/groups/{group}",
    "put /v1/admin/topics/{topic}/groups/{group}/consume-mode",
    "get /v1/admin/topics/{topic}/groups/{group}/consume-mode",
    "get /v1/admin/topics/{topic}/groups/{group}/explain",
    "get /v1/admin/topics/{topic}/groups/{group}/messages",
    "get /v1/admin/topics/{topic}/messages",
    "get /v1/admin/topics/{topic}/messages/{message_id}",
    "get /v1/admin/topics/{topic}/groups/{group}/dead-letters",
    "get /v1/admin/topics/{topic}/groups/{group}/dead-letters/{id}",
    "post /v1/admin/topics/{topic}/groups/{group}/dead-letters/redrive",
    "get /v1/admin/topics/{topic}/groups/{group}/dead-letters/redrive",
    "delete /v1/admin/topics/{topic}/groups/{group}/dead-letters/redrive",
    "post /v1/admin/topics/{topic}/groups/{group}/dead-letters/purge",
    "post /v1/admin/topics/{topic}/groups/{group}/purge",
    "post /v1/admin/topics/{topic}/groups/{group}/pause",
    "post /v1/admin/topics/{topic}/groups/{group}/resume",
    "get /healthz",
    "get /readyz",
    "get /metrics",
}


def test_every_operation_is_described(server: HttpServer) -> None:
    description: Mapping[str, Any] = answer(server.client.get("/openapi.json"))
    assert description["openapi"].startswith("3.1")
    assert {f"{method} {path}" for path, methods in description["paths"].items() for method in methods} == OPERATIONS
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], f"{method} {path}"
            assert "422" not in operation["responses"], "that is FastAPI's, not ours"


def test_what_is_refused_before_an_operation_is_described_once(server: HttpServer) -> None:
    description = answer(server.client.get("/openapi.json"))["info"]["description"]
    for refusal in ("403 `host_not_allowed`", "408 `request_timeout`", "414, 431 `head_too_large`", "503 `overloaded`"):
        assert refusal in description


def test_what_the_page_offers_to_be_tried_is_not_refused(server: HttpServer) -> None:
    topic = server.topic(queues=4)  # as the example has it: only a drained topic takes another number
    names = {"topic": topic.name, "group": topic.group, "stream": "nightly", "epoch": "1", "name": topic.name}
    names |= {"client_id": "billing-7", "queue": "0"}
    refused: list[str] = []
    for path, methods in answer(server.client.get("/openapi.json"))["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                assert "example" in content, (
                    f"{method} {path}: add its example to _EXAMPLES in proxy/popgate/api/openapi.py"
                )
                example = content["example"]
                response = server.client.request(method, path.format(**names), json=example)
                # No example can have a token that is held, and a group is not consumed in both modes.
                if not response.is_success and response.json()["code"] not in ("lock_lost", "wrong_mode"):
                    refused.append(f"{method} {path}: {response.text}")
    assert refused == []


def test_every_answer_is_as_described(server: HttpServer, tmp_path: Path, seed: int, full_run: bool) -> None:
    # Invalid requests are refused before they reach a broker: the short run sends them on one only.
    mode = "positive" if server.broker == "rabbitmq" and not full_run else "all"
    examples = "100" if full_run else "4"
    settings = ("--checks", "all", "--seed", str(seed), "--max-examples", examples, "--mode", mode)
    schemathesis(tmp_path, f"{server.process.url}/openapi.json", *settings)
    answer(server.client.get("/readyz"))
    assert "Traceback" not in server.process.output


@pytest.mark.parametrize("has_key", [True, False], ids=["with a key", "without a key"])
def test_no_answer_of_a_proxy_with_keys_is_a_server_error(
    tmp_path: Path, seed: int, full_run: bool, has_key: bool
) -> None:
    keys = KeyFile(tmp_path / "keys.toml")
    admin = keys.principal("admin", everything())
    with ProxyProcess(tmp_path / "proxy", "--keys-file", str(keys.path)) as proxy:
        description = proxy.client.get("/openapi.json", headers=admin.headers)
        (tmp_path / "openapi.json").write_bytes(description.content)
        settings = ["--url", proxy.url, "--checks", "not_a_server_error", "--seed", str(seed)]
        settings += ["--max-examples", "100" if full_run else "4"]
        if has_key:
            settings += ["--header", f"Authorization: {admin.headers['authorization']}"]
        printed = schemathesis(tmp_path, str(tmp_path / "openapi.json"), *settings)
        assert "generated" in printed
        assert proxy.client.get("/readyz").is_success
        assert "Traceback" not in proxy.output
        assert proxy.client.get("/v1/admin/topics", headers=admin.headers).is_success
        metrics = proxy.client.get("/metrics", headers=admin.headers).text
        published = 'popgate_http_requests_total{operation="publish",status="200"}' in metrics
        assert published == has_key, "only with a key can a request have been carried out"


def schemathesis(folder: Path, *arguments: str) -> str:
    """Run schemathesis as any user would, and return what it prints."""
    result = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", "run", *arguments, "--no-color"],
        env={**os.environ, "PYTHONPATH": str(TESTS_FOLDER), "SCHEMATHESIS_HOOKS": "contract.http_schema_hooks"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
