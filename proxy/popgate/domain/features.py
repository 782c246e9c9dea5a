"""The features that a server may offer, as ``GET /v1`` lists them. Clients check the list before they rely on one."""

from enum import StrEnum


class Feature(StrEnum):
    """A feature that every popgate of this version has, unless ``--features`` omits it.

    Two further features, which depend on other settings, are listed beside these: ``adopt`` (on RabbitMQ) and
    ``auto_create``.
    """

    POP = "pop"
    PULL = "pull"
    ATTEMPT_ID = "attempt_id"
    CLIENT_ID = "client_id"
    """The ``client_id`` of a pop; a pull has always had one."""
    MSGPACK = "msgpack"
    RETRY = "retry"
    ORDERING = "ordering"
    DELAY = "delay"
    TTL = "ttl"
    DEDUP = "dedup"
    DEAD_LETTERS = "dead_letters"
    LEASE_GROUPS = "lease_groups"
    LOCKS = "locks"
    FILTER = "filter"
    MAX_IN_FLIGHT = "max_in_flight"
    MAX_LEASE_SECONDS = "max_lease_seconds"
    MIN_REPLICAS = "min_replicas"
    PAUSE = "pause"
    PURGE = "purge"
    CONSUME_MODE = "consume_mode"


ALL_FEATURES = tuple(Feature)
