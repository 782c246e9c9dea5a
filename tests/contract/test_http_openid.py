"""Tokens of a real OpenID provider (support/openid.py) on a real proxy: scopes, expiry, rotated keys, and a provider
that is down."""

import base64
import json
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from contract.http_server import problem
from popgate.auth.provider_keys import UNKNOWN_KEY_SECONDS
from support.openid import OpenIdProvider, TokenClient, new_keys
from support.processes import wait_until
from support.proxy import ProxyProcess

AUDIENCE = "https://popgate.example.org"
SHORT_SECONDS = 3
KEYS_SECONDS = 15
"""Maximum seconds until a proxy has fetched changed keys: a token with an unknown key causes it."""
TEAM_SCOPES = ("read:orders/*", "write:orders", "configure:orders/*")
CLIENTS = (
    TokenClient(id="team-RS256", scopes=TEAM_SCOPES, algorithm="RS256"),
    TokenClient(id="team-ES256", scopes=TEAM_SCOPES, algorithm="ES256"),
    TokenClient(id="team-EdDSA", scopes=TEAM_SCOPES, algorithm="EdDSA"),
    TokenClient(id="admin", scopes=["tag:administrator"]),
    TokenClient(id="monitor", scopes=["tag:monitoring", "openid"]),
    TokenClient(id="short", scopes=TEAM_SCOPES, seconds=SHORT_SECONDS),
    TokenClient(id="named team", scopes=TEAM_SCOPES),
)
PUBLISH, POP = "/v1/topics/orders/messages", "/v1/topics/orders/groups/billing/pop"
MESSAGES = {"messages": [{"body": "hello"}]}


class Gate:
    """A proxy that accepts the tokens of a provider."""

    def __init__(self, folder: Path, provider: OpenIdProvider, *flags: str, trusts: bool = True) -> None:
        trust = ["--oidc-ca-file", str(provider.ca_file)] if trusts else []
        own = ["--oidc-issuer", provider.issuer, "--oidc-audience", AUDIENCE, "--auto-create", "true"]
        self.provider = provider
        self.audit_log = folder / "audit.jsonl"
        self.process = ProxyProcess(folder, *own, *trust, "--audit-log", str(self.audit_log), *flags)

    def __enter__(self) -> Self:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()

    def token(self, client: str, *, audience: str = AUDIENCE, scopes: Sequence[str] | None = None) -> str:
        return self.provider.token(client, audience, scopes)

    def send(self, method: str, path: str, token: str, body: object = None) -> httpx.Response:
        return self.process.client.request(method, path, json=body, headers={"authorization": f"Bearer {token}"})

    def status(self, token: str) -> int:
        return self.send("GET", "/v1", token).status_code

    def refuses(self, token: str) -> str:
        answered = self.send("GET", "/v1", token)
        detail = str(problem(answered, 401, "unauthenticated")["detail"])
        assert answered.headers["www-authenticate"].startswith("Bearer")
        assert token not in answered.text
        return detail

    def wait_for(self, status: int, token: str) -> None:
        """Return when the proxy answers the token with this status. It fetches the keys meanwhile."""

        def is_so() -> bool:
            self.status(with_unknown_key(token))
            return self.status(token) == status

        wait_until(is_so, timeout_seconds=KEYS_SECONDS, what=f"status {status}")


class Parked:
    """A pop that waits in another thread."""

    def __init__(self, gate: Gate, token: str) -> None:
        self._found: list[httpx.Response] = []
        request = (gate, token)
        self._thread = threading.Thread(target=self._pop, args=request, daemon=True)
        self._thread.start()

    def _pop(self, gate: Gate, token: str) -> None:
        self._found.append(gate.send("POST", POP, token, {"wait_seconds": 20}))

    def ended(self, timeout_seconds: float) -> httpx.Response:
        self._thread.join(timeout_seconds)
        assert self._found, f"still waits after {timeout_seconds} s"
        return self._found[0]


def claims_of(token: str) -> dict[str, Any]:
    claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    return claims


def with_unknown_key(token: str) -> str:
    """Return the token with a header that names a key that does not exist."""
    header, rest = token.split(".", 1)
    changed = {**json.loads(base64.urlsafe_b64decode(header + "==")), "kid": secrets.token_hex(8)}
    return f"{base64.urlsafe_b64encode(json.dumps(changed).encode()).decode().rstrip('=')}.{rest}"


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory, openid_modules: Path) -> Iterator[OpenIdProvider]:
    """The provider of tests that leave it as it is."""
    with OpenIdProvider(tmp_path_factory.mktemp("provider"), openid_modules, CLIENTS) as provider:
        yield provider


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory, provider: OpenIdProvider) -> Iterator[Gate]:
    with Gate(tmp_path_factory.mktemp("gate"), provider) as gate:
        assert gate.send("PUT", "/v1/admin/topics/orders", gate.token("admin"), {"queues": 1}).is_success
        yield gate


@pytest.fixture
def own_provider(tmp_path: Path, openid_modules: Path) -> Iterator[OpenIdProvider]:
    """A provider that the test may stop and change. It does not run yet."""
    provider = OpenIdProvider(tmp_path / "provider", openid_modules, CLIENTS)
    yield provider
    provider.close()


@pytest.mark.parametrize("client", ["team-RS256", "team-ES256", "team-EdDSA"])
def test_a_token_may_do_what_its_scopes_say(gate: Gate, client: str) -> None:
    token = gate.token(client)
    assert gate.send("POST", PUBLISH, token, MESSAGES).is_success
    assert gate.send("POST", POP, token, {"wait_seconds": 0}).is_success
    assert gate.send("GET", "/v1/topics/orders/groups/billing", token).is_success
    for method, path, action in (
        ("POST", "/v1/topics/other/messages", "publish"),
        ("POST", "/v1/topics/other/groups/billing/pop", "consume"),
        ("DELETE", "/v1/admin/topics/orders", "admin"),
        ("GET", "/metrics", "metrics"),
    ):
        document = problem(gate.send(method, path, token, {}), 403, "forbidden")
        assert document["action"] == action
        assert f"oidc:{client}" in document["detail"]


def test_a_token_has_only_the_scopes_that_the_provider_gave_it(gate: Gate) -> None:
    reader = gate.token("team-ES256", scopes=["read:orders/*"])
    assert gate.send("POST", POP, reader, {}).is_success
    problem(gate.send("POST", PUBLISH, reader, MESSAGES), 403, "forbidden")
    nothing = gate.token("team-ES256", scopes=[])
    assert "scope" not in claims_of(nothing)
    assert gate.status(nothing) == 200
    problem(gate.send("POST", POP, nothing, {}), 403, "forbidden")


def test_tags_are_roles(gate: Gate) -> None:
    monitor, admin = gate.token("monitor"), gate.token("admin")
    assert gate.send("GET", "/metrics", monitor).is_success
    assert gate.send("GET", "/v1/admin/topics", monitor).is_success
    problem(gate.send("PUT", "/v1/admin/topics/new", monitor, {"queues": 1}), 403, "forbidden")
    assert gate.send("PUT", "/v1/admin/topics/new", admin, {"queues": 1}).is_success


def test_a_token_for_another_service_is_refused(gate: Gate) -> None:
    assert "audience" in gate.refuses(gate.token("team-RS256", audience="https://other.example.org"))


def test_a_token_of_another_provider_is_refused(gate: Gate, own_provider: OpenIdProvider) -> None:
    with own_provider:
        assert gate.refuses(own_provider.token("team-RS256", AUDIENCE)) == "the token is not valid"


def test_a_token_without_a_usable_name_is_refused(gate: Gate) -> None:
    assert "'sub'" in gate.refuses(gate.token("named team"))


def test_an_altered_token_is_refused(gate: Gate) -> None:
    header, payload, signature = gate.token("team-RS256").split(".")
    more = {**claims_of(f"{header}.{payload}"), "scope": "tag:administrator"}
    payload = base64.urlsafe_b64encode(json.dumps(more).encode()).decode().rstrip("=")
    assert gate.refuses(f"{header}.{payload}.{signature}") == "the token is not valid"
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').decode().rstrip("=")
    for other in (f"{none}.{payload}.", f"{none}.{payload}.{signature}", payload):
        assert gate.refuses(other) == "the token is not valid"


def test_an_expired_token_is_refused_and_ends_waiting_pops(gate: Gate) -> None:
    token = gate.token("short")
    assert gate.send("POST", POP, token, {}).is_success
    waiting = Parked(gate, token)
    problem(waiting.ended(SHORT_SECONDS + 2), 401, "unauthenticated")
    assert time.time() >= claims_of(token)["exp"]
    assert "expired" in gate.refuses(token)


def test_many_tokens_with_unknown_keys_cause_few_requests_to_the_provider(gate: Gate) -> None:
    token = gate.token("team-ES256")
    assert gate.status(token) == 200
    before, began = gate.provider.key_fetches, time.monotonic()
    for _ in range(200):
        assert gate.status(with_unknown_key(token)) == 401
    assert gate.status(token) == 200
    fetches, seconds = gate.provider.key_fetches - before, time.monotonic() - began
    assert fetches <= 1 + seconds / UNKNOWN_KEY_SECONDS


def test_the_audit_log_names_tokens_and_nothing_contains_them(gate: Gate) -> None:
    token = gate.token("admin")
    topic = f"audited-{secrets.token_hex(4)}"
    assert gate.send("PUT", f"/v1/admin/topics/{topic}", token, {"queues": 1}).is_success
    reader = gate.token("team-RS256", scopes=["read:orders/*"])
    problem(gate.send("DELETE", f"/v1/admin/topics/{topic}", reader), 403, "forbidden")

    def records() -> list[dict[str, Any]]:
        lines = gate.audit_log.read_text().splitlines()
        return [one for one in map(json.loads, lines) if topic in str(one.get("resource"))]

    wait_until(lambda: len(records()) == 2, timeout_seconds=5, what="both records")
    made, refused = records()
    assert (made["principal"], refused["principal"]) == ("oidc:admin", "oidc:team-RS256")
    assert made["key"].startswith("token:")
    assert made["key"].endswith(claims_of(token)["jti"])
    for text in (gate.audit_log.read_text(), gate.process.output):
        assert not any(part in text for one in (token, reader) for part in one.split("."))


def test_keys_can_be_rotated(own_provider: OpenIdProvider, tmp_path: Path) -> None:
    old_keys = own_provider.keys
    with own_provider, Gate(tmp_path / "gate", own_provider) as gate:
        assert gate.send("PUT", "/v1/admin/topics/orders", gate.token("admin"), {"queues": 1}).is_success
        old = gate.token("team-RS256")
        assert gate.send("POST", POP, old, {}).is_success

        own_provider.stop()
        own_provider.keys = [*new_keys("2"), *old_keys]
        own_provider.start()
        new = gate.token("team-RS256")
        assert gate.status(new) == 200, "an unknown key is fetched at once"
        assert gate.status(old) == 200

        own_provider.stop()
        own_provider.keys = own_provider.keys[: len(old_keys)]
        own_provider.start()
        waiting = Parked(gate, old)
        gate.wait_for(401, old)
        problem(waiting.ended(2), 401, "unauthenticated")
        assert gate.status(new) == 200
        assert gate.status(gate.token("team-EdDSA")) == 200


def test_the_proxy_works_while_the_provider_is_down(own_provider: OpenIdProvider, tmp_path: Path) -> None:
    own_provider.start()
    early = own_provider.token("team-RS256", AUDIENCE)
    own_provider.stop()
    with Gate(tmp_path / "gate", own_provider) as gate:
        answered = gate.send("POST", POP, early, {})
        problem(answered, 503, "unavailable")
        assert early not in answered.text
        assert gate.refuses("no token") == "the token is not valid"
        assert "can't be fetched" in gate.process.output

        own_provider.start()
        gate.wait_for(200, early)
        unused = gate.token("team-ES256")
        own_provider.kill()
        assert gate.status(early) == 200
        assert gate.status(unused) == 200
        own_provider.start()
        assert gate.status(gate.token("team-EdDSA")) == 200


def test_a_provider_with_a_certificate_of_an_unknown_authority_is_not_trusted(
    provider: OpenIdProvider, tmp_path: Path
) -> None:
    with Gate(tmp_path, provider, trusts=False) as untrusting:
        problem(untrusting.send("GET", "/v1", untrusting.token("admin")), 503, "unavailable")
        assert "CERTIFICATE_VERIFY_FAILED" in untrusting.process.output
