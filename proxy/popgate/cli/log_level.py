"""Defines ``popgate log-level``, which shows or changes the level of the log of running proxies."""

import argparse
from urllib.parse import urlencode

from popgate.cli.connecting import open_client
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.flags import TIMEOUT_SECONDS, Commands, add_command, seconds
from popgate.cli.printing import Column, JsonObject, Printer, complain, duration, field, output_of
from popgate_client.exchange import Exchanges

SECONDS_MAX = 7 * 86_400
EPILOG = """\
Without a level, it shows the present one of each proxy, and the one in its settings. A change applies to all proxies of
the cluster, or to the one that --proxy names, until they are restarted. With --duration-seconds, the level in the
settings applies again after that time.

At debug, each proxy logs every request with its operation, topic, status, duration and id.

examples:
  popgate log-level
  popgate log-level debug --duration-seconds 300
  popgate log-level info
"""
COLUMNS = (
    Column("PROXY", field("proxy")),
    Column("LEVEL", field("level", missing="unknown")),
    Column("CONFIGURED", field("configured", missing="unknown")),
    Column("TIME LEFT", lambda row: duration(row["seconds_left"])),
)


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "log-level", log_level, help="show or change what proxies log", epilog=EPILOG)
    parser.add_argument("level", nargs="?", choices=("debug", "info", "warning", "error"), help="the new level")
    parser.add_argument(
        "--duration-seconds",
        type=seconds(0.1, SECONDS_MAX),
        metavar="SECONDS",
        help="how long the new level applies (default: until the proxy is restarted)",
    )
    parser.add_argument("--proxy", metavar="ID", help="only this proxy (popgate cluster lists the ids)")


def log_level(arguments: argparse.Namespace) -> int:
    if arguments.level is None and arguments.duration_seconds is not None:
        raise CommandFailed("name the new level: debug, info, warning or error", ExitCode.USAGE)
    path = "/v1/admin/log-level"
    if arguments.proxy is not None:
        path += "?" + urlencode({"proxy": arguments.proxy})
    exchanges = Exchanges(retry_seconds_max=getattr(arguments, "timeout", TIMEOUT_SECONDS))
    with open_client(arguments) as client:
        if arguments.level is None:
            answer: JsonObject = client.perform(exchanges.read(path))
        else:
            change = {"level": arguments.level}
            if arguments.duration_seconds is not None:
                change["seconds"] = arguments.duration_seconds
            answer = client.perform(exchanges.put(path, change))
    Printer(COLUMNS, output_of(arguments)).print(answer["proxies"])
    silent = [row["proxy"] for row in answer["proxies"] if row["level"] is None]
    if silent:
        complain(f"no answer from: {', '.join(silent)}")
        return ExitCode.FAILED
    return ExitCode.OK
