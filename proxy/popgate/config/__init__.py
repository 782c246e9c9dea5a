"""Reads the configuration from flags, ``POPGATE_*`` variables and a TOML file, and checks it at start.

``options`` describes every setting. The help text, the names of flags and variables, and the documentation are derived
from this description (decision 21). A flag overrides a variable, a variable overrides the file, and the file overrides
the default. All wrong settings are reported together. No other part of popgate reads environment variables.
"""

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from popgate.config.options import SETTINGS, ServeOptions
from popgate.config.replica_values import management_urls_of
from popgate.config.values import PORT_MAX, HostPort
from popgate.domain.errors import StartupError
from popgate.domain.features import Feature
from popgate.domain.hosts import ANY_HOST, is_loopback

__all__ = ["ServeOptions", "environment", "serve_options"]

CLIENT_VARIABLES = frozenset({"POPGATE_URL", "POPGATE_TOKEN", "POPGATE_CONFIG"})
"""``POPGATE_*`` variables that are not settings of the proxy: the client commands read them, or they name the
configuration file."""

_SERVICE_LINK = re.compile(r"POPGATE_SERVICE_(HOST|PORT)(_\w+)?|POPGATE_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?")


def serve_options(flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None) -> ServeOptions:
    """Return the options of ``popgate serve`` from flags, environment variables and the configuration file.

    ``flags`` contains the texts of the given flags by setting name.

    Raises: StartupError with one line for each wrong setting, which names the setting and describes a correct value.
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
    problems = problems or _contradictions(values)
    if problems:
        raise StartupError("the configuration is wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    if values["auto_create"] is None:
        values["auto_create"] = not values["amqp_url"]
    if values["allowed_hosts"] is None:
        values["allowed_hosts"] = frozenset(() if is_loopback(values["host"]) else (ANY_HOST,))
    if not values["management_url"]:
        values["management_url"] = management_urls_of(values["amqp_url"])
    return ServeOptions(**{setting.option_name: values[setting.name] for setting in SETTINGS})


def _contradictions(values: Mapping[str, Any]) -> list[str]:
    """Return the problems of values that are valid individually, but not in combination."""
    problems: list[str] = []
    with_redis, workers = values["redis_url"] is not None, values["workers"]
    if with_redis and not values["amqp_url"]:
        problems.append("redis_url: needs amqp_url, because the embedded broker keeps its state with its messages")
    if values["owns_queues"] is False and not with_redis:
        problems.append("owns_queues: without redis_url a proxy runs alone, and no other proxy could own the queues")
    if values["replica_keeper"] and not values["amqp_url"]:
        problems.append("replica_keeper: needs amqp_url; the embedded broker has no replicas")
    if workers > 1 and not with_redis:
        problems.append(f"workers: {workers} workers form a cluster; give amqp_url and redis_url, or set it to 1")
    problems += _half_offered(values["features"])
    address: HostPort | None = values["peer_address"]
    if address is not None and address.port and address.port + workers - 1 > PORT_MAX:
        problems.append(
            f"peer_address: each of the {workers} workers needs a port, from this one upwards; give a lower one"
        )
    return problems


def _half_offered(features: Collection[Feature]) -> list[str]:
    """Return the problems of ``features`` that need other features."""
    if not {Feature.POP, Feature.PULL} & set(features):
        return ["features: without pop and pull no client could consume; name at least one of them"]
    needs = {Feature.CONSUME_MODE: (Feature.POP, Feature.PULL), Feature.LEASE_GROUPS: (Feature.POP,)}
    return [
        f"features: {feature} needs {needed}; name both, or none"
        for feature, many in needs.items()
        for needed in many
        if feature in features and needed not in features
    ]


def _without_service_links(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environment`` without the variables that Kubernetes sets in every pod for a service named popgate.

    The names of these variables look like settings of popgate.
    """
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
    """Return a hint with the known name that is most similar to ``wrong``, or an empty text if none is similar.

    All names start with ``prefix``, which is not compared.
    """
    close = get_close_matches(wrong.removeprefix(prefix), [name.removeprefix(prefix) for name in known], n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def environment() -> Mapping[str, str]:
    return os.environ
