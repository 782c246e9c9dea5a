"""Configuration: flags, ``POPGATE_*`` variables and a TOML file become frozen options, checked once at start.

One table says everything about a setting; the help text, the look-up and the documentation come from it. Precedence:
flag, variable, file, default. Every bad key is named at once. Nothing else in popgate reads the environment.
"""

import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from platformdirs import user_data_path

from popgate.domain.errors import StartupError
from popgate.domain.names import QUEUES_MAX
from popgate.domain.receipt import SECRET_BYTES_MIN

CLIENT_VARIABLES = frozenset({"POPGATE_URL", "POPGATE_TOKEN", "POPGATE_CONFIG"})
"""Variables that the command line's client side, or the choice of the file, reads."""

DEDUP_SECONDS_MAX = 3_600.0
"""Every settlement of that time is kept, should its message be published again."""

CONSUMER_TIMEOUT_SECONDS_MAX = 366 * 86_400.0

REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SERVICE_LINK = re.compile(r"POPGATE_SERVICE_(HOST|PORT)(_\w+)?|POPGATE_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")


class HostPort(NamedTuple):
    """Where something is reached. ``port`` 0 is any free one."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Everything that ``popgate serve`` can be told, checked."""

    host: str
    port: int
    data_dir: Path
    amqp_url: str | None
    amqp_heartbeat_seconds: int
    confirm_timeout_seconds: float
    consumer_timeout_seconds: float
    redis_url: str | None
    redis_namespace: str
    peer_address: HostPort | None
    owns_queues: bool
    auto_create: bool
    auto_create_queues: int
    buffer_bytes_max: int
    idle_return_seconds: float
    dedup_seconds: float
    lease_group_seconds_max: float
    secret: str | None
    log_level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. ``parse`` turns text or a TOML value into the option, or raises ValueError saying what is right."""

    name: str
    help: str
    parse: Callable[[object], object]
    default: object
    default_text: str = ""
    metavar: str = "VALUE"

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "POPGATE_" + self.name.upper()

    def shown_default(self) -> str:
        return self.default_text or str(self.default)


def serve_options(flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None) -> ServeOptions:
    """Merge the three sources. ``flags`` are raw texts by setting name.

    Raises: StartupError naming every bad key and what would be right, one a line.
    """
    environment = _without_service_links(environment)
    problems: list[str] = []
    from_file = _read_file(file, problems) if file is not None else {}
    by_variable = {setting.variable: setting for setting in SETTINGS}
    for variable in environment:
        if variable.startswith("POPGATE_") and variable not in by_variable and variable not in CLIENT_VARIABLES:
            problems.append(f"{variable}: no such setting{_suggestion(variable, by_variable, 'POPGATE_')}")
    values: dict[str, Any] = {}
    for setting in SETTINGS:
        sources: Sequence[tuple[str, object]] = [
            (setting.flag, flags.get(setting.name)),
            (setting.variable, environment.get(setting.variable)),
            (f"{setting.name} in {file}", from_file.get(setting.name)),
        ]
        where, raw = next(((where, raw) for where, raw in sources if raw is not None), ("", None))
        try:
            values[setting.name] = setting.default if raw is None else setting.parse(raw)
        except ValueError as error:
            problems.append(f"{where}: {error}")
    if values.get("redis_url") is not None and values.get("amqp_url") is None and not problems:
        problems.append("redis_url: needs amqp_url, for the embedded broker keeps its state beside its messages")
    if values.get("owns_queues") is False and values.get("redis_url") is None and not problems:
        problems.append("owns_queues: without redis_url a proxy is alone, and nobody else would take the queues")
    if problems:
        raise StartupError("the configuration is wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    if values["auto_create"] is None:
        values["auto_create"] = values["amqp_url"] is None
    return ServeOptions(**values)


def _without_service_links(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Kubernetes puts the address of a service named popgate into every pod beside it, under names like ours."""
    return {
        variable: value
        for variable, value in environment.items()
        if not _SERVICE_LINK.fullmatch(variable) and not (variable == "POPGATE_PORT" and "://" in value)
    }


def _read_file(file: Path, problems: list[str]) -> dict[str, object]:
    try:
        with file.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        problems.append(f"--config {file}: can't be read ({error.strerror})")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"--config {file}: is not TOML ({error})")
        return {}
    names = {setting.name for setting in SETTINGS}
    for key in content:
        if key not in names:
            problems.append(f"{key} in {file}: no such setting{_suggestion(key, names)}")
    return content


def _suggestion(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """What may have been meant; ``prefix``, which all names share, is no likeness."""
    close = get_close_matches(wrong.removeprefix(prefix), [name.removeprefix(prefix) for name in known], n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def _text(raw: object) -> str:
    if not isinstance(raw, str) or not raw:
        raise ValueError(f"must be a text, not {raw!r}")
    return raw


def _hidden_text(raw: object) -> str:
    """Of a value that holds a credential: no complaint repeats it, not even one that has a wrong type."""
    if not isinstance(raw, str) or not raw:
        raise ValueError("must be a text in quotes, and not empty")
    return raw


def _whole(minimum: int, maximum: int) -> Callable[[object], int]:
    def parse(raw: object) -> int:
        try:
            value = int(raw) if isinstance(raw, (str, int)) and not isinstance(raw, bool) else None
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise ValueError(f"must be a whole number from {minimum} to {maximum}, not {raw!r}")
        return value

    return parse


def _seconds(minimum: float, maximum: float) -> Callable[[object], float]:
    def parse(raw: object) -> float:
        try:
            value = float(raw) if isinstance(raw, (str, int, float)) and not isinstance(raw, bool) else None
        except ValueError:
            value = None
        if value is None or not minimum <= value <= maximum:
            raise ValueError(f"must be seconds from {minimum:g} to {maximum:g}, not {raw!r}")
        return value

    return parse


def _switch(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    if not isinstance(raw, str) or raw.lower() not in words:
        raise ValueError(f"must be true or false, not {raw!r}")
    return words[raw.lower()]


def _bytes(raw: object) -> int:
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(raw)) if not isinstance(raw, bool) else None
    if match is None or match[2].lower() not in units or int(match[1]) * units[match[2].lower()] < 1 << 20:
        raise ValueError(f"must be a size of at least 1MiB, such as 256MiB, not {raw!r}")
    return int(match[1]) * units[match[2].lower()]


def _amqp_url(raw: object) -> str:
    url = _hidden_text(raw)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("amqp", "amqps") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("must be a URL such as amqp://user:password@host:5672/vhost")
    return url


def _redis_url(raw: object) -> str:
    url = _hidden_text(raw)
    if urlsplit(url).scheme not in REDIS_SCHEMES:
        raise ValueError(f"must be a URL such as redis://host:6379/0; {', '.join(REDIS_SCHEMES)} are understood")
    return url


def _host_port(raw: object) -> HostPort:
    match = _HOST_PORT.fullmatch(raw) if isinstance(raw, str) else None
    if match is None or int(match[3]) > 65_535:
        raise ValueError(f"must be host:port, such as 10.0.0.7:9000 or [fd00::7]:9000, not {raw!r}")
    host = match[1] or match[2]
    if _is_any_address(host):
        raise ValueError(f"must be an address at which others reach this proxy, not {raw!r}")
    return HostPort(host, int(match[3]))


def _is_any_address(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


def _name(raw: object) -> str:
    if not isinstance(raw, str) or _NAME.fullmatch(raw) is None:
        raise ValueError(f"must be 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-', not {raw!r}")
    return raw


def _secret(raw: object) -> str:
    secret = _hidden_text(raw)
    if len(secret.encode()) < SECRET_BYTES_MIN:
        raise ValueError(f"must be at least {SECRET_BYTES_MIN} bytes long")
    return secret


def _one_of(*words: str) -> Callable[[object], str]:
    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw.lower() not in words:
            raise ValueError(f"must be one of {', '.join(words)}, not {raw!r}")
        return raw.lower()

    return parse


def _path(raw: object) -> Path:
    return Path(_text(raw)).expanduser().absolute()


SETTINGS: Sequence[Setting] = (
    Setting(name="host", help="address to listen on", parse=_text, default="127.0.0.1", metavar="ADDRESS"),
    Setting(name="port", help="port to listen on", parse=_whole(1, 65_535), default=8080, metavar="PORT"),
    Setting(
        name="data_dir",
        help="folder for everything durable",
        parse=_path,
        default=user_data_path("popgate"),
        default_text="the platform's data folder for popgate",
        metavar="FOLDER",
    ),
    Setting(
        name="amqp_url",
        help="RabbitMQ to stand on; without it the embedded broker is used",
        parse=_amqp_url,
        default=None,
        default_text="embedded broker",
        metavar="URL",
    ),
    Setting(
        name="amqp_heartbeat_seconds",
        help="how fast a dead AMQP connection is noticed",
        parse=_whole(1, 600),
        default=5,
        metavar="SECONDS",
    ),
    Setting(
        name="confirm_timeout_seconds",
        help="how long a publish waits for RabbitMQ's confirm",
        parse=_seconds(1, 600),
        default=15.0,
        metavar="SECONDS",
    ),
    Setting(
        name="consumer_timeout_seconds",
        help="RabbitMQ's consumer_timeout: longer leases are kept by taking their messages anew at half of it",
        parse=_seconds(1, CONSUMER_TIMEOUT_SECONDS_MAX),
        default=1_800.0,
        metavar="SECONDS",
    ),
    Setting(
        name="redis_url",
        help="Redis that keeps the state in place of the data folder; needs --amqp-url",
        parse=_redis_url,
        default=None,
        default_text="the data folder",
        metavar="URL",
    ),
    Setting(
        name="redis_namespace",
        help="keeps several popgates in one Redis apart",
        parse=_name,
        default="default",
        metavar="NAME",
    ),
    Setting(
        name="peer_address",
        help="where the other proxies on the same Redis reach this one; port 0 is any free one",
        parse=_host_port,
        default=None,
        default_text="the local address that leads to Redis, any free port",
        metavar="HOST:PORT",
    ),
    Setting(
        name="owns_queues",
        help="whether this proxy takes queues; one that does not only passes requests on to the others",
        parse=_switch,
        default=True,
        default_text="true",
        metavar="BOOL",
    ),
    Setting(
        name="auto_create",
        help="publishing creates unknown topics, popping unknown groups",
        parse=_switch,
        default=None,
        default_text="true when embedded, false on RabbitMQ",
        metavar="BOOL",
    ),
    Setting(
        name="auto_create_queues",
        help="queues of a topic that was created by use",
        parse=_whole(1, QUEUES_MAX),
        default=4,
        metavar="NUMBER",
    ),
    Setting(
        name="buffer_bytes_max",
        help="memory for messages held by the proxy: bodies, and 1 KiB beside each",
        parse=_bytes,
        default=256 << 20,
        default_text="256MiB",
        metavar="SIZE",
    ),
    Setting(
        name="idle_return_seconds",
        help="after that long without a pop, buffered messages go back to the broker",
        parse=_seconds(0.1, 86_400),
        default=30.0,
        metavar="SECONDS",
    ),
    Setting(
        name="dedup_seconds",
        help="for how long a dedup_id is published once; the same on every proxy",
        parse=_seconds(1, DEDUP_SECONDS_MAX),
        default=300.0,
        metavar="SECONDS",
    ),
    Setting(
        name="lease_group_seconds_max",
        help="how long a lease group may hold its messages without a break, however often it is extended",
        parse=_seconds(1, 30 * 86_400),
        default=43_200.0,
        metavar="SECONDS",
    ),
    Setting(
        name="secret",
        help=(
            "signs receipt handles, and proxies know each other by it; the same on every proxy (better given as "
            "POPGATE_SECRET than as a flag)"
        ),
        parse=_secret,
        default=None,
        default_text="generated into the data folder, or into Redis, where all proxies find it",
        metavar="TEXT",
    ),
    Setting(
        name="log_level",
        help="debug, info, warning or error",
        parse=_one_of("debug", "info", "warning", "error"),
        default="info",
        metavar="LEVEL",
    ),
)


def environment() -> Mapping[str, str]:
    return os.environ
