"""Collects all commands except ``popgate serve``: the commands that send requests to a proxy, and ``popgate replicas``,
``restore``, ``keys``, ``secrets``, ``config``, ``doctor`` and ``prove``."""

import argparse

from popgate.cli import (
    backup,
    cluster,
    completion,
    config,
    dead_letters,
    doctor,
    explaining,
    groups,
    keys,
    lease_groups,
    locks,
    log_level,
    mode,
    pop,
    prove,
    publish,
    replicas,
    secrets,
    settle,
    stats,
    tail,
    top,
    topics,
)
from popgate.cli.client_errors import code_of, explain
from popgate.cli.connecting import url_of
from popgate.cli.endings import CommandFailed
from popgate.cli.flags import Commands
from popgate.cli.known_names import suggested_name
from popgate_client import PopgateError


def add_parsers(commands: Commands) -> None:
    """Add the parsers of all commands except ``serve``, in the order in which the help shows them."""
    publish.add_parser(commands)
    pop.add_parser(commands)
    settle.add_parsers(commands)
    tail.add_parser(commands)
    stats.add_parser(commands)
    top.add_parser(commands)
    explaining.add_parsers(commands)
    cluster.add_parser(commands)
    log_level.add_parser(commands)
    topics.add_parser(commands)
    groups.add_parser(commands)
    mode.add_parser(commands)
    lease_groups.add_parser(commands)
    dead_letters.add_parsers(commands)
    locks.add_parser(commands)
    replicas.add_parser(commands)
    backup.add_parsers(commands)
    keys.add_parser(commands)
    secrets.add_parser(commands)
    config.add_parser(commands)
    doctor.add_parser(commands)
    prove.add_parser(commands)
    completion.add_parser(commands)


def run_command(parsed: argparse.Namespace) -> int:
    """Run the parsed command. Raises: CommandFailed, also for the errors of the client library."""
    try:
        code: int = parsed.run(parsed)
    except PopgateError as error:
        line = explain(error, url_of(parsed), suggested_name(error, parsed))
        raise CommandFailed(line, code_of(error)) from error
    return code
