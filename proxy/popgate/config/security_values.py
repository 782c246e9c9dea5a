"""Contains the parsers for the values of security settings: the file of secrets, the audit log, and OpenID Connect.

As in ``values``, each parser raises ValueError for an invalid value, with a text that describes a correct value. The
text never contains a credential.
"""

import re
from codecs import BOM_UTF8
from typing import cast
from urllib.parse import urlsplit

from popgate.config.values import file_path, secret_problem, text

SECRETS_MAX = 8
"""Maximum number of secrets in a file. Every handle and tag of another proxy may have to be checked with each."""
STANDARD_ERROR = "-"
SCOPE_PREFIX_LENGTH_MAX = 64

_CLAIM = re.compile(r"[A-Za-z0-9_./:-]{1,128}")
_ALIAS = re.compile(r"[^\s=,]{1,128}")
_SCOPE = re.compile(r"[^\s,]{1,255}")
_PREFIX = re.compile(rf"[^\s,*]{{0,{SCOPE_PREFIX_LENGTH_MAX}}}")

ScopeAliases = tuple[tuple[str, tuple[str, ...]], ...]


def secrets_in(content: bytes) -> tuple[bytes, ...]:
    """Parse the content of a file of secrets: one secret in each line, and the first one signs.

    Blank lines, and lines that begin with ``#``, are ignored. Spaces around a secret do not belong to it.

    Raises: ValueError, whose text names a wrong secret only by the number of its line.
    """
    lines = [line.strip() for line in content.splitlines()]
    found: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line or line.startswith(b"#"):
            continue
        if line.startswith(BOM_UTF8):
            raise ValueError(f"line {number} must not begin with a byte order mark (BOM): save the file without one")
        if problem := secret_problem(line):
            raise ValueError(f"line {number} {problem}")
        if line in found:
            raise ValueError(f"lines {found[line]} and {number} must be different secrets")
        found[line] = number
    if not found:
        raise ValueError("must contain a secret")
    if len(found) > SECRETS_MAX:
        raise ValueError(f"must contain at most {SECRETS_MAX} secrets, not {len(found)}")
    return tuple(found)


def file_or_standard_error(raw: object) -> str:
    """Parse the path of a file. ``-`` means standard error."""
    place = text(raw)
    return place if place == STANDARD_ERROR else str(file_path(place))


def https_url(raw: object) -> str:
    """Parse an https URL without credentials and fragment. Error texts never contain the URL."""
    url = raw if isinstance(raw, str) else ""
    try:
        parts = urlsplit(url)
        usable = parts.scheme == "https" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    else:
        usable = usable and "@" not in parts.netloc and not parts.fragment and re.search(r"\s", url) is None
    if not usable:
        raise ValueError("must be an https URL without a password, such as https://login.example.org/realms/main")
    return url


def claim_name(raw: object) -> str:
    if not isinstance(raw, str) or _CLAIM.fullmatch(raw) is None:
        raise ValueError(f"must be the name of a claim, such as 'sub', not {raw!r}")
    return raw


def scope_prefix(raw: object) -> str:
    if not isinstance(raw, str) or _PREFIX.fullmatch(raw) is None:
        raise ValueError(
            f"must be at most {SCOPE_PREFIX_LENGTH_MAX} characters without spaces, commas and *, such as 'popgate.', "
            f"not {raw!r}"
        )
    return raw


def scope_aliases(raw: object) -> ScopeAliases:
    """Parse ``ALIAS=SCOPE SCOPE`` with commas between the aliases, or a list of such texts."""
    example = "orders-team=read:orders/* write:orders/*"
    entries: object = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in cast("list[object]", entries)):
        raise ValueError(f"must be ALIAS=SCOPES with commas between them, such as {example!r}")
    aliases: dict[str, tuple[str, ...]] = {}
    for entry in cast("list[str]", entries):
        alias, equals, scopes = (part.strip() for part in entry.partition("="))
        named = tuple(scopes.split())
        is_valid = equals and named and _ALIAS.fullmatch(alias) and all(map(_SCOPE.fullmatch, named))
        if not is_valid or alias in aliases:
            raise ValueError(f"must be ALIAS=SCOPES with commas between them, such as {example!r}; {entry!r} is not")
        aliases[alias] = named
    return tuple(aliases.items())
