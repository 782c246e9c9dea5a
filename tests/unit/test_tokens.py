"""Tokens of an OpenID provider: which are accepted, and what they prove. joserfc, another library, makes the tokens."""

import asyncio
import base64
import hmac
import json
import logging
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import assume, given
from hypothesis import strategies as st
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey

from popgate.auth.key_set import ALGORITHMS, KEYS_MAX, KeySetError, parse_key_set
from popgate.auth.provider_keys import UNKNOWN_KEY_SECONDS, ProviderKeys
from popgate.auth.scopes import ScopeRules
from popgate.auth.tokens import KNOWN_MAX, SKEW_SECONDS, TOKEN_BYTES_MAX, TokenRules, TokenVerifier
from popgate.bootstrap.openid import token_verifier
from popgate.config import serve_options
from popgate.domain.errors import StartupError, Unauthenticated
from popgate.domain.permissions import GRANTS_MAX, Action, Caller, Resource
from popgate.runtime.background import Background
from popgate.runtime.clocks import ManualClock

START = 1_700_000_000
ISSUER, AUDIENCE = "https://login.example.org/realms/main", "https://popgate.example.org"
GENERIC = "the token is not valid"
BASE64URL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
Key = RSAKey | ECKey | OKPKey


class Signer:
    """A key of a provider, and what it signs."""

    def __init__(self, algorithm: str, key: Key, *, id: str) -> None:
        self.algorithm, self.key, self.id = algorithm, key, id

    @classmethod
    def new(cls, algorithm: str, *, id: str = "") -> "Signer":
        key: Key
        if algorithm.startswith("RS"):
            key = RSAKey.generate_key(2048)
        elif algorithm.startswith("ES"):
            key = ECKey.generate_key({"ES256": "P-256", "ES384": "P-384"}[algorithm])
        else:
            key = OKPKey.generate_key("Ed25519")
        return cls(algorithm, key, id=id or f"key-{algorithm}")

    @property
    def jwk(self) -> dict[str, Any]:
        return {**self.key.as_dict(private=False), "kid": self.id, "use": "sig", "alg": self.algorithm}

    def sign(self, claims: Mapping[str, object] | bytes, **header: object) -> str:
        content = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
        written = {"alg": self.algorithm, "kid": self.id, "typ": "at+jwt", **header}
        written = {name: value for name, value in written.items() if value is not None}
        with warnings.catch_warnings():  # joserfc prefers the new name of EdDSA
            warnings.simplefilter("ignore")
            registry = jws.JWSRegistry(algorithms=[self.algorithm], strict_check_header=False)
            return jws.serialize_compact(written, content, self.key, registry=registry)


def claims(**changes: object) -> dict[str, object]:
    """Return the claims of a valid token with these changes. None removes a claim."""
    whole = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "orders-app",
        "exp": START + 600,
        "iat": START,
        "jti": "token-1",
        "scope": "openid read:orders/billing",
        **changes,
    }
    return {name: value for name, value in whole.items() if value is not None}


def encoded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def with_header(token: str, **changes: object) -> str:
    """Return the token with another header and the same signature."""
    header, payload, signature = token.split(".")
    changed = json.loads(base64.urlsafe_b64decode(header + "==")) | changes
    return f"{encoded(json.dumps(changed).encode())}.{payload}.{signature}"


class House:
    """A provider with one key of each algorithm, and a verifier of its tokens."""

    def __init__(self) -> None:
        self.signers = {algorithm: Signer.new(algorithm) for algorithm in sorted(ALGORITHMS)}
        self.published: list[dict[str, Any]] = [signer.jwk for signer in self.signers.values()]
        self.fetches = 0
        self.clock = ManualClock(wall=START)
        self.keys = ProviderKeys(self._fetch, clock=self.clock, chance=random.Random(1))
        self.rules = TokenRules(issuer=ISSUER, audience=AUDIENCE)
        self.verifier = TokenVerifier(self.keys, self.rules, clock=self.clock)
        self._runner = asyncio.Runner()
        self._task = self._runner.get_loop().create_task(self.keys.run(), name="keys")

    async def _fetch(self) -> bytes:
        self.fetches += 1
        return json.dumps({"keys": self.published}).encode()

    def close(self) -> None:
        self._task.cancel()
        self._runner.close()

    def following(self, **rules: Any) -> TokenVerifier:
        """Return a verifier with other rules and the same keys."""
        return TokenVerifier(self.keys, replace(self.rules, **rules), clock=self.clock)

    def publish(self, *signers: Signer) -> None:
        """Let the provider publish these keys only, and the proxy fetch them."""
        self.published = [signer.jwk for signer in signers]
        self.clock.advance(UNKNOWN_KEY_SECONDS)
        assert self._runner.run(self.keys.key("unknown", "RS256")) is None

    def caller(self, token: str, verifier: TokenVerifier | None = None) -> Caller:
        return self._runner.run((verifier or self.verifier).caller(token))

    def refuses(self, token: str, verifier: TokenVerifier | None = None) -> str:
        with pytest.raises(Unauthenticated) as raised:
            self.caller(token, verifier)
        assert token not in raised.value.detail or not token
        return raised.value.detail


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    """A house that no test changes."""
    house = House()
    yield house
    house.close()


ANY_ALGORITHM = pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))


# ---------------------------------------------------------------- what a token proves


@ANY_ALGORITHM
def test_a_valid_token_proves_its_caller(shared: House, algorithm: str) -> None:
    signer = shared.signers[algorithm]
    caller = shared.caller(signer.sign(claims()))
    assert caller.principal.name == "oidc:orders-app"
    assert caller.credential.startswith("token:")
    assert caller.credential.endswith("/token-1")
    assert caller.expires_at == START + 600
    may = {action for action in Action if caller.principal.may(action, Resource("orders", "billing"))}
    assert may == {Action.CONSUME, Action.INSPECT}


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": [AUDIENCE, "other"]},
        {"aud": ["other", AUDIENCE]},
        {"nbf": START + SKEW_SECONDS},
        {"iat": START + SKEW_SECONDS},
        {"iat": None},
        {"scope": None},
        {"exp": START + 0.5},
        {"sub": "system:serviceaccount:payments:orders"},
        {"sub": "auth0|5f7c8ec7c33c6c004bbafe82"},
        {"sub": "x" * 128},
    ],
    ids=str,
)
def test_what_a_token_may_vary_in(shared: House, changes: dict[str, object]) -> None:
    caller = shared.caller(shared.signers["ES256"].sign(claims(**changes)))
    assert caller.principal.name == f"oidc:{changes.get('sub', 'orders-app')}"


@pytest.mark.parametrize("kind", ["JWT", "jwt", "at+jwt", "AT+JWT", "application/at+jwt", None])
def test_the_types_of_access_tokens_are_accepted(shared: House, kind: str | None) -> None:
    shared.caller(shared.signers["ES256"].sign(claims(), typ=kind))


def test_a_token_without_an_id_is_named_by_its_hash(shared: House) -> None:
    for id in (None, "", "a b", "x" * 65, 7, "ä"):
        token = shared.signers["EdDSA"].sign(claims(jti=id))
        name = shared.caller(token).credential.partition("/")[2]
        assert len(name) == 16
        assert name not in token


def test_the_claims_are_those_of_the_rules(shared: House) -> None:
    rules = ScopeRules(prefix="popgate.", aliases=[("team", ("popgate.write:orders",))])
    verifier = shared.following(name_claim="client.id", scopes_claim="realm_access.roles", scopes=rules)
    given: dict[str, object] = {"client": {"id": "app"}, "realm_access": {"roles": ["team", "read:*/*"]}}
    caller = shared.caller(shared.signers["ES256"].sign(claims(**given)), verifier)
    assert caller.principal.name == "oidc:app"
    assert {action for action in Action if caller.principal.may(action, Resource("orders"))} == {Action.PUBLISH}
    whole = shared.caller(shared.signers["ES256"].sign(claims(**given, **{"client.id": "whole"})), verifier)
    assert whole.principal.name == "oidc:whole"
    for other in ("app", ["id"], {"id": {"id": "x"}}, {}):
        assert "client.id" in shared.refuses(shared.signers["ES256"].sign(claims(client=other)), verifier)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exp": START}, "expired"),
        ({"exp": START - 1}, "expired"),
        ({"exp": START - SKEW_SECONDS}, "expired"),
        ({"exp": -1}, "expired"),
        ({"exp": None}, "'exp'"),
        ({"exp": "2100-01-01"}, "'exp'"),
        ({"exp": str(START + 600)}, "'exp'"),
        ({"exp": True}, "'exp'"),
        ({"exp": [START + 600]}, "'exp'"),
        ({"exp": float("nan")}, "'exp'"),
        ({"exp": float("inf")}, "'exp'"),
        ({"exp": 10**400}, "'exp'"),
        ({"nbf": START + SKEW_SECONDS + 1}, "not valid yet"),
        ({"nbf": "later"}, "'nbf'"),
        ({"iat": START + SKEW_SECONDS + 1}, "not valid yet"),
        ({"iat": "later"}, "'iat'"),
        ({"iss": None}, "'iss'"),
        ({"iss": ISSUER + "/"}, "issuer"),
        ({"iss": ISSUER[:-1]}, "issuer"),
        ({"iss": [ISSUER]}, "issuer"),
        ({"iss": "https://other.example.org"}, "issuer"),
        ({"aud": None}, "'aud'"),
        ({"aud": ""}, "'aud'"),
        ({"aud": []}, "'aud'"),
        ({"aud": "other"}, "audience"),
        ({"aud": AUDIENCE + "/"}, "audience"),
        ({"aud": [AUDIENCE, 7]}, "audience"),
        ({"aud": {AUDIENCE: 1}}, "audience"),
        ({"sub": None}, "'sub'"),
        ({"sub": ""}, "'sub'"),
        ({"sub": 7}, "'sub'"),
        ({"sub": "x" * 129}, "'sub'"),
        ({"sub": "a b"}, "'sub'"),
        ({"sub": "app\n"}, "'sub'"),
        ({"sub": "äpp"}, "'sub'"),
        ({"cnf": {"jkt": "x"}}, "bound"),
        ({"scope": " ".join(f"read:t{n}/g{n}" for n in range(GRANTS_MAX + 1))}, "scopes"),
    ],
    ids=str,
)
def test_a_token_that_does_not_fit_is_refused_with_the_reason(
    shared: House, changes: dict[str, object], told: str
) -> None:
    assert told in shared.refuses(shared.signers["ES256"].sign(claims(**changes)))


@pytest.mark.parametrize(
    "header",
    [
        {"typ": "logout+jwt"},
        {"typ": "dpop+jwt"},
        {"typ": 7},
        {"kid": None},
        {"kid": ""},
        {"kid": 7},
        {"kid": "unknown"},
        {"kid": "x" * 256},
        {"crit": ["exp"], "exp": 1},
        {"crit": []},
        {"crit": ["b64"], "b64": True},
    ],
    ids=str,
)
def test_a_header_that_does_not_fit_is_refused_without_the_reason(shared: House, header: dict[str, object]) -> None:
    signer = shared.signers["ES256"]
    try:
        token = signer.sign(claims(), **header)
    except Exception:  # joserfc refuses to write some of these
        token = with_header(signer.sign(claims()), **header)
    assert shared.refuses(token) == GENERIC


def test_keys_and_addresses_in_the_header_are_ignored(shared: House) -> None:
    own = Signer.new("ES256", id="key-ES256")
    given = {"jku": "https://attacker.example.org/jwks", "x5u": "https://attacker.example.org/chain", "jwk": own.jwk}
    assert shared.refuses(own.sign(claims(), **given)) == GENERIC
    assert shared.caller(shared.signers["ES256"].sign(claims(), **given)).principal.name == "oidc:orders-app"
    fetches = shared.fetches
    assert shared.refuses(own.sign(claims(), **given)) == GENERIC
    assert shared.fetches == fetches


@pytest.mark.parametrize(
    "algorithm", ["none", "None", "NONE", "", None, "HS256", "PS256", "RS512", "ES384", "Ed25519", 7]
)
def test_an_algorithm_that_is_not_accepted_is_refused(shared: House, algorithm: object) -> None:
    for signer in shared.signers.values():
        token = with_header(signer.sign(claims()), alg=algorithm)
        assert shared.refuses(token) == GENERIC
        assert shared.refuses(token.rpartition(".")[0] + ".") == GENERIC


def test_a_public_key_is_no_secret_for_hmac(shared: House) -> None:
    for signer in shared.signers.values():
        public = signer.key.public_key
        secrets = [json.dumps(signer.jwk).encode(), str(signer.jwk.get("n", signer.jwk.get("x"))).encode()]
        secrets.append(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
        for secret in secrets:
            for algorithm in ("HS256", signer.algorithm):
                header = encoded(json.dumps({"alg": algorithm, "kid": signer.id}).encode())
                signed = f"{header}.{encoded(json.dumps(claims()).encode())}"
                signature = hmac.digest(secret, signed.encode(), "sha256")
                assert shared.refuses(f"{signed}.{encoded(signature)}") == GENERIC


def test_a_token_can_not_choose_another_algorithm_for_a_key(shared: House) -> None:
    for signer in shared.signers.values():
        for other in shared.signers.values():
            if other is not signer:
                assert shared.refuses(signer.sign(claims(), kid=other.id)) == GENERIC
                token = with_header(signer.sign(claims()), alg=other.algorithm)
                assert shared.refuses(token) == GENERIC
                assert shared.refuses(with_header(token, kid=other.id)) == GENERIC


@pytest.mark.parametrize(
    "token",
    [
        "",
        ".",
        "..",
        "...",
        "a.b",
        "a.b.c.d",
        "a.b.c.d.e",
        "not a token",
        "\ud800.b.c",
        "ä.b.c",
        "A" * TOKEN_BYTES_MAX,
        "A" * (64 << 10),
        f"{encoded(b'[' * 5000)}.AA.AA",
        f"{encoded(b'9' * 5000)}.AA.AA",
        f"{encoded(b'[]')}.AA.AA",
        f"{encoded(b'null')}.AA.AA",
        f"{encoded(bytes([255]))}.AA.AA",
        "A.A.A",
    ],
    ids=lambda token: token.encode("ascii", "replace").decode()[:20],
)
def test_what_is_no_token_is_refused(shared: House, token: str) -> None:
    fetches = shared.fetches
    assert shared.refuses(token) == GENERIC
    assert shared.fetches == max(fetches, 1), "nothing is fetched for it"


@ANY_ALGORITHM
def test_claims_that_are_no_object_are_refused(shared: House, algorithm: str) -> None:
    for content in (b"[]", b"7", b"null", b"", b"\xff", b"[" * 4000, b'{"exp":' + b"9" * 5000 + b"}"):
        assert shared.refuses(shared.signers[algorithm].sign(content)) == GENERIC


def test_a_token_beyond_the_maximum_size_is_refused(shared: House) -> None:
    signer = shared.signers["ES256"]
    short = signer.sign(claims(filler=""))
    fits = signer.sign(claims(filler="x" * ((TOKEN_BYTES_MAX - len(short)) * 3 // 4 - 3)))
    assert TOKEN_BYTES_MAX - 8 < len(fits) <= TOKEN_BYTES_MAX
    shared.caller(fits)
    assert shared.refuses(signer.sign(claims(filler="x" * TOKEN_BYTES_MAX))) == GENERIC


@ANY_ALGORITHM
@given(data=st.data())
def test_every_alteration_of_a_valid_token_is_refused(shared: House, algorithm: str, data: st.DataObject) -> None:
    token = shared.signers[algorithm].sign(claims())
    place = data.draw(st.integers(0, len(token) - 1))
    length = data.draw(st.integers(0, 3))
    characters = st.sampled_from([*BASE64URL, ".", "=", " ", "\n", "+", "/", "~"])
    altered = token[:place] + data.draw(st.text(characters, max_size=3)) + token[place + length :]
    assume(altered != token)
    assert shared.refuses(altered) == GENERIC
    shared.caller(token)


@ANY_ALGORITHM
def test_no_other_spelling_of_the_signature_is_accepted(shared: House, algorithm: str) -> None:
    token = shared.signers[algorithm].sign(claims())
    others = [token[:-1] + last for last in BASE64URL if last != token[-1]]
    for other in [*others, token + "=", token + "==", token + "A", token + "\n", " " + token, token + "."]:
        assert shared.refuses(other) == GENERIC


@given(
    header=st.dictionaries(
        st.sampled_from(["alg", "kid", "typ", "crit", "b64", "zip", "x"]),
        st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["RS256", "key-RS256", "JWT"]),
    ),
    payload=st.binary(max_size=40),
    signature=st.binary(max_size=300),
)
def test_garbage_is_refused(shared: House, header: dict[str, object], payload: bytes, signature: bytes) -> None:
    token = f"{encoded(json.dumps(header).encode())}.{encoded(payload)}.{encoded(signature)}"
    assert shared.refuses(token) == GENERIC


def test_the_reason_is_logged_but_never_the_token(house: House, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = house.signers["ES256"].sign(claims())
    house.refuses(token[:-8] + "AAAAAAAA")
    house.refuses(house.signers["ES256"].sign(claims(aud="elsewhere")))
    house.caller(token)
    refusals = [str(vars(record)) for record in caplog.records if record.name == "popgate.auth.tokens"]
    assert ["signature" in refusals[0], "audience" in refusals[1]] == [True, True]
    parts = [part for part in token.split(".") if len(part) > 20]
    assert not any(part in text for text in map(str, map(vars, caplog.records)) for part in parts)


# ---------------------------------------------------------------- time, and keys that change


def test_access_ends_when_the_token_expires(house: House) -> None:
    token = house.signers["ES256"].sign(claims())
    caller = house.caller(token)
    house.clock.advance(599.9)
    assert house.caller(token) is caller
    assert house.verifier.current(caller) is caller
    house.clock.advance(0.1)
    assert "expired" in house.refuses(token)
    assert house.verifier.current(caller) is None


def test_a_verified_token_is_remembered(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    token = house.signers["RS256"].sign(claims())
    caller = house.caller(token)
    monkeypatch.setattr("popgate.auth.tokens.jwt.decode", None)
    assert house.caller(token) is caller


def test_a_bounded_number_of_tokens_is_remembered(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KNOWN_MAX >= 1_000
    monkeypatch.setattr("popgate.auth.tokens.KNOWN_MAX", 3)
    tokens = [house.signers["EdDSA"].sign(claims(jti=f"t{number}")) for number in range(5)]
    callers = [house.caller(token) for token in tokens]
    assert [house.caller(token) is caller for token, caller in zip(tokens[2:], callers[2:], strict=True)] == [True] * 3
    assert house.caller(tokens[0]) is not callers[0]


def test_a_bounded_size_of_tokens_is_remembered(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [house.signers["EdDSA"].sign(claims(jti=f"t{number}")) for number in range(5)]
    monkeypatch.setattr("popgate.auth.tokens.KNOWN_BYTES_MAX", 3 * len(tokens[0]))
    house.caller(house.signers["EdDSA"].sign(claims(jti="t5", nonce="x" * len(tokens[0]))))  # leaves room for one
    callers = [house.caller(token) for token in tokens]
    assert [house.caller(token) is caller for token, caller in zip(tokens[2:], callers[2:], strict=True)] == [True] * 3
    assert house.caller(tokens[0]) is not callers[0]


def test_a_withdrawn_key_ends_access(house: House) -> None:
    old, new = house.signers["RS256"], Signer.new("RS256", id="new")
    token = old.sign(claims())
    caller = house.caller(token)
    version = house.verifier.version
    house.publish(old, new)
    assert house.caller(token).principal == house.caller(new.sign(claims())).principal
    assert house.verifier.current(caller) is caller
    house.publish(new)
    assert house.verifier.version > version
    assert house.refuses(token) == GENERIC
    assert house.verifier.current(caller) is None
    house.publish(old, new)
    assert house.verifier.current(caller) is caller
    assert house.caller(token) == caller


def test_another_key_with_the_same_id_ends_access(house: House) -> None:
    old, new = house.signers["RS256"], Signer.new("RS256")
    token = old.sign(claims())
    caller = house.caller(token)
    house.publish(new)
    assert house.refuses(token) == GENERIC
    assert house.verifier.current(caller) is None
    house.caller(new.sign(claims()))


def test_a_caller_that_another_proxy_has_verified_remains_valid(house: House) -> None:
    """That proxy may know a newer key."""
    caller = house.caller(house.signers["RS256"].sign(claims()))
    assert house.verifier.current(replace(caller, credential="token:other-thumbprint/id"))


# ---------------------------------------------------------------- sets of keys


def test_a_key_set_contains_only_usable_keys() -> None:
    good = {algorithm: Signer.new(algorithm, id="same").jwk for algorithm in sorted(ALGORITHMS)}
    rsa = good["RS256"]
    with warnings.catch_warnings():  # joserfc warns of such a key
        warnings.simplefilter("ignore")
        small = RSAKey.generate_key(1024)
    bad: list[object] = [
        None,
        7,
        [],
        {},
        {"kty": "oct", "k": "c2VjcmV0", "kid": "x"},
        {"kty": ["RSA"], "kid": "x"},
        {**small.as_dict(private=False), "kid": "small"},
        {**rsa, "kid": None},
        {**rsa, "kid": ""},
        {**rsa, "kid": 7},
        {**rsa, "kid": "enc", "use": "enc"},
        {**rsa, "kid": "ops", "key_ops": ["encrypt"]},
        {**rsa, "kid": "ops", "key_ops": "verify"},
        {**rsa, "kid": "alg", "alg": "PS256"},
        {**rsa, "kid": "n", "n": 7},
        {**rsa, "kid": "n", "n": "!!"},
        {**rsa, "kid": "n", "n": ""},
        {**rsa, "kid": "e", "e": "AQ"},
        {**rsa, "kid": "private", "d": "AQAB"},
        {**good["ES256"], "kid": "curve", "crv": "P-384"},
        {**good["ES256"], "kid": "point", "y": good["ES256"]["x"]},
        {**Signer.new("ES384", id="p384").jwk, "alg": None},
        {**good["EdDSA"], "kid": "curve", "crv": "Ed448"},
        {**good["EdDSA"], "kid": "x", "x": "AAAA"},
    ]
    keys = parse_key_set(json.dumps({"keys": [*bad, *good.values(), *bad]}).encode())
    assert {*keys} == {("same", algorithm) for algorithm in ALGORITHMS}
    assert len({key.thumbprint for key in keys.values()}) == len(ALGORITHMS)


def test_a_key_is_known_without_its_algorithm_and_use() -> None:
    jwk = {name: value for name, value in Signer.new("ES256").jwk.items() if name not in ("alg", "use")}
    assert {*parse_key_set(json.dumps({"keys": [jwk]}).encode())} == {("key-ES256", "ES256")}


def test_the_first_key_with_an_id_counts_and_the_number_is_limited() -> None:
    first, second = Signer.new("ES256").jwk, Signer.new("ES256").jwk
    (key,) = parse_key_set(json.dumps({"keys": [first, second]}).encode()).values()
    assert [key] == [*parse_key_set(json.dumps({"keys": [first]}).encode()).values()]
    many = [{**first, "kid": f"k{number}"} for number in range(KEYS_MAX + 1)]
    assert len(parse_key_set(json.dumps({"keys": many}).encode())) == KEYS_MAX


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b'{"keys":{}}', b'{"keys":null}', b"\xff", b"[" * 100_000, b"<html>"]
)
def test_other_content_is_no_key_set(content: bytes) -> None:
    with pytest.raises(KeySetError):
        parse_key_set(content)


# ---------------------------------------------------------------- the start


def test_a_missing_extra_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jwt", None)
    monkeypatch.delitem(sys.modules, "popgate.auth.tokens")
    options = serve_options({"oidc_issuer": ISSUER, "oidc_audience": AUDIENCE}, {}, None)
    with pytest.raises(StartupError, match=re.escape("pip install 'popgate[server,oidc]'")):
        token_verifier(options, Background())
    assert token_verifier(serve_options({}, {}, None), Background()) is None
