"""``popgate serve``: runs the proxy."""

import argparse
import asyncio
import sys
from pathlib import Path

from popgate import bootstrap, config
from popgate.domain.errors import StartupError

EPILOG = """\
Every setting is a flag, a variable (POPGATE_PORT for --port) or a key of the TOML file (port = 8080), in this order of
precedence. Without --amqp-url the embedded broker keeps the messages in the data folder.
"""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "serve", help="run the proxy", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (POPGATE_CONFIG)")
    for setting in config.SETTINGS:
        text = f"{setting.help} (default: {setting.shown_default()})".replace("%", "%%")
        parser.add_argument(setting.flag, dest=setting.name, metavar=setting.metavar, help=text)
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Run until a signal. Exit code 1, with one clear message, where the proxy can't start or has to stop."""
    environment = config.environment()
    flags = {
        setting.name: value for setting in config.SETTINGS if (value := getattr(arguments, setting.name)) is not None
    }
    file = arguments.config or environment.get("POPGATE_CONFIG")
    try:
        options = config.serve_options(flags, environment, Path(file) if file else None)
        return asyncio.run(bootstrap.serve(options))
    except StartupError as error:
        print(f"popgate: {error.detail}", file=sys.stderr)
        return 1
