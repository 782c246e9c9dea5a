"""Defines the names of the features that ``GET /v1`` lists. Clients check this list before they rely on a feature."""

from enum import StrEnum


class Feature(StrEnum):
    """A feature that every popgate of this version has, unless ``--features`` omits it.

    ``GET /v1`` also lists two features that depend on other settings: ``adopt`` (on RabbitMQ) and ``auto_create``.
    """

    POP = "pop"
    PULL = "pull"
    ATTEMPT_ID = "attempt_id"
    CLIENT_ID = "client_id"
    """A pop may contain a ``client_id``. Pulls have always contained one, so this feature does not concern them."""
    MSGPACK = "msgpack"
    RETRY = "retry"
    ORDERING = "ordering"
    DELAY = "delay"
    TTL = "ttl"
    DEDUP = "dedup"
    DEAD_LETTERS = "dead_letters"
    EXPLAIN = "explain"
    """Requests that explain why a pop gets nothing, peek, and find a message."""
    CAUSES = "causes"
    """A release or a rejection may contain an ``error`` and a ``client_id``."""
    LEASE_GROUPS = "lease_groups"
    LOCKS = "locks"
    FILTER = "filter"
    SETTLE_ON_POP = "settle_on_pop"
    """A pop may contain settlements of earlier messages: ``ack``, ``release``, ``extend`` and ``reject``."""
    MAX_IN_FLIGHT = "max_in_flight"
    MAX_LEASE_SECONDS = "max_lease_seconds"
    MIN_REPLICAS = "min_replicas"
    PAUSE = "pause"
    PURGE = "purge"
    CONSUME_MODE = "consume_mode"


ALL_FEATURES = tuple(Feature)
