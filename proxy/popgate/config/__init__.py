"""Reads the configuration from flags, ``POPGATE_*`` variables and a TOML file, and checks it at start.

``options`` describes every setting. The help text, the names of flags and variables, and the documentation are derived
from this description (decision 21). A flag overrides a variable, a variable overrides the file, and the file overrides
the default. All wrong settings are reported together. No other part of popgate reads environment variables.
"""

import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from popgate.config.contradictions import contradictions
from popgate.config.lines import place_in, with_places
from popgate.config.options import SETTINGS, URL_SETTINGS, ServeOptions
from popgate.config.replica_values import management_urls_of
from popgate.config.security_values import secrets_in
from popgate.domain.errors import StartupError
from popgate.domain.hosts import ANY_HOST, is_loopback
from popgate.runtime.private_files import PrivateFileError, exposure, read_private

__all__ = ["ServeOptions", "environment", "serve_options", "sources"]

CLIENT_VARIABLES = frozenset({"POPGATE_URL", "POPGATE_TOKEN", "POPGATE_TOKEN_FILE", "POPGATE_CONFIG"})
"""``POPGATE_*`` variables that are not settings of the proxy: the client commands read them, or they name the
configuration file."""

_SERVICE_LINK = re.compile(r"POPGATE_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_SERVICE_PORT = re.compile(r"POPGATE_(\w+_)?PORT")


def serve_options(
    flags: Mapping[str, str], environment: Mapping[str, str], file: Path | None, *, serves: bool = True
) -> ServeOptions:
    """Return the options of ``popgate serve`` from flags, environment variables and the configuration file.

    ``flags`` contains the texts of the given flags by setting name. A command that only uses the same settings, and
    ``serves`` no clients, needs no secret and no protection; its options contain no secrets of ``secret_file``.

    Raises: StartupError with one line for each wrong setting, which names the setting and describes a correct value.
    """
    environment = _without_service_links(environment)
    problems: list[str] = []
    exposed: list[str] = []
    from_file = _read_file(file, problems, exposed) if file is not None else {}
    by_variable = {setting.variable: setting for setting in SETTINGS}
    for variable in environment:
        if variable.startswith("POPGATE_") and variable not in by_variable and variable not in CLIENT_VARIABLES:
            problems.append(f"{variable}: no such setting{_suggestion(variable, by_variable, 'POPGATE_')}")
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    for setting in SETTINGS:
        sources: Sequence[tuple[str, object]] = [
            (setting.flag, flags.get(setting.name)),
            (setting.variable, environment.get(setting.variable)),
            (place_in(file, setting.name) if setting.name in from_file else "", from_file.get(setting.name)),
        ]
        where, raw = next(((where, raw) for where, raw in sources if raw is not None), ("", None))
        if raw is not None:
            given[setting.name] = where
        try:
            values[setting.name] = setting.default if raw is None else setting.parse(raw)
        except ValueError as error:
            problems.append(f"{where}: {error}")
    _read_files(values, given, problems, serves=serves)
    problems = problems or with_places(contradictions(values, serves=serves), given)
    if problems:
        raise StartupError("the configuration is wrong:\n" + "\n".join(f"  {problem}" for problem in problems))
    if values["auto_create"] is None:
        values["auto_create"] = not values["amqp_url"]
    if values["allowed_hosts"] is None:
        values["allowed_hosts"] = frozenset(() if is_loopback(values["host"]) else (ANY_HOST,))
    if not values["management_url"]:
        values["management_url"] = management_urls_of(values["amqp_url"])
    options = {setting.option_name: values[setting.name] for setting in SETTINGS}
    return ServeOptions(**options, secrets=values["secrets"], exposed_files=tuple(exposed))


def sources(environment: Mapping[str, str], file: Path | None) -> dict[str, str]:
    """Return where each setting is given, by its name. The settings must be valid, and no flags are given."""
    from_file = {} if file is None else _read_file(file, [], [])
    environment = _without_service_links(environment)
    given: dict[str, str] = {}
    for setting in SETTINGS:
        if setting.variable in environment:
            given[setting.name] = setting.variable
        elif setting.name in from_file:
            given[setting.name] = place_in(file, setting.name)
    return given


def _read_files(values: dict[str, Any], sources: Mapping[str, str], problems: list[str], *, serves: bool) -> None:
    """Replace the URLs in ``values`` that files contain, and add the secrets. Add to ``problems`` what is wrong.

    ``sources`` contains the source of each given value by the name of its setting.
    """
    for name in URL_SETTINGS:
        if _is_one_source(name, sources, problems):
            setting = next(setting for setting in SETTINGS if setting.name == name)
            values[name] = _read_private(values, f"{name}_file", sources, problems, partial(_parse_text, setting.parse))
    values["secrets"] = () if values.get("secret") is None else (values["secret"].encode(),)
    if serves and _is_one_source("secret", sources, problems):
        values["secrets"] = _read_private(values, "secret_file", sources, problems, secrets_in)


def _is_one_source(name: str, sources: Mapping[str, str], problems: list[str]) -> bool:
    """Return whether a file contains the value of ``name``. It is a problem if the value is given as well."""
    file_name = f"{name}_file"
    if name in sources and file_name in sources:
        problems.append(f"{sources[name]}: {sources[file_name]} names a file with the same setting; give one of them")
    return file_name in sources and name not in sources


def _read_private(
    values: Mapping[str, Any],
    name: str,
    sources: Mapping[str, str],
    problems: list[str],
    parse: Callable[[bytes], object],
) -> Any:
    file: Path | None = values.get(name)
    if file is None:  # the name itself is wrong, which ``problems`` says already
        return None
    try:
        content = read_private(file)
    except PrivateFileError as error:
        problems.append(f"{sources[name]}: {error}")
        return None
    try:
        return parse(content)
    except ValueError as error:
        problems.append(f"{sources[name]}: the content of {file} {error}")
    return None


def _parse_text(parse: Callable[[object], object], content: bytes) -> object:
    try:
        text = content.decode().strip()
    except UnicodeDecodeError:  # the text of this error contains the content
        text = ""
    return parse(text)


def _without_service_links(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return ``environment`` without the variables that Kubernetes sets in every pod for a service named popgate.

    Services named popgate-* of the same namespace have such variables, too. Their names look like settings of popgate.
    """
    return {
        variable: value
        for variable, value in environment.items()
        if not _SERVICE_LINK.fullmatch(variable) and not (_SERVICE_PORT.fullmatch(variable) and "://" in value)
    }


def _read_file(file: Path, problems: list[str], exposed: list[str]) -> dict[str, object]:
    """Return the content of the configuration file. Add to ``problems`` what is wrong, and to ``exposed`` why other
    users can read a credential in the file."""
    try:
        with file.open("rb") as stream:
            content = tomllib.load(stream)
            status = os.fstat(stream.fileno())
    except OSError as error:
        problems.append(f"--config {file}: can't be read ({error.strerror})")
        return {}
    except RecursionError:
        problems.append(f"--config {file}: is nested too deeply")
        return {}
    except ValueError as error:  # not TOML, not UTF-8, a date that does not exist, or too long a number
        problems.append(f"--config {file}: is not TOML ({error})")
        return {}
    names = {setting.name for setting in SETTINGS}
    for key in content:
        if key not in names:
            problems.append(f"{place_in(file, key)}: no such setting{_suggestion(key, names)}")
    hidden = [setting.name for setting in SETTINGS if setting.hidden and setting.name in content]
    # A pipe is not readable for others; a shell makes one for `--config <(command)`.
    if hidden and stat.S_ISREG(status.st_mode) and (reason := exposure(file, status)) is not None:
        exposed.append(f"{reason} (it sets {', '.join(hidden)})")
    return content


def _suggestion(wrong: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a hint with the known name that is most similar to ``wrong``, or an empty text if none is similar.

    All names start with ``prefix``, which is not compared.
    """
    close = get_close_matches(wrong.removeprefix(prefix), [name.removeprefix(prefix) for name in known], n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


def environment() -> Mapping[str, str]:
    return os.environ
