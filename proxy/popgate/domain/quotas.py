"""Defines quotas, which limit the number of objects so that no client exhausts shared resources.

Pure. A quota limits only the creation of objects. If a quota is lowered below the number of existing objects, these
objects continue to work.
"""

from dataclasses import dataclass
from enum import StrEnum

from popgate.domain.errors import QuotaExceeded
from popgate.domain.lease_group import GROUPS_MAX
from popgate.domain.message import HEADERS_BYTES_MAX

TOPICS_MAX, GROUPS_PER_TOPIC_MAX, QUEUES_MAX = 100_000, 10_000, 100_000
LOCKS_MAX = 100_000
LEASE_GROUPS_MAX = 100_000
HEADERS_MAX = 4_096
HEADERS_BYTES_MIN = 1_024
FILTER_BYTES_MIN, FILTER_BYTES_MAX = 1_024, 1024 * 1024
METRICS_GROUPS_MAX = 10_000
"""The bounds of the settings with the same names: ``_MIN`` marks the smallest value, and all others are the largest."""


class Quota(StrEnum):
    """A limit on the creation of objects. The value is the name of the setting that defines the limit."""

    TOPICS = "topics_max"
    GROUPS = "groups_per_topic_max"
    QUEUES = "queues_max"
    LOCKS = "locks_max"
    LEASE_GROUPS = "lease_groups_max"


_LIMITED = {
    Quota.TOPICS: ("topics", "delete topics that are not used"),
    Quota.GROUPS: ("groups of one topic", "delete groups that are not used"),
    Quota.QUEUES: ("queues of all groups", "delete groups or topics, or create topics with fewer queues"),
    Quota.LOCKS: ("locks", "delete locks that are not used"),
    Quota.LEASE_GROUPS: (
        "lease groups of one group that are not acked",
        "ack or release some (GET lease-groups lists them)",
    ),
}
"""The objects that each quota limits, and the advice for a user who has reached the quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """The limits of one proxy. Sizes are in bytes.

    ``queues_max`` counts the queues of all groups, without dead-letter queues. ``lease_groups_max`` counts the lease
    groups of one group that are not acked. ``headers_max`` and ``headers_bytes_max`` limit the headers of one published
    message. ``filter_bytes_max`` limits the filter of one pop. ``metrics_groups_max`` limits the number of groups that
    have their own rows in ``/metrics``.
    """

    topics_max: int = 1_000
    groups_per_topic_max: int = 100
    queues_max: int = 4_000
    locks_max: int = 10_000
    lease_groups_max: int = GROUPS_MAX
    headers_max: int = 256
    headers_bytes_max: int = HEADERS_BYTES_MAX
    filter_bytes_max: int = 16 * 1024
    metrics_groups_max: int = 200

    def check(self, quota: Quota, present: int, more: int = 1) -> None:
        """Check that ``more`` objects may be created if there are ``present`` objects now. Raises: QuotaExceeded."""
        check_quota(quota, getattr(self, quota), present, more)


DEFAULTS = Quotas()


def check_quota(quota: Quota, limit: int, present: int, more: int = 1) -> None:
    """Check that ``more`` objects may be created if the value of the quota is ``limit``. Raises: QuotaExceeded."""
    if more > 0 and present + more > limit:
        raise quota_exceeded(quota, limit)


def quota_exceeded(quota: Quota, limit: int) -> QuotaExceeded:
    what, remedy = _LIMITED[quota]
    detail = f"{quota}: this would be more than {limit} {what}; {remedy}, or raise {flag_of(quota)}"
    return QuotaExceeded(detail, setting=quota)


def flag_of(setting: str) -> str:
    """Return the command-line flag of a setting, for use in error messages."""
    return "--" + setting.replace("_", "-")
