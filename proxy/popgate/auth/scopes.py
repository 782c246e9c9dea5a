"""Turns the scopes of a token into grants. Scopes have the form of RabbitMQ's OAuth 2 plugin.

    scope                                            grant
    read:TOPIC/GROUP                                 consume, inspect
    write:TOPIC, write:TOPIC/*                       publish
    configure:TOPIC/GROUP                            create
    lock:NAME                                        lock
    tag:administrator                                everything, and adopting every queue of the broker
    tag:monitoring                                   metrics, and inspect everything

TOPIC, GROUP and NAME are patterns: ``*`` matches any number of characters, and ``%2F`` is a character that is encoded
as in a URL. As in RabbitMQ, a third pattern may follow, but here it must be ``*``: ``read:*/*/*``. ``tag:management``
and ``tag:policymaker`` grant nothing.

A token may contain scopes of other services, so unknown scopes are ignored. A scope that popgate does not understand
grants nothing, because a guess might grant too much.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from types import MappingProxyType
from typing import cast
from urllib.parse import unquote_plus

from popgate.auth.key_file import GRANTS_BYTES_MAX
from popgate.auth.roles import ADMINISTRATOR, ROLES
from popgate.domain.permissions import ANY, GRANTS_MAX, PATTERN_LENGTH_MAX, PATTERNS_MAX, Action, Grant

_log = logging.getLogger(__name__)

SCOPES_MAX = 1_024
"""Maximum number of scopes of one token that are read, with those that aliases stand for."""

_PATTERN = re.compile(rf"[!-~]{{1,{PATTERN_LENGTH_MAX}}}")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%2[Aa]")
"""An incomplete escape, or an escaped ``*``, which is no wildcard in a scope but would be one in a grant."""
_TAGS: Mapping[str, Grant | None] = MappingProxyType(
    {
        "administrator": Grant(actions=ROLES[ADMINISTRATOR], queues=(ANY,)),
        "monitoring": Grant(actions=frozenset({Action.METRICS, Action.INSPECT})),
        "management": None,
        "policymaker": None,
    }
)
_VERBS: Mapping[str, frozenset[Action]] = MappingProxyType(
    {
        "read": frozenset({Action.CONSUME, Action.INSPECT}),
        "write": frozenset({Action.PUBLISH}),
        "configure": frozenset({Action.CREATE}),
    }
)


class TooManyScopes(Exception):
    """The scopes of a token amount to more grants than a caller may have."""


class ScopeRules:
    """How the scopes of a provider's tokens become grants.

    Scopes that do not begin with ``prefix`` are ignored, except for aliases. ``aliases`` are pairs of an alias and the
    scopes that it stands for; these may omit the prefix, and are not aliases themselves.
    """

    def __init__(self, *, prefix: str = "", aliases: Iterable[tuple[str, Sequence[str]]] = ()) -> None:
        self._prefix = prefix
        self._aliases = {alias: tuple(scope.removeprefix(prefix) for scope in scopes) for alias, scopes in aliases}

    def grants(self, claim: object) -> tuple[Grant, ...]:
        """Return what the value of a token's claim grants: a text of scopes with spaces between them, or a list.

        Raises: TooManyScopes.
        """
        found: list[Grant] = []
        malformed = 0
        for count, scope in enumerate(self._scopes(claim), 1):
            if count > SCOPES_MAX:
                raise TooManyScopes
            try:
                grant = _grant(scope)
            except ValueError:
                malformed += 1
                continue
            if grant is not None:
                found.append(grant)
        if malformed:
            _log.debug("scopes of a token are malformed, and were ignored", extra={"count": malformed})
        grants = tuple(_merged(found))
        if len(grants) > GRANTS_MAX or _encoded_bytes(grants) > GRANTS_BYTES_MAX:
            raise TooManyScopes
        return grants

    def _scopes(self, claim: object) -> Iterator[str]:
        """Yield the scopes without the prefix, and with aliases replaced."""
        for scope in _words(claim):
            if (meant := self._aliases.get(scope)) is not None:
                yield from meant
            elif scope.startswith(self._prefix):
                yield scope.removeprefix(self._prefix)


def _words(claim: object) -> list[str]:
    if isinstance(claim, str):
        return claim.split(" ")
    if isinstance(claim, list):
        # An entry is not split at spaces: it may be the name of a group that a user has chosen.
        return [word for word in cast("list[object]", claim) if isinstance(word, str)]
    return []


def _grant(scope: str) -> Grant | None:
    """Return the grant of one scope, or None if it grants nothing. Raises: ValueError if the scope is malformed."""
    verb, colon, rest = scope.partition(":")
    if not colon:
        return None
    if verb == "tag":
        return _TAGS.get(rest)
    if verb == "lock":
        return _lock_grant((_pattern(rest),))
    actions = _VERBS.get(verb)
    if actions is None:
        return None
    topic, *others = (_pattern(part) for part in rest.split("/"))
    if verb == "write":  # to publish concerns a topic with all of its groups
        group, is_whole = ANY, all(part == ANY for part in others)
    else:
        group, is_whole = (others or [""])[0], all(part == ANY for part in others[1:])
    if not group or not is_whole or len(others) > 2:
        raise ValueError("the scope does not have the form of this permission")
    return Grant(actions=actions, topics=(topic,), groups=(group,), locks=())


def _pattern(part: str) -> str:
    """Return the pattern that a part of a scope means. Raises: ValueError."""
    if _BAD_ESCAPE.search(part) is not None:
        raise ValueError("the escape is not valid")
    pattern = unquote_plus(part, errors="strict")  # a UnicodeDecodeError is a ValueError
    if _PATTERN.fullmatch(pattern) is None:
        raise ValueError("the pattern is not valid")
    return sys.intern(pattern)  # many tokens name the same topics, and their grants are remembered


def _merged(grants: Iterable[Grant]) -> Iterator[Grant]:
    """Yield the same permissions in fewer grants, of which each has several topics or several locks."""
    whole: dict[Grant, None] = {}
    locks: dict[str, None] = {}
    actions: dict[tuple[str, str], frozenset[Action]] = {}
    for grant in grants:
        if grant.topics and grant.locks:
            whole[grant] = None
        locks.update(dict.fromkeys(() if grant.topics else grant.locks))
        for pair in product(grant.topics, () if grant.locks else grant.groups):
            actions[pair] = actions.get(pair, frozenset()) | grant.actions
    topics: dict[tuple[frozenset[Action], str], list[str]] = {}
    for (topic, group), allowed in actions.items():
        topics.setdefault((allowed, group), []).append(topic)
    yield from whole
    for (allowed, group), names in topics.items():
        for some in _parts(names):
            yield Grant(actions=allowed, topics=some, groups=(group,), locks=())
    for some in _parts([*locks]):
        yield _lock_grant(some)


def _lock_grant(names: tuple[str, ...]) -> Grant:
    return Grant(actions=frozenset({Action.LOCK}), topics=(), groups=(), locks=names)


def _parts(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Return the names in as many parts as a grant's maximum number of patterns requires."""
    return (tuple(names[first : first + PATTERNS_MAX]) for first in range(0, len(names), PATTERNS_MAX))


def _encoded_bytes(grants: Iterable[Grant]) -> int:
    """Return the size of the grants as JSON, which is an upper bound of what a forwarded request carries."""
    tables = [{**asdict(grant), "actions": [*grant.actions]} for grant in grants]
    return len(json.dumps(tables, separators=(",", ":")))
