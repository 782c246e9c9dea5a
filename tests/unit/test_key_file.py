"""The key file: what it may contain, what is refused and how, and how it is changed."""

import time
import tomllib
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from popgate.auth import key_file
from popgate.auth.key_file import KeyFileError, KnownPrincipal, StoredKey, parse_key_file
from popgate.auth.key_file_edits import KeyToAdd, NewPrincipal, with_key, with_rotated_key, without_key_ids
from popgate.auth.keys import new_key
from popgate.auth.roles import ROLES
from popgate.domain.permissions import GRANTS_MAX, NO_LIMITS, SERVER, Action, Grant, Limits, Principal, Resource

HASH = "ab" * 32
CREATED = "created = 2026-11-26T12:00:00Z"
KEY = f'sha256 = "{HASH}"\n{CREATED}'
START = 1_800_000_000.0


def parsed(text: str) -> tuple[KnownPrincipal, ...]:
    return parse_key_file(text.encode())


def one(fields: str) -> KnownPrincipal:
    (principal,) = parsed(f"[principals.app]\n{fields}")
    return principal


def may(fields: str, action: Action, **names: str) -> bool:
    return one(fields).principal.may(action, Resource(**names) if names else SERVER)


def problems(text: str) -> list[str]:
    with pytest.raises(KeyFileError) as raised:
        parsed(text)
    said = str(raised.value)
    assert HASH not in said
    return [*raised.value.problems]


def problem(fields: str) -> str:
    (said,) = problems(f"[principals.app]\n{fields}")
    return said


# ---------------------------------------------------------------- what it means


def test_the_whole_format_is_read() -> None:
    found = one(f"""\
roles = ["worker", "lock-user"]
topics = ["orders.*"]
groups = ["billing"]
locks = ["nightly"]
queues = ["legacy"]
grants = [{{ actions = ["create"], topics = ["orders.*"] }}]
limits = {{ requests_per_second = 0.5, parked_pops = 50, connections = 20, bytes_in_flight = "64MiB", topics = 10 }}
certificates = ["spiffe://Example.org/App", "App.Example.org"]
[principals.app.keys.k3v7mq2xaz]
sha256 = "{HASH.upper()}"
created = 2026-11-26T12:00:00+01:00
expires = 2027-11-26T12:00:00Z
note = "the shop in Frankfurt"
""")
    assert found == KnownPrincipal(
        principal=Principal(
            name="app",
            grants=(
                Grant(
                    actions=frozenset({Action.PUBLISH, Action.CONSUME, Action.INSPECT, Action.LOCK}),
                    topics=("orders.*",),
                    groups=("billing",),
                    locks=("nightly",),
                    queues=("legacy",),
                ),
                Grant(actions=frozenset({Action.CREATE}), topics=("orders.*",), locks=()),
            ),
            limits=Limits(requests_per_second=0.5, parked_pops=50, connections=20, bytes_in_flight=64 << 20, topics=10),
        ),
        roles=("worker", "lock-user"),
        certificates=("spiffe://Example.org/App", "app.example.org"),
        keys=(
            StoredKey(
                id="k3v7mq2xaz",
                digest=bytes.fromhex(HASH),
                created=datetime(2026, 11, 26, 11, tzinfo=UTC).timestamp(),
                expires=datetime(2027, 11, 26, 12, tzinfo=UTC).timestamp(),
                note="the shop in Frankfurt",
            ),
        ),
    )
    assert HASH not in repr(found)
    assert repr(bytes.fromhex(HASH)) not in repr(found)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_without_patterns_applies_to_everything_but_queues_of_the_broker(role: str) -> None:
    for action in Action:
        allowed = action in ROLES[role]
        assert may(f'role = "{role}"', action, topic="a", group="b") is allowed
        assert may(f'role = "{role}"', action, lock="a") is allowed
        assert may(f'role = "{role}"', action) is allowed
        assert may(f'role = "{role}"', action, topic="a", queue="q") is (allowed and role == "administrator")


def test_a_principal_without_roles_and_grants_may_do_nothing() -> None:
    found = one("")
    assert found.principal == Principal(name="app", grants=(), limits=NO_LIMITS)
    assert not any(found.principal.may(action, SERVER) for action in Action)


def test_a_restriction_to_topics_does_not_allow_all_locks() -> None:
    worker = 'role = "worker"\ntopics = ["a"]'
    assert may(worker, Action.INSPECT, topic="a", group="g")
    assert not may(worker, Action.INSPECT, lock="a")
    assert may(f'{worker}\nlocks = ["a*"]', Action.INSPECT, lock="ab")
    admin = 'grants = [{ actions = ["admin"], groups = ["g"] }]'
    assert may(admin, Action.ADMIN, topic="a", group="g")
    assert not may(admin, Action.ADMIN, lock="a")
    assert may('role = "lock-user"\nlocks = ["a"]', Action.LOCK, lock="a")


@pytest.mark.parametrize(
    ("size", "wanted"), [('"1KiB"', 1024), ('"2 MB"', 2_000_000), ("5000", 5000), ('"5000"', 5000), ('"1GiB"', 1 << 30)]
)
def test_a_size_has_a_unit_or_is_in_bytes(size: str, wanted: int) -> None:
    assert one(f"limits = {{ bytes_in_flight = {size} }}").principal.limits.bytes_in_flight == wanted


# ---------------------------------------------------------------- what is wrong


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ('rol = "worker"', "principal app: has no field 'rol'; did you mean 'role'?"),
        ('zzz = "worker"', "principal app: has no field 'zzz'; known are: role, roles"),
        ('role = "konsumer"', "principal app: role must be one of publisher"),
        ('role = "konsumer"', "not 'konsumer'; did you mean 'consumer'?"),
        ("role = 1", "principal app: role must be one of"),
        ('role = ["worker"]', "principal app: role must be one of"),
        ('roles = "worker"', "principal app: roles must be a list of one or more of"),
        ("roles = []", "principal app: roles must be a list"),
        ('roles = ["worker", "x"]', "principal app: roles must be one of"),
        ('role = "worker"\nroles = ["worker"]', "principal app: role and roles are both given"),
        ('role = "worker"\ntopics = "a"', "principal app: topics must be a list of patterns"),
        ('role = "worker"\ntopics = []', "principal app: topics must be a list of patterns"),
        ('role = "worker"\ngroups = [1]', "principal app: groups must be a list of patterns"),
        ('role = "worker"\nlocks = [""]', "principal app: locks must be a list of patterns"),
        ('role = "worker"\nqueues = ["\\u0007"]', "principal app: queues must be a list of patterns"),
        (f'role = "worker"\nqueues = ["{"a" * 256}"]', "principal app: queues must be a list of patterns"),
        (f"role = 'worker'\ntopics = {[str(n) for n in range(65)]}", "principal app: topics must be at most 64"),
        ('topics = ["a"]', "principal app: topics belongs to role or roles, which are missing"),
        ('role = "monitor"\ntopics = ["a"]', "principal app: topics can't restrict metrics"),
        ('role = "operator"\ngroups = ["a"]', "principal app: groups can't restrict metrics"),
        ('role = "lock-user"\ntopics = ["a"]', "principal app: locks must be given with topics"),
        ('grants = [{ actions = ["metrics"], topics = ["a"] }]', "principal app, grant 1: topics can't restrict"),
        ('grants = [{ actions = ["lock"], groups = ["a"] }]', "principal app, grant 1: locks must be given"),
        ("grants = [{}]", "principal app, grant 1: actions must be a list of one or more of: publish"),
        ('grants = [{ actions = ["*"] }]', "principal app, grant 1: actions must be one of"),
        ('grants = [{ actions = ["publsh"] }]', "did you mean 'publish'?"),
        ('grants = [{ action = ["publish"], actions = ["lock"] }]', "did you mean 'actions'?"),
        ('grants = { actions = ["publish"] }', "principal app: grants must be a list of tables"),
        ("grants = [1]", "principal app: grants must be a list of tables"),
        ("limits = { rate = 1 }", "principal app, limits: has no field 'rate'"),
        ("limits = 1", "principal app: limits must be a table"),
        ("limits = { requests_per_second = 0 }", "limits: requests_per_second must be a number from"),
        ("limits = { requests_per_second = nan }", "limits: requests_per_second must be a number from"),
        ("limits = { requests_per_second = true }", "limits: requests_per_second must be a number from"),
        ("limits = { parked_pops = -1 }", "limits: parked_pops must be a whole number from 0"),
        ("limits = { parked_pops = 1.5 }", "limits: parked_pops must be a whole number"),
        ("limits = { connections = 0 }", "limits: connections must be a whole number from 1"),
        ("limits = { topics = false }", "limits: topics must be a whole number"),
        ("limits = { bytes_in_flight = 1 }", "limits: bytes_in_flight must be a size"),
        ('limits = { bytes_in_flight = "64XB" }', "limits: bytes_in_flight must be a size"),
        ("limits = { bytes_in_flight = true }", "limits: bytes_in_flight must be a size"),
        ('certificates = "a"', "principal app: certificates must be a list of names"),
        ('certificates = ["a b"]', "principal app: certificates must be a list of names"),
        ("keys = 1", "principal app: keys must be a table"),
        ("keys.abcdef = 1", "principal app, key abcdef: must be a table"),
        (f"[principals.app.keys.A]\n{KEY}", "principal app: keys an id must be 6 to 32 of a-z and 0-9, not 'A'"),
        (f"[principals.app.keys.abcdef]\n{CREATED}", "principal app, key abcdef: sha256 must be 64 hexadecimal digits"),
        (f'[principals.app.keys.abcdef]\nsha256 = "{HASH}a"\n{CREATED}', "key abcdef: sha256 must be 64"),
        (f'[principals.app.keys.abcdef]\nsha256 = "{HASH[1:]}g"\n{CREATED}', "key abcdef: sha256 must be 64"),
        (f"[principals.app.keys.abcdef]\nsha256 = 1\n{CREATED}", "key abcdef: sha256 must be 64"),
        (f'[principals.app.keys.abcdef]\nsha256 = "{HASH}"', "key abcdef: created must be a time with a time zone"),
        (f"[principals.app.keys.abcdef]\n{KEY}\nexpires = 2026-11-26T12:00:00", "key abcdef: expires must be a time"),
        (f"[principals.app.keys.abcdef]\n{KEY}\nexpires = 2026-11-26", "key abcdef: expires must be a time"),
        (f"[principals.app.keys.abcdef]\n{KEY}\nexpires = 12:00:00", "key abcdef: expires must be a time"),
        (f'[principals.app.keys.abcdef]\n{KEY}\nexpires = "2026-11-26T12:00:00Z"', "without quotes"),
        (f"[principals.app.keys.abcdef]\n{KEY}\nexpires = 0001-01-01T00:00:00+14:00", "expires must be a time"),
        (f"[principals.app.keys.abcdef]\n{KEY}\nnote = 1", "key abcdef: note must be a text"),
        (f"[principals.app.keys.abcdef]\n{KEY}\nnotes = 'x'", "key abcdef: has no field 'notes'; did you mean 'note'?"),
    ],
)
def test_a_wrong_field_is_named_with_its_principal(fields: str, said: str) -> None:
    assert said in problem(fields)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "must have at least one principal"),
        ("[principals]", "must have at least one principal"),
        ("principals = 1", "principals must be a table"),
        ("[principal.a]", "has no field 'principal'; did you mean 'principals'?"),
        ("[principals]\na = 1", "principal a: must be a table"),
        ('[principals."a b"]', "principals a name must be 1 to 64"),
        (f"[principals.{'a' * 65}]", "principals a name must be 1 to 64"),
        ('[principals.""]', "principals a name must be 1 to 64"),
        ("[principals.a", "the file is not TOML"),
        ("[principals.a]\n[principals.a]", "the file is not TOML"),
        ("a = " + "[" * 5000, "the file is nested too deeply"),
        ("a = 2026-02-30T12:00:00Z", "TOML"),
        (f"a = {'9' * 5000}", "not possible"),
        (
            f"[principals.a.keys.abcdef]\n{KEY}\n[principals.b.keys.abcdef]\n{KEY.replace('ab', 'cd')}",
            "principal b, key abcdef: a has a key with the same id",
        ),
        (
            f"[principals.a.keys.abcdef]\n{KEY}\n[principals.b.keys.abcdeg]\n{KEY}",
            "principal b, key abcdeg: sha256 is the same as that of abcdef",
        ),
        (
            '[principals.a]\ncertificates = ["X.y"]\n[principals.b]\ncertificates = ["x.Y"]',
            "principal b: certificates 'x.y' belongs to a already",
        ),
    ],
)
def test_a_wrong_file_is_refused(text: str, said: str) -> None:
    found = problems(text)
    assert any(said in one for one in found), found


def test_a_file_that_is_no_text_is_refused() -> None:
    with pytest.raises(KeyFileError, match="is not UTF-8 text"):
        parse_key_file(b"\xff\x00")


def test_all_problems_are_reported_together() -> None:
    found = problems('[principals.a]\nrole = "x"\ntopics = 1\n[principals.b]\nlimits = 1\nfoo = 2')
    assert [line.split(": ")[0] for line in found] == ["principal a", "principal a", "principal b", "principal b"]


def test_the_number_of_problems_is_bounded() -> None:
    assert len(problems("\n".join(f"[principals.p{n}]\nx = 1" for n in range(500)))) == 100


@pytest.mark.parametrize(
    "text",
    [
        "[principals.{}]\nx = 1",
        "[principals.app]\n{} = 1",
        "[principals.app]\nrole = '{}'",
        "[principals.app]\nroles = ['{}']",
        "[principals.app.keys.{}]\nx = 1",
        "[principals.app.keys.abcdef]\nsha256 = '{}'",
        "[principals.app.keys.abcdef]\n{} = 1",
        "[principals.app]\nlimits = {{ bytes_in_flight = '{}' }}",
        "[principals.app]\nlimits = {{ {} = 1 }}",
        "[principals.app]\ncertificates = 1\nnotes='{}'",
        "[principals.{0}]\n[principals.{0}]",
        "{0} = 1\n{0} = 2",
        "{} = ",
        "[{}]",
    ],
)
def test_a_key_or_a_hash_in_a_wrong_place_is_not_shown(text: str) -> None:
    key = new_key()
    for hidden in (key.text, HASH, key.digest.hex()):
        said = "\n".join(problems(text.format(hidden)))
        assert hidden not in said
        assert hidden[-20:] not in said


def test_the_numbers_of_grants_and_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = '{ actions = ["publish"] }'
    assert len(one(f"grants = [{', '.join([grant] * GRANTS_MAX)}]").principal.grants) == GRANTS_MAX
    assert "grants must be at most 64" in problem(f"grants = [{', '.join([grant] * (GRANTS_MAX + 1))}]")
    assert "grants must be at most 64" in problem(f"role = 'worker'\ngrants = [{', '.join([grant] * GRANTS_MAX)}]")
    monkeypatch.setattr(key_file, "KEYS_MAX", 1)
    (said,) = problems(
        f"[principals.a.keys.abcdef]\n{KEY}\n[principals.b.keys.abcdeg]\n{KEY.replace('ab' * 8, 'cd' * 8)}"
    )
    assert "at most 1 keys together, not 2" in said
    monkeypatch.setattr(key_file, "PRINCIPALS_MAX", 1)
    assert problems("[principals.a]\n[principals.b]") == ["principals must be at most 1, not 2"]


def test_the_size_of_the_grants_of_a_principal_is_bounded() -> None:
    patterns = [f"{'x' * 200}{n}" for n in range(64)]
    assert "grants must be at most 8192 bytes as JSON" in problem(f"role = 'worker'\ntopics = {patterns}")


# ---------------------------------------------------------------- round trip

names = st.text("abcXYZ019._@-", min_size=1, max_size=12)
patterns = st.lists(st.text("ab*.é \"\\'#[]", min_size=1, max_size=6), min_size=1, max_size=3, unique=True).map(tuple)
times = st.integers(int(START) - 10**8, int(START) + 10**9).map(float)


@st.composite
def grants(draw: st.DrawFn) -> Grant:
    restricting = {kind: draw(patterns) for kind in ("topics", "groups") if draw(st.booleans())}
    is_restricted = any("*" not in one for one in restricting.values())
    forbidden = {Action.METRICS} if is_restricted else set[Action]()
    actions = draw(st.frozensets(st.sampled_from([one for one in Action if one not in forbidden]), min_size=1))
    return Grant(actions=actions, locks=draw(patterns), queues=draw(patterns), **restricting)


@st.composite
def files(draw: st.DrawFn) -> tuple[KnownPrincipal, ...]:
    ids = iter(draw(st.lists(st.text("abc019", min_size=6, max_size=32), unique=True, min_size=6, max_size=6)))
    digests = iter(draw(st.lists(st.binary(min_size=32, max_size=32), unique=True, min_size=6, max_size=6)))
    return tuple(
        KnownPrincipal(
            principal=Principal(
                name=name,
                grants=tuple(draw(st.lists(grants(), max_size=2))),
                limits=Limits(
                    requests_per_second=draw(st.none() | st.floats(0.001, 1000)),
                    parked_pops=draw(st.none() | st.integers(0, 1000)),
                    connections=draw(st.none() | st.integers(1, 1000)),
                    bytes_in_flight=draw(st.none() | st.integers(1024, 1 << 40)),
                    topics=draw(st.none() | st.integers(0, 1000)),
                ),
            ),
            certificates=tuple(f"{name.lower()}{n}{place}" for n in range(draw(st.integers(0, 2)))),
            keys=tuple(
                StoredKey(
                    id=next(ids),
                    digest=next(digests),
                    created=draw(times),
                    expires=draw(st.none() | times),
                    note=draw(st.none() | st.text("aé\"\\'#\U0001f600", min_size=1, max_size=9)),
                )
                for _ in range(draw(st.integers(0, 2)))
            ),
        )
        for place, name in enumerate(draw(st.lists(names, unique=True, min_size=1, max_size=3)))
    )


def written(principals: tuple[KnownPrincipal, ...]) -> bytes:
    """Write a file as tomlkit writes it, so independently of what parses it."""
    document: dict[str, Any] = {}
    for known in principals:
        one: dict[str, Any] = {"certificates": [*known.certificates]} if known.certificates else {}
        limits = known.principal.limits
        given = {name: getattr(limits, name) for name in Limits.__slots__}
        one["limits"] = {name: value for name, value in given.items() if value is not None}
        one["grants"] = [
            {
                "actions": [action.value for action in grant.actions],
                **{kind: [*getattr(grant, kind)] for kind in ("topics", "groups", "locks", "queues")},
            }
            for grant in known.principal.grants
        ]
        one["keys"] = {
            key.id: {
                "sha256": key.digest.hex(),
                "created": datetime.fromtimestamp(key.created, UTC),
                **({} if key.expires is None else {"expires": datetime.fromtimestamp(key.expires, UTC)}),
                **({} if key.note is None else {"note": key.note}),
            }
            for key in known.keys
        }
        document[known.principal.name] = one
    return tomlkit.dumps({"principals": document}).encode()


@given(files())
def test_a_written_file_is_read_as_it_was(principals: tuple[KnownPrincipal, ...]) -> None:
    assert parse_key_file(written(principals)) == principals


@settings(max_examples=200)
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_content_is_read_or_refused(content: bytes) -> None:
    for text in (content, b"[principals.a]\n" + content):
        with suppress(KeyFileError):
            parse_key_file(text)


# ---------------------------------------------------------------- changes

COMMENTED = f"""\
# top

[principals.a]  # the first
role = "worker"  # its role
# about the keys of a
[principals.a.keys.aaaaaa]  # a key
sha256 = "{HASH}"
{CREATED}  # a time

# about b
[principals.b]
role = "publisher"
# the end
"""


def new(expires: float | None = None, note: str | None = None) -> KeyToAdd:
    return KeyToAdd(new_key(), START, expires, note)


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


def test_a_new_file_has_a_heading_and_the_key() -> None:
    added = new(START + 60, 'a "note"')
    content = with_key(b"", "a.b@c", NewPrincipal(roles=["worker"], patterns={"topics": ["x.*"]}), added)
    (found,) = parse_key_file(content)
    assert found.principal == one('role = "worker"\ntopics = ["x.*"]').principal.__class__(
        name="a.b@c", grants=one('role = "worker"\ntopics = ["x.*"]').principal.grants
    )
    assert found.keys == (
        StoredKey(id=added.key.id, digest=added.key.digest, created=START, expires=START + 60, note='a "note"'),
    )
    assert content.startswith(b"# The principals")
    assert added.key.text.encode() not in content


def test_a_change_keeps_comments_and_everything_else() -> None:
    text = COMMENTED
    for name, principal in (("a", None), ("b", None), ("c", NewPrincipal(roles=["worker", "monitor"], patterns={}))):
        text = with_key(text.encode(), name, principal, new()).decode()
    text = with_rotated_key(text.encode(), "a", new(), START + 60).decode()
    assert comments(text) == comments(COMMENTED)
    assert [len(known.keys) for known in parsed(text)] == [3, 1, 1]
    revoked = {key.id: known.principal.name for known in parsed(text) for key in known.keys}
    text = without_key_ids(text.encode(), revoked).decode()
    assert comments(text) == [comment for comment in comments(COMMENTED) if comment not in (" a key", " a time")]
    assert [known.keys for known in parsed(text)] == [()] * 3
    assert [known.principal for known in parsed(text)][:2] == [known.principal for known in parsed(COMMENTED)]


def test_a_rotation_ends_only_keys_that_would_live_longer() -> None:
    content = COMMENTED.encode()
    early, late = new(START + 10), new(START + 1000)
    for added in (early, late):
        content = with_key(content, "a", None, added)
    last = new()
    ends = {key.id: key.expires for key in parse_key_file(with_rotated_key(content, "a", last, START + 60))[0].keys}
    assert ends == {"aaaaaa": START + 60, early.key.id: START + 10, late.key.id: START + 60, last.key.id: None}


@pytest.mark.parametrize(
    "text",
    [
        f'[principals]\na = {{ role = "worker", keys = {{ aaaaaa = {{ sha256 = "{HASH}", {CREATED} }} }} }}\n',
        f'[principals.a]\nrole = "worker"\nkeys.aaaaaa = {{ sha256 = "{HASH}", {CREATED} }}\n',
        f'[principals.a]\nrole = "worker"\n[principals.a.keys]\naaaaaa = {{ sha256 = "{HASH}", {CREATED} }}\n',
        f'principals.a.role = "worker"\nprincipals.a.keys.aaaaaa.sha256 = "{HASH}"\nprincipals.a.keys.aaaaaa.{CREATED}',
        f'[principals.a.keys.aaaaaa]\n{KEY}\n[principals.a]\nrole = "worker"\n',
        f'[ "principals" . a ]\r\nrole = "worker"\r\n[principals.a.keys . "aaaaaa"]\r\n{KEY}',
        f'[principals.a]\nrole = "worker"\ngrants = [\n{{ actions = ["lock"] }},\n]\n[principals.a.keys.aaaaaa]\n{KEY}',
    ],
)
def test_a_change_of_an_unusual_file_is_right_or_refused(text: str) -> None:
    before = tomllib.loads(text)
    parsed(text)
    try:
        removed = without_key_ids(text.encode(), {"aaaaaa": "a"})
        rotated = with_rotated_key(text.encode(), "a", new(), START + 60)
    except KeyFileError:
        return
    assert parse_key_file(removed)[0].keys == ()
    assert {key.id: key.expires for key in parse_key_file(rotated)[0].keys}["aaaaaa"] == START + 60
    after = tomllib.loads(removed.decode())
    assert after["principals"]["a"]["role"] == before["principals"]["a"]["role"]


@settings(max_examples=50)
@given(files(), st.data())
def test_a_change_of_any_file_changes_only_what_it_should(
    principals: tuple[KnownPrincipal, ...], data: st.DataObject
) -> None:
    content = written(principals)
    place = data.draw(st.integers(0, len(principals) - 1))
    name = principals[place].principal.name
    added = new()
    after = parse_key_file(with_key(content, name, None, added))
    assert [known.principal for known in after] == [known.principal for known in principals]
    wanted = {(known.principal.name, key) for known in principals for key in known.keys}
    stored = StoredKey(id=added.key.id, digest=added.key.digest, created=START)
    assert {(known.principal.name, key) for known in after for key in known.keys} == {*wanted, (name, stored)}
    ids = {key.id: name for key in principals[place].keys}
    if ids:
        after = parse_key_file(without_key_ids(content, ids))
        assert [known.keys for known in after] == [
            () if known.principal.name == name else known.keys for known in principals
        ]


def test_all_keys_of_a_principal_are_changed_in_linear_time() -> None:
    count = 4_000
    tables = [f'[principals.a.keys.key{n:04}]\nsha256 = "{n:064x}"\n{CREATED}\n' for n in range(1, count + 1)]
    content = "\n".join(['[principals.a]\nrole = "worker"\n', *tables]).encode()
    began = time.process_time()
    (rotated,) = parse_key_file(with_rotated_key(content, "a", new(), START + 60))
    assert [key.expires for key in rotated.keys] == [START + 60] * count + [None]
    (revoked,) = parse_key_file(without_key_ids(content, {f"key{n:04}": "a" for n in range(1, count + 1)}))
    assert revoked.keys == ()
    assert time.process_time() - began < 20


def test_a_change_with_a_wrong_result_is_refused() -> None:
    with pytest.raises(KeyFileError, match="topics can't restrict metrics"):
        with_key(b"", "a", NewPrincipal(roles=["monitor"], patterns={"topics": ["x"]}), new())
