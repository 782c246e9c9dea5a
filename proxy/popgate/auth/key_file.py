"""Defines the file of principals and their API keys, and parses it.

    [principals.orders-app]
    role = "worker"                     # or roles = ["publisher", "lock-user"]
    topics = ["orders.*"]               # patterns for the roles; also groups, locks and queues
    groups = ["billing"]
    grants = [{ actions = ["create"], topics = ["orders.*"] }]
    limits = { requests_per_second = 100, bytes_in_flight = "64MiB" }
    certificates = ["spiffe://example.org/orders-app"]

    [principals.orders-app.keys.k3v7mq2xaz]
    sha256 = "..."                      # 64 hexadecimal digits
    created = 2026-11-26T12:00:00Z
    expires = 2027-11-26T12:00:00Z
    note = "the shop in Frankfurt"

Only ``sha256`` and ``created`` of a key are required. Without patterns, roles and grants apply to all topics, groups
and locks, and to no queue of the broker. If topics or groups are restricted, and no pattern for locks is given, they
apply to no lock.

The file is checked completely, and all that is wrong is reported together. The report never contains a key or a hash.
``key_file_edits`` changes the file.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import cast

from popgate.auth.fields import Fields, Problems, not_this
from popgate.auth.keys import DIGEST_BYTES, ID_PATTERN, key_id_in, without_credentials
from popgate.auth.roles import ADMINISTRATOR, ROLES
from popgate.domain.permissions import (
    ANY,
    GRANTS_MAX,
    NO_LIMITS,
    PATTERN_LENGTH_MAX,
    PATTERNS_MAX,
    Action,
    Grant,
    Limits,
    Principal,
)

FILE_BYTES_MAX = 4 * 1024 * 1024
PRINCIPALS_MAX = 10_000
KEYS_MAX = 10_000
"""Maximum number of keys of all principals together."""
GRANTS_BYTES_MAX = 8 * 1024
"""Maximum size of the grants of one principal as JSON, in bytes. A forwarded request carries them in a header."""
CERTIFICATES_MAX = 64
TEXT_LENGTH_MAX = 255
"""Maximum length of a note, and of a name in a certificate."""
RATE_MAX, COUNT_MAX, BYTES_MAX = 1_000_000, 10_000_000, 1 << 40

PATTERN_FIELDS = ("topics", "groups", "locks", "queues")
PRINCIPAL_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")

_PATTERN = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_HASH = re.compile(r"[0-9A-Fa-f]{64}")
_CERTIFICATE_NAME = re.compile(r"[!-~]+")


class KeyFileError(ValueError):
    """The file is wrong. ``problems`` has one line for each problem, which names the principal and the field."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKey:
    """One key of a principal. Times are in Unix seconds."""

    id: str
    digest: bytes
    created: float
    expires: float | None = None
    note: str | None = None

    def __repr__(self) -> str:
        return f"StoredKey(id={self.id!r}, created={self.created}, expires={self.expires})"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPrincipal:
    """A principal in the file, with its credentials."""

    principal: Principal
    roles: tuple[str, ...] = ()
    certificates: tuple[str, ...] = ()
    keys: tuple[StoredKey, ...] = ()


def parse_key_file(content: bytes, *, may_be_empty: bool = False) -> tuple[KnownPrincipal, ...]:
    """Return the principals in a file, in the order of the file. Raises: KeyFileError.

    A file without principals is wrong unless it ``may_be_empty``. So a file that is being written again, and is empty
    for a moment, revokes no key.
    """
    problems = Problems()
    known = _parse_principals(_parse_toml(content), problems, may_be_empty=may_be_empty)
    _check_whole(known, problems)
    if problems.found:
        raise KeyFileError([_without_secrets(problem) for problem in problems.found])
    return known


def certificate_name(name: str) -> str:
    """Return the form in which names in certificates are compared: DNS names and mail addresses in lower case."""
    return name if "://" in name else name.lower()


def _without_secrets(text: str) -> str:
    """Return ``text`` without credentials and hashes, which may be in the file as names: a name may be shown."""
    return _HASH.sub("...", without_credentials(text))


def _parse_toml(content: bytes) -> dict[str, object]:
    try:
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise KeyFileError([f"the file is not UTF-8 text (byte {error.start})"]) from None
    except tomllib.TOMLDecodeError as error:
        raise KeyFileError([_without_secrets(f"the file is not TOML: {error}")]) from None
    except RecursionError:
        raise KeyFileError(["the file is nested too deeply"]) from None
    except ValueError as error:  # a date that does not exist, or too long a number
        raise KeyFileError([f"the file has a value that is not possible: {str(error)[:80]}"]) from None


def _parse_principals(
    document: dict[str, object], problems: Problems, *, may_be_empty: bool
) -> tuple[KnownPrincipal, ...]:
    whole = Fields(document, "", problems, known=("principals",))
    principals = whole.table("principals")
    if not principals:
        if not problems.found and not may_be_empty:
            problems.add("", "principals", "must have at least one principal; add one with: popgate keys add")
        return ()
    if len(principals) > PRINCIPALS_MAX:
        problems.add("", "principals", f"must be at most {PRINCIPALS_MAX}, not {len(principals)}")
        return ()
    return tuple(_parse_principal(name, table, problems) for name, table in principals.items())


def _parse_principal(name: str, table: object, problems: Problems) -> KnownPrincipal:
    if PRINCIPAL_NAME.fullmatch(name) is None or key_id_in(name) is not None:
        problems.add("", "principals", f"a name must be 1 to 64 of A-Z a-z 0-9 . _ @ -, and no key{not_this(name)}")
        name = "?"
    where = f"principal {name}"
    known = ("role", "roles", *PATTERN_FIELDS, "grants", "limits", "certificates", "keys")
    if not isinstance(table, dict):
        problems.add(where, "", "must be a table")
        return KnownPrincipal(principal=Principal(name=name))
    fields = Fields(cast("dict[str, object]", table), where, problems, known=known)
    roles = _parse_roles(fields)
    grants = [*_parse_role_grants(fields, roles), *_parse_grants(fields)]
    if len(grants) > GRANTS_MAX:
        fields.add("grants", f"must be at most {GRANTS_MAX} with the one of the roles, not {len(grants)}")
    elif (size := _encoded_bytes(grants)) > GRANTS_BYTES_MAX:
        fields.add("grants", f"must be at most {GRANTS_BYTES_MAX} bytes as JSON, not {size}; use fewer patterns")
    names = fields.texts("certificates", _CERTIFICATE_NAME, TEXT_LENGTH_MAX, CERTIFICATES_MAX, "names in certificates")
    return KnownPrincipal(
        principal=Principal(name=name, grants=tuple(grants), limits=_parse_limits(fields)),
        roles=roles,
        certificates=() if names is None else tuple(certificate_name(one) for one in names),
        keys=tuple(_parse_key(id, key, where, problems) for id, key in (fields.table("keys") or {}).items()),
    )


# -- grants -----------------------------------------------------------------------------------------------------------


def _parse_roles(fields: Fields) -> tuple[str, ...]:
    if "role" in fields and "roles" in fields:
        fields.add("role", "and roles are both given; give one of them")
    names = fields.words("roles", ROLES) if "roles" in fields else ()
    single = fields.word("role", ROLES)
    return (single,) if single is not None else tuple(dict.fromkeys(names))


def _parse_role_grants(fields: Fields, roles: Sequence[str]) -> list[Grant]:
    patterns = _parse_patterns(fields)
    if not roles:
        for kind in PATTERN_FIELDS:
            if kind in fields and "role" not in fields and "roles" not in fields:
                fields.add(kind, "belongs to role or roles, which are missing; the patterns of a grant stand in it")
        return []
    if ADMINISTRATOR in roles:
        patterns.setdefault("queues", (ANY,))
    actions = frozenset(action for role in roles for action in ROLES[role])
    return [_grant(actions, patterns, fields, "role")]


def _parse_grants(fields: Fields) -> list[Grant]:
    grants: list[Grant] = []
    for number, table in enumerate(fields.tables("grants", GRANTS_MAX), 1):
        where = f"{fields.where}, grant {number}"
        one = Fields(table, where, fields.problems, known=("actions", *PATTERN_FIELDS))
        actions = [Action(word) for word in one.words("actions", [action.value for action in Action], required=True)]
        grants.append(_grant(frozenset(actions), _parse_patterns(one), one, "actions"))
    return grants


def _parse_patterns(fields: Fields) -> dict[str, tuple[str, ...]]:
    """Return the given patterns by their kind. A kind with wrong patterns matches nothing."""
    return {
        kind: fields.texts(kind, _PATTERN, PATTERN_LENGTH_MAX, PATTERNS_MAX, "patterns") or ()
        for kind in PATTERN_FIELDS
        if kind in fields
    }


def _grant(actions: frozenset[Action], patterns: dict[str, tuple[str, ...]], fields: Fields, field: str) -> Grant:
    restricting = [kind for kind in ("topics", "groups") if ANY not in patterns.get(kind, (ANY,))]
    if restricting and "locks" not in patterns:
        patterns = {**patterns, "locks": ()}  # otherwise the restriction would still allow all locks
        if Action.LOCK in actions:
            fields.add("locks", f"must be given with {' and '.join(restricting)}, because {field} contains lock")
    if restricting and Action.METRICS in actions:
        fields.add(
            " and ".join(restricting),
            f"can't restrict metrics, which {field} contains: metrics concern the whole server. Use a separate grant "
            'such as {actions = ["metrics"]}',
        )
    return Grant(actions=actions, **patterns)


def _encoded_bytes(grants: Iterable[Grant]) -> int:
    """Return the size of the grants as JSON. Escapes make this an upper bound of what is sent."""
    tables = [{**asdict(grant), "actions": [*grant.actions]} for grant in grants]
    return len(json.dumps(tables, separators=(",", ":")))


def _parse_limits(fields: Fields) -> Limits:
    table = fields.table("limits")
    if table is None:
        return NO_LIMITS
    known = ("requests_per_second", "parked_pops", "connections", "bytes_in_flight", "topics")
    limits = Fields(table, f"{fields.where}, limits", fields.problems, known=known)
    return Limits(
        requests_per_second=limits.number("requests_per_second", 0.001, RATE_MAX),
        parked_pops=limits.whole("parked_pops", 0, COUNT_MAX),
        connections=limits.whole("connections", 1, COUNT_MAX),
        bytes_in_flight=limits.size("bytes_in_flight", 1024, BYTES_MAX),
        topics=limits.whole("topics", 0, COUNT_MAX),
    )


# -- keys -------------------------------------------------------------------------------------------------------------


def _parse_key(id: str, table: object, where: str, problems: Problems) -> StoredKey:
    if ID_PATTERN.fullmatch(id) is None:
        problems.add(where, "keys", f"an id must be 6 to 32 of a-z and 0-9{not_this(id)}")
        id = "?"
    where = f"{where}, key {id}"
    if not isinstance(table, dict):
        problems.add(where, "", "must be a table")
        return StoredKey(id=id, digest=bytes(DIGEST_BYTES), created=0.0)
    fields = Fields(cast("dict[str, object]", table), where, problems, known=("sha256", "created", "expires", "note"))
    created = fields.time("created", required=True)
    return StoredKey(
        id=id,
        digest=fields.digest("sha256", DIGEST_BYTES),
        created=0.0 if created is None else created.timestamp(),
        expires=None if (expires := fields.time("expires")) is None else expires.timestamp(),
        note=fields.text("note", _PATTERN, TEXT_LENGTH_MAX),
    )


def _check_whole(known: Sequence[KnownPrincipal], problems: Problems) -> None:
    """Add what is wrong between the principals to ``problems``."""
    ids: dict[str, str] = {}
    digests: dict[bytes, str] = {}
    certificates: dict[str, str] = {}
    for one in known:
        name = one.principal.name
        for key in one.keys:
            if key.id != "?" and ids.setdefault(key.id, name) != name:
                problems.add(f"principal {name}, key {key.id}", "", f"{ids[key.id]} has a key with the same id")
            if key.digest != bytes(DIGEST_BYTES) and digests.setdefault(key.digest, key.id) != key.id:
                problems.add(
                    f"principal {name}, key {key.id}", "sha256", f"is the same as that of {digests[key.digest]}"
                )
        for certificate in one.certificates:
            if certificate in certificates:
                owner = certificates[certificate]
                problems.add(f"principal {name}", "certificates", f"{certificate!r} belongs to {owner} already")
            certificates[certificate] = name
    count = sum(len(one.keys) for one in known)
    if count > KEYS_MAX:
        problems.add("", "principals", f"must have at most {KEYS_MAX} keys together, not {count}; revoke some")


def shown_time(seconds: float) -> str:
    """Return a Unix time as in the file, in UTC and without fractions."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
