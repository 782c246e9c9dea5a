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
    help="keep a minimum of replicas of all quorum queues and streams; of all keepers of a virtual host one is at work",
    parse=switch,
    default=False,
    default_text="false",
    metavar="BOOL",
)
REPLICA_SETTINGS: Sequence[Setting] = (
    Setting(
        name="management_url",
        help="RabbitMQ's management API, with credentials: one URL, or one of each node and commas between them",
        parse=management_urls,
        default=(),
        default_text="port 15672 (TLS: 15671) of the hosts of --amqp-url",
        metavar="URLS",
        option="management_urls",
    ),
    Setting(
        name="policy_check_seconds",
        help=(
            "how often to look, by the management API, for policies that drop or move messages of popgate's queues, "
            "and warn; 0: never"
        ),
        parse=seconds(0, 86_400),
        default=60.0,
        metavar="SECONDS",
    ),
    Setting(
        name="replica_commands",
        help=(
            "how to reach RabbitMQ's command line tools: words to put before them, such as 'ssh rabbit-1', with commas "
            "between several ways; local, or none"
        ),
        parse=tool_prefixes,
        default=None,
        default_text="local, where they are installed",
        metavar="WORDS",
    ),
    Setting(
        name="min_replicas",
        help="how many replicas a queue is to have for which no argument and no policy says so; 0: only those",
        parse=whole_number(0, REPLICAS_MAX),
        default=3,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_policies",
        help=(
            "replicas by names of queues: PATTERN=NUMBER with commas between them; * is anything, and the most "
            "specific pattern counts"
        ),
        parse=replica_policies,
        default=(),
        default_text="none",
        metavar="LIST",
    ),
    Setting(
        name="replica_groups_url",
        help=(
            "for popgate replicas: a proxy that tells which groups have a min_replicas of their own, or several with "
            "commas between them; a proxy's keeper knows by itself"
        ),
        parse=proxy_urls,
        default=(),
        default_text="none: that of groups does not count",
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
        help="how often each queue is looked at",
        parse=seconds(1, DAY),
        default=30.0,
        metavar="SECONDS",
    ),
    Setting(
        name="replica_recovery_interval_seconds",
        help="how long a queue must have been short of replicas before anything is done",
        parse=seconds(0, 30 * DAY),
        default=_LIMITS.recovery_interval_seconds,
        metavar="SECONDS",
    ),
    Setting(
        name="replica_forget_after_seconds",
        help="forget the replica on a node that is down for that long, once it is replaced",
        parse=seconds(1, 365 * DAY),
        default=None,
        default_text="never, unless the node is removed from the cluster",
        metavar="SECONDS",
    ),
    Setting(
        name="replica_changes_max",
        help="how many queues may be under change at a time",
        parse=whole_number(1, 100),
        default=_LIMITS.changes_max,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_changes_per_node_max",
        help="how many of these changes may concern one node",
        parse=whole_number(1, 100),
        default=_LIMITS.changes_per_node_max,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_stall_messages_max",
        help="how large the backlog may be of a queue that can't take messages until its new replica has copied it",
        parse=whole_number(0, 10**12),
        default=_LIMITS.stall_messages_max,
        metavar="NUMBER",
    ),
    Setting(
        name="replica_move_leaders",
        help=(
            "move the leader of a quorum queue to the node to which its active consumer is connected, where it has a "
            "replica (RabbitMQ 4.2.9, 4.3.3 and newer)"
        ),
        parse=switch,
        default=False,
        default_text="false",
        metavar="BOOL",
    ),
    Setting(
        name="replica_allow_stall",
        help="also grow queues with a larger backlog in this way: nothing can be published to them meanwhile",
        parse=switch,
        default=False,
        default_text="false",
        metavar="BOOL",
    ),
)
