"""Defines ``popgate serve``, which runs the proxy."""

import argparse
import gc

from popgate.cli.configured import options_of
from popgate.cli.endings import CommandFailed
from popgate.cli.flags import Commands, Parser
from popgate.config.options import SETTINGS
from popgate.config.setting import Setting
from popgate.config.values import switch
from popgate.domain.errors import StartupError

EPILOG = """\
Every setting can be a flag, a variable (POPGATE_PORT for --port) or a key of the TOML file (port = 8080), in this order
of precedence. Without --amqp-url the embedded broker keeps the messages in the data folder.

examples:
  popgate serve
  popgate serve --port 9000 --data-dir ./data
  popgate serve --amqp-url amqp://user:password@rabbitmq:5672/
  popgate serve --amqp-url amqp://user:password@rabbitmq:5672/ --redis-url redis://redis:6379/0 --workers 4
"""


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser(
        "serve",
        help="run the proxy",
        description="Run the proxy, until Ctrl-C or SIGTERM.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (POPGATE_CONFIG)")
    for setting in SETTINGS:
        add_setting(parser, setting.flag, setting)
    parser.set_defaults(run=serve)


def add_setting(parser: Parser, flag: str, setting: Setting, *, hidden: bool = False) -> None:
    """Add the flag of a setting to the parser. A switch without a value means true. A ``hidden`` flag works, but the
    help does not show it."""
    text = f"{setting.help} (default: {setting.shown_default()})".replace("%", "%%")
    text = argparse.SUPPRESS if hidden else text
    if setting.parse is switch:
        parser.add_argument(flag, dest=setting.name, metavar=setting.metavar, help=text, nargs="?", const="true")
    else:
        parser.add_argument(flag, dest=setting.name, metavar=setting.metavar, help=text)


def serve(arguments: argparse.Namespace) -> int:
    """Run the proxy until a signal arrives, and return the exit code. Raises: CommandFailed if the proxy can't
    start."""
    options = options_of(arguments, SETTINGS, serves=True)
    gc.disable()  # loading creates little garbage: `bootstrap.serve` enables the collector when all modules are loaded
    try:
        # Slow to load, and not needed by client commands or if the configuration is wrong.
        if options.workers > 1:
            from popgate.bootstrap.workers import supervise

            return supervise(options)
        from popgate import bootstrap
        from popgate.runtime import event_loop

        return event_loop.run(bootstrap.serve(options), options.event_loop)
    except StartupError as error:
        raise CommandFailed(error.detail) from error
