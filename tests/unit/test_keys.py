"""API keys: their form, and the callers that keys, certificates and tokens prove."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from popgate.auth.credentials import Credentials
from popgate.auth.key_file_edits import KeyToAdd, NewPrincipal, with_key, without_key_ids
from popgate.auth.keys import NewKey, digest_of, key_id_in, new_key, without_credentials
from popgate.auth.watched_keys import WatchedKeys
from popgate.domain.errors import Unauthenticated
from popgate.domain.permissions import Action, Caller, Principal
from popgate.runtime.clocks import ManualClock

START = 1_700_000_000.0


class Tokens:
    """Accepts one token."""

    version = 0

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def caller(self, token: str) -> Caller:
        self.seen.append(token)
        if token != "good":
            raise Unauthenticated("no")
        return Caller(principal=Principal(name="alice"), credential="alice", expires_at=START + 60)

    def current(self, caller: Caller) -> Caller | None:
        return caller


class House:
    """A key file with the principal `app`, its key, and what is known of it."""

    def __init__(self, file: Path, *, expires: float | None = None) -> None:
        self.file = file
        self.key = new_key()
        self.clock = ManualClock(wall=START)
        app = NewPrincipal(roles=["consumer"], patterns={"topics": ["orders"]})
        self.content = with_key(b"", "app", app, KeyToAdd(self.key, START, expires))
        self.content = self.content.replace(b'topics = ["orders"]', b'topics = ["orders"]\ncertificates = ["App.Test"]')
        self.write(self.content)
        self.keys = WatchedKeys(file, clock=self.clock)
        self.keys.load()
        self.tokens = Tokens()
        self.credentials = Credentials(self.keys, self.tokens, clock=self.clock)

    def write(self, content: bytes) -> None:
        self.content = content
        self.file.write_bytes(content)
        self.file.chmod(0o600)

    def changed(self, content: bytes) -> None:
        self.write(content)
        for _ in range(2):
            asyncio.run(self.keys.look())

    def caller(self, token: str) -> Caller:
        return asyncio.run(self.credentials.caller(token))

    def refuses(self, token: str) -> str:
        with pytest.raises(Unauthenticated) as raised:
            self.caller(token)
        assert token not in raised.value.detail or not token
        return raised.value.detail

    def by_certificate(self, *names: str, expires_at: float = START + 60) -> Caller:
        return self.credentials.caller_by_certificate(names, expires_at)


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path / "keys.toml")


# ---------------------------------------------------------------- the form


def test_new_keys_differ_and_have_256_random_bits() -> None:
    keys = [new_key() for _ in range(200)]
    assert len({key.text for key in keys}) == len({key.id for key in keys}) == 200
    for key in keys:
        prefix, id, secret = key.text.split("_", 2)
        assert (prefix, id, len(secret)) == ("pg", key.id, 43)
        assert key_id_in(key.text) == key.id
        assert key.digest == digest_of(key.text)
        assert key.text not in repr(key)


def test_a_secret_may_contain_underscores_and_dashes() -> None:
    assert key_id_in("pg_abcdefgh23_" + "_-" * 21 + "_") == "abcdefgh23"


@pytest.mark.parametrize(
    "text", ["", "pg_", "pg__", "pg_abcdefgh23", "pg_abcdefgh23_short", "pg_ABCDEFGH23_" + "a" * 43, "pg_a_" + "a" * 43]
)
def test_a_text_of_another_form_is_no_key(text: str) -> None:
    assert key_id_in(text) is None


def test_keys_are_removed_from_a_text() -> None:
    key = new_key().text
    assert without_credentials(f"topic {key} of pg_orders") == "topic pg_... of pg_orders"


# ---------------------------------------------------------------- callers


def test_a_key_proves_its_principal(house: House) -> None:
    caller = house.caller(house.key.text)
    assert (caller.principal.name, caller.credential, caller.expires_at) == ("app", house.key.id, None)
    assert house.credentials.current(caller) == caller
    assert house.tokens.seen == []


@pytest.mark.parametrize("place", range(-43, 0, 7))
def test_a_key_with_another_secret_is_refused(house: House, place: int) -> None:
    letter = "a" if house.key.text[place] != "a" else "b"
    wrong = house.key.text[:place] + letter + (house.key.text[place + 1 :] if place != -1 else "")
    assert house.refuses(wrong) == house.refuses(new_key().text) == house.refuses("pg_garbage")


@pytest.mark.parametrize("token", ["", "pg_", "pg_é", "pg_a_b_c", " " * 100_000, "pg_" + "a" * 100_000, "\x00"])
def test_garbage_is_refused(house: House, token: str) -> None:
    with pytest.raises(Unauthenticated):
        house.caller(token)


def test_a_key_is_never_given_to_the_verifier_of_tokens(house: House) -> None:
    house.refuses(new_key().text)
    assert house.tokens.seen == []
    house.caller("good")
    assert house.tokens.seen == ["good"]


def test_a_token_is_refused_if_no_provider_is_configured(house: House) -> None:
    only_keys = Credentials(house.keys, None)
    with pytest.raises(Unauthenticated):
        asyncio.run(only_keys.caller("good"))


def test_a_key_is_refused_if_there_is_no_key_file(house: House) -> None:
    only_tokens = Credentials(None, house.tokens, clock=house.clock)
    with pytest.raises(Unauthenticated):
        asyncio.run(only_tokens.caller(house.key.text))
    with pytest.raises(Unauthenticated):
        only_tokens.caller_by_certificate(["app.test"], START + 60)
    assert only_tokens.current(house.caller(house.key.text)) is None


def test_a_key_is_refused_from_the_moment_of_its_expiry(tmp_path: Path) -> None:
    house = House(tmp_path / "keys.toml", expires=START + 60)
    caller = house.caller(house.key.text)
    assert caller.expires_at == START + 60
    house.clock.advance(59.9)
    assert house.credentials.current(caller) == caller
    house.clock.advance(0.1)
    house.refuses(house.key.text)
    assert house.credentials.current(caller) is None


def test_the_wall_clock_decides_about_expiry(tmp_path: Path) -> None:
    house = House(tmp_path / "keys.toml", expires=START + 60)
    house.clock.jump_wall(61)
    house.refuses(house.key.text)
    house.clock.jump_wall(-61)
    assert house.caller(house.key.text).credential == house.key.id


def test_a_revoked_key_has_no_current_caller(house: House) -> None:
    caller, version = house.caller(house.key.text), house.credentials.version
    house.changed(without_key_ids(house.content, {house.key.id: "app"}))
    assert house.credentials.current(caller) is None
    assert house.credentials.version > version
    house.refuses(house.key.text)


def test_a_caller_of_a_removed_principal_is_not_current(house: House) -> None:
    by_key, by_certificate = house.caller(house.key.text), house.by_certificate("app.test")
    house.changed(b'[principals.other]\nrole = "consumer"\n')
    assert house.credentials.current(by_key) is None
    assert house.credentials.current(by_certificate) is None


def test_a_key_that_moved_to_another_principal_proves_nothing_about_the_former_one(house: House) -> None:
    caller = house.caller(house.key.text)
    house.changed(house.content.replace(b"principals.app", b"principals.other"))
    assert house.credentials.current(caller) is None
    assert house.caller(house.key.text).principal.name == "other"


def test_changed_permissions_are_those_of_the_current_caller(house: House) -> None:
    by_key, by_certificate = house.caller(house.key.text), house.by_certificate("app.test")
    house.changed(house.content.replace(b'"consumer"', b'"publisher"'))
    for caller in (by_key, by_certificate):
        current = house.credentials.current(caller)
        assert current is not None
        assert current.principal.grants[0].actions == {Action.PUBLISH}
        assert (current.credential, current.expires_at) == (caller.credential, caller.expires_at)


# ---------------------------------------------------------------- certificates and tokens


@pytest.mark.parametrize("names", [["app.test"], ["APP.test", "other.test"], ["x", "App.Test"]])
def test_a_certificate_proves_the_principal_that_one_of_its_names_belongs_to(
    house: House, names: Sequence[str]
) -> None:
    caller = house.by_certificate(*names)
    assert caller.principal.name == "app"
    assert caller.credential.lower() == "certificate:app.test"
    assert caller.expires_at == START + 60
    assert house.credentials.current(caller) == caller
    house.clock.advance(60)
    assert house.credentials.current(caller) is None


@pytest.mark.parametrize("names", [[], ["other"], ["*.test"], ["app.test.evil"]])
def test_a_certificate_with_other_names_is_refused(house: House, names: Sequence[str]) -> None:
    with pytest.raises(Unauthenticated):
        house.by_certificate(*names)


def test_an_expired_certificate_is_refused(house: House) -> None:
    with pytest.raises(Unauthenticated):
        house.by_certificate("app.test", expires_at=START)


def test_a_certificate_is_valid_as_long_as_the_principal_has_one_of_its_names(house: House) -> None:
    content = house.content

    def names(text: bytes) -> None:
        house.changed(content.replace(b'["App.Test"]', text))

    names(b'["app.test", "new.test"]')
    caller = house.by_certificate("APP.test", "app.test", "other.test", "new.test")
    assert caller.credential == "certificate:app.test new.test"
    names(b'["new.test"]')
    assert house.credentials.current(caller) is not None
    names(b'["new.test"]\n[principals.b]\nrole = "consumer"\ncertificates = ["app.test"]')
    assert house.credentials.current(caller) is None, "its names belong to two principals"
    names(b'["another.test"]')
    assert house.credentials.current(caller) is None


def test_a_certificate_with_the_names_of_two_principals_is_refused(house: House) -> None:
    house.changed(house.content + b'[principals.b]\nrole = "consumer"\ncertificates = ["b.test"]\n')
    assert house.by_certificate("b.test").principal.name == "b"
    with pytest.raises(Unauthenticated):
        house.by_certificate("app.test", "b.test")


def test_the_caller_of_a_token_is_current_until_the_token_expires(house: House) -> None:
    caller = house.caller("good")
    assert caller.credential == "token:alice"
    assert house.credentials.current(caller) == caller
    house.clock.advance(60)
    assert house.credentials.current(caller) is None


def test_a_token_can_not_name_a_key_or_a_certificate(house: House) -> None:
    forged: list[NewKey | str] = [house.key, "certificate:app.test"]
    for one in forged:
        credential = one if isinstance(one, str) else one.id
        caller = Caller(principal=Principal(name="x"), credential=credential)
        assert house.credentials.current(caller) is None

    class Forging(Tokens):
        async def caller(self, token: str) -> Caller:
            return replace(await super().caller(token), credential=house.key.id)

    credentials = Credentials(house.keys, Forging(), clock=house.clock)
    assert asyncio.run(credentials.caller("good")).credential == f"token:{house.key.id}"


def test_a_key_with_more_characters_is_removed_completely() -> None:
    key = new_key().text
    assert without_credentials(f"{key}x, {key}.{key}/") == "pg_..., pg_....pg_.../"


@pytest.mark.parametrize("lost", [1, 2, 11])
def test_a_key_that_has_lost_its_last_characters_is_removed(lost: int) -> None:
    key = new_key().text[:-lost]
    assert without_credentials(f"app {key} of pg_orders_{'x' * 31}") == f"app pg_... of pg_orders_{'x' * 31}"


def test_a_token_is_removed_from_a_text() -> None:
    token = f"eyJ{'h' * 40}.eyJ{'p' * 200}.{'-_s' * 28}"
    assert without_credentials(f"topic {token} of a/{token}, eyJ.x.eyJ") == "topic eyJ... of a/eyJ..., eyJ.x.eyJ"


@pytest.mark.parametrize("part", ["eyJ", "eyJ.", "-eyJ", "eyJa.b", "pg_", "pg_abcdef_", "pg_abcdef_eyJ."])
def test_the_search_for_credentials_takes_linear_time(part: str) -> None:
    began = time.process_time()
    without_credentials(part * (1_000_000 // len(part)))
    assert time.process_time() - began < 5
