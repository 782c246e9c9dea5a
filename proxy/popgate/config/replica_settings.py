"""The settings of the replica keeper, both beside a proxy and in ``popgate replicas``."""

from collections.abc import Sequence

from popgate.config.replica_values import (
    entry_point_name,
    management_urls,
    node_zones,
    proxy_urls,
    replica_policies,
    tool_prefixes,
)
from popgate.config.setting import Setting
from popgate.config.values import seconds, switch, whole_number
from popgate.domain.replica_plan import ReplicaLimits
from popgate.domain.replica_wanted import REPLICAS_MAX

BUILT_IN_PLACEMENT = "spread"
DAY = 86_400.0
_LIMITS = ReplicaLimits()

REPLICA_KEEPER = Setting(
    name="replica_keeper",
    help=(
        "keep a minimum number of replicas of all quorum queues and streams; one keeper of each virtual host is active"
    ),
    parse=switch,
    default=False,
    default_text="false",
    metavar="BOOL",
)
REPLICA_SETTINGS: Sequence[Setting] = (
    Setting(
        name="management_url",
        help=(
            "RabbitMQ's management API, with credentials: one URL, or the URLs of several nodes with commas between "
            "them"
        ),
        parse=management_urls,
        default=(),
        default_text="port 15672 (TLS: 15671) of the hosts of --amqp-url",
        metavar="URLS",
        option="management_urls",
    ),
    Setting(
        name="policy_check_seconds",
        help=(
            "how often to check, through the management API, for policies that drop or move messages of popgate's "
            "queues, and warn; 0: never"
        ),
        parse=seconds(0, 86_400),
        default=60.0,
        metavar="SECONDS",
    ),
    Setting(
        name="replica_commands",
        help=(
            "how to run RabbitMQ's command line tools: words to put before them, such as 'ssh rabbit-1', with commas "
            "between alternatives; or local, or none"
        ),
        parse=tool_prefixes,
        default=None,
        default_text="local, if they are installed",
        metavar="WORDS",
    ),
    Setting(
        name="min_replicas",
        help=(
            "minimum number of replicas of queues for which no argument and no policy sets it; 0: leave such queues "
            "alone"
        ),
        parse=whole_number(0, REPLICAS_MAX),
        default=3,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_policies",
        help=(
            "replicas by queue name: PATTERN=NUMBER with commas between them; * matches anything, and the most "
            "specific pattern applies"
        ),
        parse=replica_policies,
        default=(),
        default_text="none",
        metavar="LIST",
    ),
    Setting(
        name="replica_groups_url",
        help=(
            "for popgate replicas: the URL of a proxy that knows the groups' min_replicas, or several with commas "
            "between them; a proxy's own keeper does not need it"
        ),
        parse=proxy_urls,
        default=(),
        default_text="none: the groups' min_replicas are ignored",
        metavar="URLS",
        option="replica_groups_urls",
    ),
    Setting(
        name="replica_zones",
        help="the zones over which replicas are spread: NODE=ZONE with commas between them",
        parse=node_zones,
        default=(),
        default_text="the nodes' tag zone (RabbitMQ 4)",
        metavar="LIST",
    ),
    Setting(
        name="replica_placement",
        help="which node gets a new replica: spread, or the name of an entry point of the group popgate.placement",
        parse=entry_point_name,
        default=BUILT_IN_PLACEMENT,
        metavar="NAME",
    ),
    Setting(
        name="replica_check_interval_seconds",
        help="how often each queue is checked",
        parse=seconds(1, DAY),
        default=30.0,
        metavar="SECONDS",
    ),
    Setting(
        name="replica_recovery_interval_seconds",
        help="how long a queue must have lacked replicas before the keeper adds one",
        parse=seconds(0, 30 * DAY),
        default=_LIMITS.recovery_interval_seconds,
        metavar="SECONDS",
    ),
    Setting(
        name="replica_forget_after_seconds",
        help="remove the replica on a node that has been down for this long, once it is replaced",
        parse=seconds(1, 365 * DAY),
        default=None,
        default_text="never, unless the node is removed from the cluster",
        metavar="SECONDS",
    ),
    Setting(
        name="replica_changes_max",
        help="maximum number of queues that are changed at a time",
        parse=whole_number(1, 100),
        default=_LIMITS.changes_max,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_changes_per_node_max",
        help="maximum number of these changes on one node",
        parse=whole_number(1, 100),
        default=_LIMITS.changes_per_node_max,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_stall_messages_max",
        help="maximum backlog, in messages, of a queue that accepts no messages until its new replica has copied it",
        parse=whole_number(0, 10**12),
        default=_LIMITS.stall_messages_max,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_move_leaders",
        help=(
            "move the leader of a quorum queue to the node to which its active consumer is connected, if it has a "
            "replica there (RabbitMQ 4.2.9, 4.3.3 and newer)"
        ),
        parse=switch,
        default=False,
        default_text="false",
        metavar="BOOL",
    ),
    Setting(
        name="replica_allow_stall",
        help="also add replicas to queues with a larger backlog, although nothing can be published to them meanwhile",
        parse=switch,
        default=False,
        default_text="false",
        metavar="BOOL",
    ),
)
