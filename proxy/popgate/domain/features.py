"""What a server may offer, as ``GET /v1`` names it. A client looks there before it relies on it."""

from enum import StrEnum


class Feature(StrEnum):
    """What every popgate of this version has, unless ``--features`` leaves it out. What depends on other settings, and
    is told beside these: ``adopt`` (on RabbitMQ), ``auto_create``."""

    POP = "pop"
    PULL = "pull"
    ATTEMPT_ID = "attempt_id"
    CLIENT_ID = "client_id"
    """Of a pop; a pull has always had it."""
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
