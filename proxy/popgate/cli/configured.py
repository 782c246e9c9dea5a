"""Converts parsed flags to the options of a proxy, for the commands that accept settings of ``popgate serve``."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from popgate import config
from popgate.cli.endings import CommandFailed, ExitCode
from popgate.cli.printing import complain
from popgate.config import ServeOptions
from popgate.config.setting import Setting
from popgate.domain.errors import StartupError


def options_of(
    arguments: argparse.Namespace, settings: Iterable[Setting], *, serves: bool = False, on_broker: bool = False
) -> ServeOptions:
    """Return the options of a proxy from flags, environment variables and the configuration file, in this order of
    precedence. ``serves`` as for ``config.serve_options``. If ``on_broker``, the options must name a RabbitMQ.

    A command that does not serve clients warns if other users can read credentials in the file.

    Raises: CommandFailed for wrong or missing values.
    """
    environment = config.environment()
    given = {setting.name: getattr(arguments, setting.name, None) for setting in settings}
    flags = {name: value for name, value in given.items() if value is not None}
    file = arguments.config or environment.get("POPGATE_CONFIG")
    try:
        options = config.serve_options(flags, environment, Path(file) if file else None, serves=serves)
    except StartupError as error:
        raise CommandFailed(error.detail, ExitCode.USAGE) from error
    if not serves:  # a proxy logs them
        for reason in options.exposed_files:
            complain(f"other users can read credentials: {reason}")
    if on_broker and not options.amqp_urls:
        raise CommandFailed("name the broker with --amqp-url (or POPGATE_AMQP_URL)", ExitCode.USAGE)
    return options
