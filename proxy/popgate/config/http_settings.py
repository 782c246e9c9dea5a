"""The settings of the HTTP interface: its host names, and the limits for clients."""

from collections.abc import Sequence

from popgate.config.setting import Setting
from popgate.config.values import host_names, seconds, size_between, whole_number

HTTP_SETTINGS: Sequence[Setting] = (
    Setting(
        name="allowed_hosts",
        help=(
            "host names under which clients may address the proxy, with commas between them, besides localhost and "
            "IP addresses; * allows any name"
        ),
        parse=host_names,
        default=None,
        default_text="*, or none if --host is a loopback address",
        metavar="NAMES",
    ),
    Setting(
        name="connections_max",
        help=(
            "maximum number of client connections in each process; at most three quarters of the files that it may "
            "have open (ulimit -Hn)"
        ),
        parse=whole_number(1, 1_000_000),
        default=20_000,
        metavar="NUMBER",
    ),
    Setting(
        name="connection_idle_seconds",
        help="time after which a connection is closed if it is idle, or if its client reads nothing of an answer",
        parse=seconds(1, 3_600),
        default=75.0,
        metavar="SECONDS",
    ),
    Setting(
        name="head_bytes_max",
        help="maximum size of a request's first line and headers",
        parse=size_between(1 << 10, 1 << 20),
        default=32 << 10,
        default_text="32KiB",
        metavar="SIZE",
    ),
    Setting(
        name="head_fields_max",
        help="maximum number of headers of a request",
        parse=whole_number(10, 10_000),
        default=100,
        metavar="NUMBER",
    ),
    Setting(
        name="path_bytes_max",
        help="maximum size of a request's path with its query",
        parse=size_between(512, 1 << 20),
        default=8 << 10,
        default_text="8KiB",
        metavar="SIZE",
    ),
    Setting(
        name="head_seconds",
        help="time for a request's first line and headers to arrive, from their first byte on",
        parse=seconds(0.5, 600),
        default=10.0,
        metavar="SECONDS",
    ),
    Setting(
        name="body_bytes_per_second_min",
        help="minimum average bytes per second at which a body must arrive, after its first --head-seconds",
        parse=whole_number(1, 1 << 30),
        default=1 << 10,
        metavar="NUMBER",
    ),
    Setting(
        name="bodies_bytes_max",
        help="memory of each process for large requests that are not answered yet",
        parse=size_between(64 << 20, 1 << 40),
        default=256 << 20,
        default_text="256MiB",
        metavar="SIZE",
    ),
    Setting(
        name="parked_pops_max",
        help=(
            "maximum number of pops that wait for a message in each process; at most three quarters of its connections"
        ),
        parse=whole_number(1, 1_000_000),
        default=20_000,
        metavar="NUMBER",
    ),
    Setting(
        name="parked_pops_per_group_max",
        help="maximum number of pops that wait for a message of one group in each process",
        parse=whole_number(1, 1_000_000),
        default=15_000,
        metavar="NUMBER",
    ),
)
