"""Defines the roles: names for sets of actions that callers usually need together."""

from collections.abc import Mapping
from types import MappingProxyType

from popgate.domain.permissions import Action

ADMINISTRATOR = "administrator"
"""The role that may do everything. It may also adopt every queue of the broker."""

ROLES: Mapping[str, frozenset[Action]] = MappingProxyType(
    {
        "publisher": frozenset({Action.PUBLISH}),
        "consumer": frozenset({Action.CONSUME}),
        "worker": frozenset({Action.PUBLISH, Action.CONSUME, Action.INSPECT}),
        "creator": frozenset({Action.CREATE}),
        "lock-user": frozenset({Action.LOCK}),
        "monitor": frozenset({Action.METRICS}),
        "operator": frozenset({Action.INSPECT, Action.CREATE, Action.METRICS}),
        ADMINISTRATOR: frozenset(Action),
    }
)
