"""Counts what each principal uses of this process, and refuses what exceeds the principal's limits with 429.

A cluster of N proxies allows up to N times as much, because each proxy counts for itself.
"""

from collections.abc import Callable, Iterable
from itertools import islice
from time import monotonic

from popgate.domain.errors import LimitExceeded, MessageTooLarge
from popgate.domain.permissions import Action, Limits, Principal, Resource

BURST_SECONDS = 1.0
"""Seconds of the permitted rate that a principal may use at once."""
TOPICS_RETRY_SECONDS = 60.0
"""Retry-After for a topic beyond the limit: it can be created when another one was deleted."""
PRINCIPALS_MAX = 10_000
"""Maximum number of principals without requests in progress whose request rates are remembered."""


class Usage:
    """What one principal uses at present."""

    __slots__ = ("_name", "_tokens", "_tokens_at", "bytes_in_flight", "connections", "limits", "parked", "requests")

    def __init__(self, principal: Principal) -> None:
        self._name = principal.name
        self.limits = principal.limits
        self.requests = 0
        """Number of requests in progress."""
        self.parked = 0
        self.bytes_in_flight = 0
        self.connections = 0
        self._tokens = max(1.0, BURST_SECONDS * (self.limits.requests_per_second or 0.0))
        self._tokens_at = monotonic()

    @property
    def is_idle(self) -> bool:
        return not (self.requests or self.connections)

    def take_request(self) -> None:
        """Count a request. Raises: LimitExceeded."""
        rate = self.limits.requests_per_second
        if rate is None:
            return
        now = monotonic()
        self._tokens = min(max(1.0, BURST_SECONDS * rate), self._tokens + (now - self._tokens_at) * rate)
        self._tokens_at = now
        if self._tokens < 1.0:
            raise self._exceeded("requests_per_second", rate, (1.0 - self._tokens) / rate)
        self._tokens -= 1.0

    def check_bytes(self, size: int) -> None:
        """Raises: LimitExceeded if ``size`` more bytes exceed the limit; MessageTooLarge if they alone do."""
        limit = self.limits.bytes_in_flight
        if limit is not None and size > limit:
            raise MessageTooLarge(
                f"the request has more bytes than {self._name} may have in flight, bytes_in_flight = {limit:.15g}; "
                "send less at a time, and announce its size (content-length)",
                field="",
            )
        if limit is not None and self.bytes_in_flight + size > limit:
            raise self._exceeded("bytes_in_flight", limit)

    def check_connection(self) -> None:
        """Raises: LimitExceeded if one more connection exceeds the limit."""
        limit = self.limits.connections
        if limit is not None and self.connections >= limit:
            raise self._exceeded("connections", limit)

    def check_parked(self) -> None:
        """Raises: LimitExceeded if one more waiting request exceeds the limit."""
        limit = self.limits.parked_pops
        if limit is not None and self.parked >= limit:
            raise self._exceeded("parked_pops", limit)

    def _exceeded(self, limit: str, value: float, seconds: float = 1.0) -> LimitExceeded:
        return exceeded(self._name, limit, value, seconds)


def exceeded(principal: str, limit: str, value: float, seconds: float = 1.0) -> LimitExceeded:
    return LimitExceeded(f"{principal} has reached its limit {limit} = {value:.15g}", retry_after_seconds=seconds)


class Usages:
    """The usage of all principals, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Usage] = {}

    def of(self, principal: Principal) -> Usage:
        usage = self._by_name.get(principal.name)
        if usage is None:
            if len(self._by_name) >= PRINCIPALS_MAX:
                self._by_name = {name: one for name, one in self._by_name.items() if not one.is_idle}
            usage = self._by_name[principal.name] = Usage(principal)
        usage.limits = principal.limits
        return usage


def check_topic_limit(principal: Principal, topics: Callable[[], Iterable[str]]) -> None:
    """Raise an error if the principal can't create another topic. ``topics`` returns the names of the existing topics.

    Raises: LimitExceeded.
    """
    limit: Limits = principal.limits
    if limit.topics is None:
        return
    matching = (topic for topic in topics() if principal.may(Action.CREATE, Resource(topic=topic)))
    if limit.topics == 0 or next(islice(matching, limit.topics - 1, None), None) is not None:  # stops at the limit
        raise exceeded(principal.name, "topics", limit.topics, TOPICS_RETRY_SECONDS)
