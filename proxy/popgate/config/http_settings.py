"""The settings of the HTTP interface: by which names it is known, and how much clients may take of it."""

from collections.abc import Sequence

from popgate.config.setting import Setting
from popgate.config.values import host_names

HTTP_SETTINGS: Sequence[Setting] = (
    Setting(
        name="allowed_hosts",
        help=(
            "host names under which requests may address the proxy, with commas between them, beside localhost and IP "
            "addresses; * allows every name"
        ),
        parse=host_names,
        default=None,
        default_text="*, but none where --host is a loopback address",
        metavar="NAMES",
    ),
)
