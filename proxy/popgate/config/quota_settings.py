"""The settings of the quotas: limits on what may exist (``domain.quotas``)."""

from collections.abc import Sequence

from popgate.config.setting import Setting
from popgate.config.values import size_between, whole_number
from popgate.domain import quotas
from popgate.domain.message import HEADERS_BYTES_MAX
from popgate.domain.quotas import DEFAULTS


def _number(name: str, text: str, maximum: int) -> Setting:
    return Setting(
        name=name,
        help=text,
        parse=whole_number(1, maximum),
        default=getattr(DEFAULTS, name),
        metavar="NUMBER",
    )


def _size(name: str, text: str, minimum: int, maximum: int) -> Setting:
    default: int = getattr(DEFAULTS, name)
    return Setting(
        name=name,
        help=text,
        parse=size_between(minimum, maximum),
        default=default,
        default_text=f"{default >> 10}KiB",
        metavar="SIZE",
    )


QUOTA_SETTINGS: Sequence[Setting] = (
    _number("topics_max", "maximum number of topics", quotas.TOPICS_MAX),
    _number("groups_per_topic_max", "maximum number of groups of a topic", quotas.GROUPS_PER_TOPIC_MAX),
    _number(
        "queues_max",
        "maximum number of queues of all groups of all topics together, without their dead-letter queues",
        quotas.QUEUES_MAX,
    ),
    _number("locks_max", "maximum number of locks", quotas.LOCKS_MAX),
    _number("lease_groups_max", "maximum number of unacked lease groups of a group", quotas.LEASE_GROUPS_MAX),
    _number("headers_max", "maximum number of headers of a published message", quotas.HEADERS_MAX),
    _size(
        "headers_bytes_max",
        "maximum size of all headers of a published message together",
        quotas.HEADERS_BYTES_MIN,
        HEADERS_BYTES_MAX,
    ),
    _size(
        "filter_bytes_max",
        "maximum size of a pop's filter, names and values together",
        quotas.FILTER_BYTES_MIN,
        quotas.FILTER_BYTES_MAX,
    ),
    _number(
        "metrics_groups_max",
        "maximum number of groups with their own rows in /metrics; all others share rows",
        quotas.METRICS_GROUPS_MAX,
    ),
)
