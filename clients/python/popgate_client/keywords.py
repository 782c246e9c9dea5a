"""The settings of topics and groups as keyword arguments, and a check of keyword arguments at run time.

A type checker knows the names and types from the TypedDicts; Python itself accepts any name.
"""

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TypedDict


class TopicSettings(TypedDict, total=False):
    """queues: number of popgate's own queues, 1 unless it is set. adopt: names of existing RabbitMQ queues, in place of
    own ones. unique_message_ids: no two messages of the adopted queues ever share a message id."""

    queues: int
    adopt: Sequence[str]
    unique_message_ids: bool


class RetrySettings(TypedDict, total=False):
    """The delay of a released message: `initial_seconds` after the first delivery, then `multiplier` times as long
    after each further one, at most `max_seconds`."""

    initial_seconds: float
    multiplier: float
    max_seconds: float


class GroupSettings(TypedDict, total=False):
    """invisibility_seconds: how long a lease lasts unless the pop says otherwise. max_lease_seconds: maximum age of a
    lease. max_deliveries: number of deliveries after which a message is dead-lettered; None: never. max_in_flight:
    maximum number of leases at a time; None: no limit. paused: hand out no messages. min_replicas: number of replicas
    that a replica keeper maintains; 0: leave them as they are; None: the keeper's settings."""

    invisibility_seconds: float
    max_lease_seconds: float
    max_deliveries: int | None
    retry: RetrySettings
    max_in_flight: int | None
    paused: bool
    min_replicas: int | None


def check_keywords(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for the first name in `given` that `call` does not take, with a similar name if there is one."""
    for name in given:
        if name not in known:
            similar = get_close_matches(name, known, n=1)
            hint = f"; did you mean {similar[0]!r}?" if similar else f"; it takes {', '.join(sorted(known))}"
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
